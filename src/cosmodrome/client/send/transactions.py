"""Transactional messages: stored unseen first, shown or dropped when the sender decided.

`send_in_transaction` stores the half message, runs the local transaction and tells the broker how
it ended. When that does not reach the broker, or the answer was UNKNOWN, the broker asks
any producer of the group: the `check` function answers from what the local transaction left
behind. A broker may ask while the local transaction still runs, and more than once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from cosmodrome.client.received import received
from cosmodrome.client.send.failures import BadMessage
from cosmodrome.client.send.hooks import MessageKind
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.values import Message, ReceivedMessage, SendResult, SendStatus
from cosmodrome.errors import ConfigError, CosmodromeError, Unreachable
from cosmodrome.layout import SYS_COMMIT, SYS_PREPARED, SYS_ROLLBACK
from cosmodrome.wire.commands.transaction import CheckTransactionState, EndTransaction
from cosmodrome.wire.message import (
    PRODUCER_GROUP,
    TRANSACTION_PREPARED,
    UNIQ_KEY,
    parse_offset_message_id,
)
from cosmodrome.wire.record import decode_record

log = logging.getLogger(__name__)

CHECK_BYTES_MAX = 64 << 20  # of the messages that brokers ask about and that wait for an answer


class TransactionState(enum.Enum):
    """The names are those of trace records."""

    COMMIT = "COMMIT_MESSAGE"
    ROLLBACK = "ROLLBACK_MESSAGE"
    UNKNOWN = "UNKNOW"


_FLAGS = {
    TransactionState.COMMIT: SYS_COMMIT,
    TransactionState.ROLLBACK: SYS_ROLLBACK,
    TransactionState.UNKNOWN: 0,
}

Local = Callable[[Message], TransactionState | Awaitable[TransactionState]]
Check = Callable[[ReceivedMessage], TransactionState | Awaitable[TransactionState]]


@dataclasses.dataclass(slots=True)
class TransactionResult:
    """How the half message was stored and what was decided about it. `local_error` is what the
    local transaction raised; its state is then UNKNOWN and the broker will ask."""

    send: SendResult
    state: TransactionState
    local_error: Exception | None = None


class TransactionProducer(Producer):
    """A producer whose messages are shown only if a local transaction committed."""

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        check: Check,
        checks_waiting_max: int = 2_000,
        check_concurrency: int = 1,
        **options: Any,
    ) -> None:
        """`check` may be a plain or an async function; a plain one must not block. Further
        options are those of `Producer`."""
        super().__init__(namesrv, **options)
        if checks_waiting_max < 1 or check_concurrency < 1:
            raise ConfigError("checks_waiting_max and check_concurrency must be positive")
        self._check = check
        self._check_concurrency = check_concurrency
        self._checks: asyncio.Queue[tuple[CheckTransactionState, str]] = asyncio.Queue(
            checks_waiting_max
        )
        self._check_bytes = 0  # of the messages in them
        self._workers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await super().start()
        if not self._workers:
            self._workers = [
                self._loop.create_task(self._answer_checks())
                for _ in range(self._check_concurrency)
            ]

    async def stop(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.cancel()
        if workers:
            await asyncio.wait(workers)
        await super().stop()

    async def send_in_transaction(
        self, message: Message, local: Local, *, timeout_ms: int | None = None
    ) -> TransactionResult:
        """Store the message where no consumer sees it, run `local`, and commit or roll back as
        it answers."""
        self._live()
        if message.delay_level or message.delay_ms is not None or message.deliver_at_ms is not None:
            raise BadMessage("a transactional message cannot be delayed; send it without delay")
        deadline = self._deadline(timeout_ms)
        packed = await self._packed(
            message, reserved={TRANSACTION_PREPARED: "true", PRODUCER_GROUP: self.group}
        )
        packed.sys_flag |= SYS_PREPARED
        packed.kind = MessageKind.HALF
        sent = await self._send(packed, deadline)
        result = TransactionResult(sent, TransactionState.UNKNOWN)
        if sent.status is SendStatus.OK:
            result.state, result.local_error = await _decided(local, message)
        else:
            # Compat: what may be lost is not worth a local transaction.
            result.state = TransactionState.ROLLBACK
        await self._end(message, result)
        return result

    async def _end(self, message: Message, result: TransactionResult) -> None:
        """Tell the broker the decision. A broker that does not get it asks."""
        sent = result.send
        try:
            instance = self._live()
            address = instance.routes.address(sent.queue.broker_name)
            if address is None:
                raise Unreachable(
                    f"the master of broker {sent.queue.broker_name} is away; the transaction waits"
                    " for it"
                )
            _, log_offset = parse_offset_message_id(sent.offset_msg_id)
            await instance.links.notify(
                address,
                EndTransaction(
                    producer_group=self.group,
                    tran_state_table_offset=sent.queue_offset,
                    commit_log_offset=log_offset,
                    commit_or_rollback=_FLAGS[result.state],
                    from_transaction_check=False,
                    msg_id=sent.msg_id,
                    transaction_id=sent.transaction_id,
                ),
            )
        except CosmodromeError as error:
            log.warning(
                "transaction not ended, its broker will ask: topic=%s id=%s state=%s reason=%s",
                message.topic,
                sent.msg_id,
                result.state.name,
                error,
            )
            return
        if self._trace is not None:
            self._trace.transaction_ended(
                topic=message.topic,
                msg_id=sent.msg_id,
                tags=message.tags,
                keys=message.keys,
                store_host=address,
                transaction_id=sent.transaction_id,
                state=result.state.value,
                from_check=False,
            )

    # --- check-back --------------------------------------------------------------------------

    def check_transaction(self, ask: CheckTransactionState, address: str) -> None:
        fits = self._check_bytes + len(ask.body) <= CHECK_BYTES_MAX or self._checks.empty()
        if fits and not self._checks.full():
            self._checks.put_nowait((ask, address))
            self._check_bytes += len(ask.body)
        else:
            log.warning(
                "transaction check dropped, the broker asks again: group=%s waiting=%d",
                self.group,
                self._checks.qsize(),
            )

    async def _answer_checks(self) -> None:
        while True:
            ask, address = await self._checks.get()
            self._check_bytes -= len(ask.body)
            try:
                await self._answer(ask, address)
            except Exception:
                log.exception("transaction check failed: group=%s broker=%s", self.group, address)

    async def _answer(self, ask: CheckTransactionState, address: str) -> None:
        record = decode_record(ask.body)
        message = received(record, "", namespace=self.options.namespace)
        state, error = await _decided(self._check, message)
        if error is not None:
            log.error("the check function failed: id=%s", message.msg_id, exc_info=error)
        pairs = message.properties
        msg_id = pairs.get(UNIQ_KEY) or ask.msg_id or record.message_id
        await self._live().links.notify(
            address,
            EndTransaction(
                producer_group=self.group,
                tran_state_table_offset=ask.tran_state_table_offset,
                commit_log_offset=ask.commit_log_offset,
                commit_or_rollback=_FLAGS[state],
                from_transaction_check=True,
                msg_id=msg_id,
                transaction_id=ask.transaction_id,
            ),
        )
        if self._trace is not None:
            self._trace.transaction_ended(
                topic=message.topic,
                msg_id=msg_id,
                tags=message.tags,
                keys=message.keys,
                store_host=address,
                transaction_id=ask.transaction_id,
                state=state.value,
                from_check=True,
            )


async def _decided(
    function: Callable[[Any], object], message: object
) -> tuple[TransactionState, Exception | None]:
    """What the user's function decided; UNKNOWN when it raised or decided nothing."""
    try:
        state = function(message)
        if inspect.isawaitable(state):
            state = await state
    except Exception as error:
        return TransactionState.UNKNOWN, error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Not we, but something that the function waited for.
        return TransactionState.UNKNOWN, CosmodromeError("it was cancelled from within")
    if not isinstance(state, TransactionState):
        return TransactionState.UNKNOWN, TypeError(
            f"{function!r} answered {state!r} instead of a TransactionState"
        )
    return state, None
