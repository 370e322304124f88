"""Transactions of one account against another that knows everything about them but the secret."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
from tests.unit.access.push_kit import ACCOUNTS, ADMIN, OWNER, STRANGER, Client, until, world

from cosmodrome.errors import Refused
from cosmodrome.wire import commands
from cosmodrome.wire.message import parse_offset_message_id
from cosmodrome.wire.record import decode_record, encode_record
from cosmodrome.wire.table import Command

SOON: dict[str, Any] = {"transaction_check_interval": 10, "transaction_time_out": 0}
CHECK = 39
COMMIT, ROLLBACK = 8, 12


async def test_a_half_is_shown_only_to_producers_that_may_publish_to_its_topic(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path, **SOON, transaction_check_max=1000) as here:
        owner, stranger = here.client(OWNER), here.client(STRANGER)
        await stranger.beat("nosy", producer="tx")
        await owner.send_half("Secret", b"for the owner only")
        # As if nobody were connected.
        await until(lambda: "transaction_without_producer group=tx" in caplog.text)
        await owner.beat("honest", producer="tx")
        await until(lambda: len(owner.seen.asks[CHECK]) >= 3)
        assert b"for the owner only" in owner.seen.asks[CHECK][0].body
        assert await stranger.got(CHECK) == []


async def test_what_an_account_may_do_counts_when_the_producer_is_asked(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path, **SOON) as here:
        owner, admin = here.client(OWNER), here.client(ADMIN)
        await owner.beat("honest", producer="tx")
        await admin.call(commands.DeleteAclConfig(access_key=OWNER))
        await admin.send_half("Secret", b"not for those who left")
        await until(lambda: "transaction_without_producer group=tx" in caplog.text)
        assert owner.seen.asks[CHECK] == []


async def test_a_producer_at_a_white_address_is_asked_as_it_may_end_transactions(
    tmp_path: pathlib.Path,
) -> None:
    white = "globalWhiteRemoteAddresses: [127.0.0.1]\n" + ACCOUNTS
    async with world(tmp_path, white, **SOON) as here:
        unsigned = here.client(None)
        await unsigned.beat("somebody", producer="tx")
        await unsigned.send_half("Secret", b"for the network")
        await until(lambda: unsigned.seen.asks[CHECK])


async def forge(stranger: Client, half: commands.SendReply) -> int:
    """Send a message whose body is a half of the stranger's own topic; where that begins."""
    model, _ = await view(stranger, await stranger.send("Own", b"any"))
    forged = dataclasses.replace(
        decode_record(model),
        topic="RMQ_SYS_TRANS_HALF_TOPIC",
        queue_offset=half.queue_offset,
        properties="REAL_TOPIC\x01Own\x02REAL_QID\x010\x02PGROUP\x01tx",
    )
    body = encode_record(forged)
    probe, probe_at = await view(stranger, await stranger.send("Own", body))
    # The next message of this size lies right behind it.
    begin = probe_at + len(probe) + probe.index(body)
    sent = await stranger.send("Own", encode_record(dataclasses.replace(forged, log_offset=begin)))
    assert offset_of(sent) == probe_at + len(probe)
    return begin


def offset_of(sent: commands.SendReply) -> int:
    return parse_offset_message_id(sent.msg_id)[1]


async def view(client: Client, sent: commands.SendReply) -> tuple[bytes, int]:
    """The record of what was sent, and its log offset."""
    offset = offset_of(sent)
    return (await client.call(commands.ViewMessageById(offset=offset))).body, offset


def end_of(half: commands.SendReply, log_offset: int, decision: int) -> commands.EndTransaction:
    return commands.EndTransaction(
        producer_group="tx",
        tran_state_table_offset=half.queue_offset,
        commit_log_offset=log_offset,
        commit_or_rollback=decision,
        msg_id="",
    )


@pytest.mark.parametrize("acl", [True, False])
async def test_a_body_that_looks_like_a_half_ends_no_transaction(
    acl: bool, tmp_path: pathlib.Path
) -> None:
    async with world(tmp_path, acl_enable=acl) as here:
        owner, stranger = here.client(OWNER), here.client(STRANGER)
        half = await owner.send_half("Secret", b"to be kept")
        begin = await forge(stranger, half)
        said = "no queue has the message" if acl else "no half message begins at"
        with pytest.raises(Refused, match=said):
            await stranger.call(end_of(half, begin, ROLLBACK))
        await owner.call(end_of(half, offset_of(half), COMMIT))
        ends = await owner.call(commands.GetMaxOffset(topic="Secret", queue_id=0))
        assert ends.offset == 1


async def test_what_no_queue_has_is_for_administrators(tmp_path: pathlib.Path) -> None:
    async with world(tmp_path) as here:
        owner, stranger, admin = (here.client(who) for who in (OWNER, STRANGER, ADMIN))
        begin = await forge(stranger, await owner.send_half("Secret", b"half"))
        sent = await stranger.send("Own", b"of a topic that goes")
        _, gone = await view(stranger, sent)
        await admin.call(commands.DeleteTopicInBroker(topic="Own"))
        for offset in (begin, gone):
            asks: tuple[Command[Any], ...] = (
                commands.ViewMessageById(offset=offset),
                commands.ConsumerSendMsgBack(offset=offset, group="shared", delay_level=1),
            )
            for ask in asks:
                with pytest.raises(Refused, match="no queue has the message"):
                    await stranger.call(ask)
        found = await admin.call(commands.ViewMessageById(offset=gone))
        assert b"of a topic that goes" in found.body


async def test_messages_that_wait_are_known_by_the_topic_that_they_are_for(
    tmp_path: pathlib.Path,
) -> None:
    async with world(tmp_path) as here:
        owner, stranger = here.client(OWNER), here.client(STRANGER)
        half = await owner.send_half("Secret", b"half")
        delayed = await owner.send("Secret", b"delayed", "DELAY\x0118")
        timed = await owner.send("Secret", b"timed", "TIMER_DELAY_SEC\x01600")
        for sent in (half, delayed, timed):
            await view(owner, sent)
            with pytest.raises(Refused, match="no right SUB to topic 'Secret'"):
                await view(stranger, sent)
