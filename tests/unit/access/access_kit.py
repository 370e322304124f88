"""A gate with known accounts, and requests of every row to try it with."""

from __future__ import annotations

import types
from typing import Any, get_args

from cosmodrome.access.account_table import Accounts
from cosmodrome.access.gate import Gate
from cosmodrome.env.options import AccessOptions
from cosmodrome.env.real import real_env
from cosmodrome.layout import FLAG_RESPONSE
from cosmodrome.transport.router import Router
from cosmodrome.wire import bodies, table
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.signature import sign
from cosmodrome.wire.table import Call, Command, Reply, Role

FILE = """
globalWhiteRemoteAddresses:
  - 10.8.0.*
accounts:
  - accessKey: the-admin
    secretKey: secret-of-admin
    admin: true
  - accessKey: the-slave
    secretKey: secret-of-slave
    peer: true
  - accessKey: the-team
    secretKey: secret-of-team
    defaultTopicPerm: DENY
    defaultGroupPerm: DENY
    topicPerms:
      - Mine=PUB|SUB
    groupPerms:
      - our_group=PUB|SUB
  - accessKey: the-reader
    secretKey: secret-of-reader
    topicPerms: ["Mine=SUB"]
  - accessKey: the-broad
    secretKey: secret-of-broad
    whiteRemoteAddress: 10.9.1.1
    defaultTopicPerm: PUB|SUB
    defaultGroupPerm: PUB|SUB
"""
SECRETS = {
    name: f"secret-of-{name.removeprefix('the-')}".encode()
    for name in ("the-admin", "the-slave", "the-team", "the-reader", "the-broad")
}
STRANGER, WHITE, PEER, LOCAL = "203.0.113.7", "10.8.0.5", "10.7.0.1", "192.0.2.10"
MINE, THEIRS = 1, 2  # log offsets of messages


async def make_gate(folder: Any, **options: Any) -> Gate:
    path = folder / "plain_acl.yml"
    if not path.exists():
        path.write_text(FILE)
    chosen = AccessOptions(**{"acl_enable": True, "peer_addresses": PEER, **options})
    gate = Gate(
        "broker",
        chosen,
        Accounts(str(path), real_env()),
        lambda host: host == LOCAL,
        {MINE: "Mine", THEIRS: "Theirs"}.get,
    )
    if gate.enabled:
        await gate.accounts.load()
    return gate


class Asker:
    """A connection from `host`; `answers` collects what was said to it."""

    closed = False

    def __init__(self, host: str) -> None:
        self.peer = (host, 4711)
        self.answers: list[Frame | None] = []

    def answer(self, reply: Frame | None) -> None:
        self.answers.append(reply)


def serving_everything(role: Role, gate: Gate) -> Router:
    """A router whose every row is served, so that an answer without error got past the gate."""
    methods: dict[str, Any] = {}
    for code, row in table.rows().items():
        if role in row.served_by and not row.planned:

            def passed(self: object, ask: Any, call: Call) -> Reply:
                return Reply(remark="passed")

            methods[f"serve_{code}"] = row.handler(passed)
    return Router(role, [type("Everything", (), methods)()], gate=gate)


def request(row: type[Command[Any]], *, topic: str = "Mine", group: str = "our_group") -> Frame:
    """One that its handler could read, about this topic and group."""
    values: dict[str, Any] = {}
    for field in table.header_fields(row):
        kind = field.type
        if field.name == "topic":
            values[field.name] = topic
        elif field.name in ("group", "consumer_group"):
            values[field.name] = group
        elif field.name in ("offset", "commit_log_offset"):
            values[field.name] = MINE if topic == "Mine" else THEIRS
        elif field.required:
            values[field.name] = {str: "text", bool: True}.get(_plain(kind), 1)
    ask = row(**values)
    ask.body = _body(row.request_code, topic, group)
    return Frame(code=row.request_code, opaque=1, ext=table.encode(ask), body=ask.body)


def signed(frame: Frame, account: str, secret: bytes | None = None) -> Frame:
    sign(frame, account, SECRETS[account] if secret is None else secret)
    return frame


def outcome(router: Router, frame: Frame, host: str = STRANGER) -> str:
    """`passed`, or why it was denied."""
    asker = Asker(host)
    router.dispatch(frame, asker)  # type: ignore[arg-type]
    (answer,) = asker.answers
    assert answer is not None and answer.flag & FLAG_RESPONSE
    if answer.remark == "passed":
        return "passed"
    assert answer.code == 1, answer
    return answer.remark or ""


def _plain(kind: Any) -> type:
    if isinstance(kind, types.UnionType):
        kind = get_args(kind)[0]
    kind = get_args(kind)[0] if get_args(kind) else kind
    assert isinstance(kind, type)
    return kind


def _body(code: int, topic: str, group: str) -> bytes:
    subscription = bodies.SubscriptionData(topic=topic)
    queue = bodies.MessageQueue(broker_name="b", queue_id=0, topic=topic)
    consumer = bodies.ConsumerData(group_name=group, subscription_data_set=[subscription])
    samples: dict[int, bodies.Body] = {
        34: bodies.HeartbeatData(client_id="c", consumer_data_set=[consumer]),
        41: bodies.LockBatchRequestBody(client_id="c", consumer_group=group, mq_set=[queue]),
        42: bodies.UnlockBatchRequestBody(client_id="c", consumer_group=group, mq_set=[queue]),
        46: bodies.CheckClientRequestBody(group=group, subscription_data=subscription),
    }
    sample = samples.get(code)
    return b"" if sample is None else bodies.encode(sample)
