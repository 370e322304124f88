"""Every code of both servers against everybody who must not use it, and those who may."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from tests.unit.access.access_kit import (
    LOCAL,
    PEER,
    STRANGER,
    WHITE,
    make_gate,
    outcome,
    request,
    serving_everything,
    signed,
)

from cosmodrome.transport.router import Router
from cosmodrome.wire import table
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.needs import Group, Level, Stored, Topic
from cosmodrome.wire.table import BROKER, NAMESERVER, Command, Role, command

Row = type[Command[Any]]
EACH_SERVER = pytest.mark.parametrize("role", [BROKER, NAMESERVER], ids=lambda role: role.name)


def rows_of(role: Role) -> list[Row]:
    return [row for row in table.rows().values() if role in row.served_by and not row.planned]


def kinds(row: Row) -> set[type]:
    """What the row asks rights to."""
    assert row.needs is not None
    if row.needs.resources is None:
        return set()
    frame = request(row)
    ask = table.decode(row, frame.ext, frame.body)
    found = {type(resource) for resource in row.needs.resources(ask)}
    assert found, f"the sample of {row.describe()} touches nothing: add a body to access_kit"
    return found


def level(row: Row) -> Level:
    assert row.needs is not None
    return row.needs.level


@EACH_SERVER
async def test_nobody_without_an_account_gets_in(role: Role, tmp_path: pathlib.Path) -> None:
    router = serving_everything(role, await make_gate(tmp_path))
    for row in rows_of(role):
        empty = request(row)
        empty.ext["AccessKey"] = empty.ext["Signature"] = ""
        unsigned = signed(request(row), "the-admin")
        del unsigned.ext["Signature"]
        odd = signed(request(row), "the-admin")
        odd.ext["Signature"] = "ünsinn\ud800"
        changed = signed(request(row), "the-admin")
        changed.body += b" "
        more = signed(request(row), "the-admin")
        more.ext["zzz"] = "1"
        for why, frame in (
            ("no credentials", request(row)),
            ("no credentials", empty),
            ("no account", claiming(signed(request(row), "the-admin"), "somebody-else")),
            ("signature", signed(request(row), "the-admin", b"another secret")),
            ("signature", unsigned),
            ("signature", odd),
            ("signature", changed),
            ("signature", more),
        ):
            assert why in outcome(router, frame), row.describe()


@EACH_SERVER
async def test_an_account_needs_what_the_row_says(role: Role, tmp_path: pathlib.Path) -> None:
    router = serving_everything(role, await make_gate(tmp_path))
    for row in rows_of(role):
        for account in ("the-broad", "the-team", "the-slave"):
            said = outcome(router, signed(request(row), account))
            if level(row) is Level.ADMIN:
                assert "is no administrator" in said, row.describe()
            elif level(row) is Level.PEER and account != "the-slave":
                assert "is no peer" in said, row.describe()
            elif level(row) is Level.PEER or account != "the-slave":
                assert said == "passed", row.describe()
        if kinds(row) & {Topic, Stored}:
            said = outcome(router, signed(request(row, topic="Theirs"), "the-team"))
            assert "to topic 'Theirs'" in said and "topicPerms" in said, row.describe()
        if Group in kinds(row):
            said = outcome(router, signed(request(row, group="their_group"), "the-team"))
            assert "to group 'their_group'" in said and "groupPerms" in said, row.describe()
        frame = signed(request(row, topic="Theirs", group="their_group"), "the-admin")
        assert outcome(router, frame) == "passed", row.describe()


@EACH_SERVER
async def test_a_right_to_read_is_none_to_write(role: Role, tmp_path: pathlib.Path) -> None:
    router = serving_everything(role, await make_gate(tmp_path))
    for row in rows_of(role):
        if row.needs is not None and row.needs.text.startswith("PUB"):
            said = outcome(router, signed(request(row), "the-reader"))
            assert "has no right PUB to topic 'Mine'" in said, row.describe()


@EACH_SERVER
async def test_an_address_opens_no_more_than_it_should(role: Role, tmp_path: pathlib.Path) -> None:
    router = serving_everything(role, await make_gate(tmp_path))
    for row in rows_of(role):
        about_messages = level(row) is Level.KNOWN
        # An account's own white address stands for a signature about messages, and no more.
        claimed = claiming(request(row), "the-broad")
        for host, frame, passes in (
            (WHITE, request(row), about_messages),
            (PEER, request(row), level(row) is Level.PEER),
            (LOCAL, request(row), False),
            ("10.9.1.1", claimed, about_messages),
            ("10.9.1.2", claimed, False),
        ):
            said = outcome(router, frame, host)
            assert (said == "passed") is passes, (row.describe(), host, said)


@EACH_SERVER
async def test_protected_mode_keeps_strangers_from_the_configuration(
    role: Role, tmp_path: pathlib.Path
) -> None:
    options = {"acl_enable": False, "bind_address": "0.0.0.0"}
    router = serving_everything(role, await make_gate(tmp_path, **options))
    for row in rows_of(role):
        said = outcome(router, request(row), STRANGER)
        assert (said == "passed") is (level(row) is Level.KNOWN), row.describe()
        if said != "passed":
            for fix in ("aclEnable=true", "127.0.0.1", "protectedMode=false"):
                assert fix in said
            assert ("peerAddresses" in said) is (level(row) is Level.PEER)
        assert outcome(router, request(row), LOCAL) == "passed"
        said = outcome(router, request(row), PEER)
        assert (said == "passed") is (level(row) is not Level.ADMIN), row.describe()


@EACH_SERVER
@pytest.mark.parametrize("more", [{"protected_mode": False}, {"bind_address": "127.0.0.1"}])
async def test_without_protected_mode_everything_is_open(
    role: Role, more: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    options = {"acl_enable": False, "bind_address": "0.0.0.0", **more}
    router = serving_everything(role, await make_gate(tmp_path, **options))
    for row in rows_of(role):
        assert outcome(router, request(row), STRANGER) == "passed", row.describe()


def test_a_row_without_needs_is_refused() -> None:
    for role in (BROKER, NAMESERVER):
        with pytest.raises(AssertionError, match="does not say what it needs"):

            @command(999_999, "NEW", served_by=role)
            class New(Command[table.Reply]):
                """A row that somebody forgot to protect."""


async def test_a_denial_is_counted_and_logged_once_per_second(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    router: Router = serving_everything(BROKER, await make_gate(tmp_path))
    row = table.rows()[310]
    for _ in range(50):
        outcome(router, request(row))
    assert router.errors[310] == 50
    lines = [record for record in caplog.records if "request_denied" in record.getMessage()]
    assert len(lines) == 1


def claiming(frame: Frame, access_key: str) -> Frame:
    frame.ext["AccessKey"] = access_key
    return frame
