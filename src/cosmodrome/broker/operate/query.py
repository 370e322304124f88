"""Messages by their log offset and by key: what tools use to look at one message."""

from __future__ import annotations

from collections.abc import Iterable

from cosmodrome.env.options import BrokerOptions
from cosmodrome.errors import Code, ProtocolError, Refused
from cosmodrome.layout import FRAME_BYTES_MAX
from cosmodrome.store.store import Store
from cosmodrome.wire.commands.consume import QueryMessage, QueryMessageReply, ViewMessageById
from cosmodrome.wire.names import check_topic
from cosmodrome.wire.record import decode_record
from cosmodrome.wire.table import Call, Reply

# Room for the header of the answer, so that the frame stays within what peers accept.
ANSWER_BYTES_MAX = FRAME_BYTES_MAX - 64 * 1024

KEY_CHARACTERS_MAX = 32_767


class Query:
    def __init__(self, options: BrokerOptions, store: Store) -> None:
        self._store = store
        self._options = options

    @ViewMessageById.handler
    def view_message_by_id(self, ask: ViewMessageById, call: Call) -> Reply:
        record = self._store.record(ask.offset) if ask.offset >= 0 else None
        if record is None:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"No message begins at log offset {ask.offset}; it was deleted, or the id belongs"
                " to another broker.",
            )
        return Reply(body=record)

    @QueryMessage.handler
    def query_message(self, ask: QueryMessage, call: Call) -> QueryMessageReply:
        check_topic(ask.topic)
        count_max = ask.max_num
        if ask.unique_key_query:
            count_max = self._options.default_query_max_num
        if not ask.key or len(ask.key) > KEY_CHARACTERS_MAX or count_max <= 0:
            return _none_found(ask)
        found = self._store.find(
            ask.topic, ask.key, count_max, ask.begin_timestamp, ask.end_timestamp
        )
        fitting = (record for record in found.records if _topic_of(record) == ask.topic)
        records = list(_within_frame(fitting))
        if not records:
            return _none_found(ask)
        return QueryMessageReply(
            index_last_update_timestamp=found.last_update_ms,
            index_last_update_phyoffset=found.last_update_offset,
            body=b"".join(records),
        )


def _none_found(ask: QueryMessage) -> QueryMessageReply:
    # Compat: upstream answers the header fields here too, as zeros.
    return QueryMessageReply(
        code=Code.QUERY_NOT_FOUND,
        remark=f"No message of {ask.topic} has the key {ask.key[:255]!r} between"
        f" {ask.begin_timestamp} and {ask.end_timestamp}; check the key and the time range.",
        index_last_update_timestamp=0,
        index_last_update_phyoffset=0,
    )


def _topic_of(record: bytes) -> str | None:
    """The index finds by a hash; who asks for one topic must not get messages of another."""
    try:
        return decode_record(record).topic
    except ProtocolError:
        return None


def _within_frame(records: Iterable[bytes]) -> Iterable[bytes]:
    left = ANSWER_BYTES_MAX
    for record in records:
        left -= len(record)
        if left < 0:
            return
        yield record
