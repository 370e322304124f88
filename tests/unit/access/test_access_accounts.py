"""Accounts: what their files say, what names mean, and how a running server follows changes."""

from __future__ import annotations

import logging
import os
import pathlib

import pytest

from cosmodrome.access import account_files
from cosmodrome.access.account_table import Accounts
from cosmodrome.access.accounts import Account
from cosmodrome.access.addresses import Addresses
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError
from cosmodrome.wire.needs import PUB, SUB, Right
from cosmodrome.wire.signature import signature

NONE, BOTH = Right.NONE, PUB | SUB
TEAM = """
accounts:
  - accessKey: the-team
    secretKey: 12345678
    topicPerms: [Mine=PUB]
"""


def test_signatures_are_those_of_upstream() -> None:
    ext = dict(
        zip(
            "abcdefghjkm",
            ["PG", "T", "TBW102", "4", "1", "0", "1700000000000", "0", "0", "false", "false"],
            strict=True,
        )
    )
    ext |= {"i": "TAGS\x01A", "AccessKey": "RocketMQ", "Signature": "x", "_UNIQUE_KEY_QUERY": "y"}
    assert signature(b"12345678", ext, b"hello") == "iAhMu+kEey2gfJJd68eSmjblZQE="
    assert signature(b"12345678", {"AccessKey": "RocketMQ"}, b"{}") == (
        "pq0tPL2lAz7bhIfEGHu4hhut1Yw="
    )


@pytest.mark.parametrize(
    ("items", "inside", "outside"),
    [
        ("", "", "10.1.2.3 ::1"),
        ("*", "10.1.2.3 ::1 fe80::1", ""),
        ("10.1.2.3", "10.1.2.3 ::ffff:10.1.2.3", "10.1.2.4 ?"),
        ("10.1.2.3, 10.1.2.5", "10.1.2.3 10.1.2.5", "10.1.2.4"),
        ("10.1.2.{3,5},10.9.9.9", "10.1.2.3 10.1.2.5 10.9.9.9", "10.1.2.4"),
        ("10.1.2.*", "10.1.2.0 10.1.2.255", "10.1.3.1"),
        ("10.1.2-4.*", "10.1.2.1 10.1.4.9", "10.1.5.1"),
        ("10.1.2.3-7", "10.1.2.3 10.1.2.7", "10.1.2.8 10.1.2.2"),
        ("10.1.0.0/16", "10.1.255.1", "10.2.0.1 ::1"),
        ("2001:db8::/32", "2001:db8::5", "2001:db9::5 10.1.2.3"),
        ("2001:db8:0:0:0:0:0:*", "2001:db8::ff", "2001:db8::1:ff"),
    ],
)
def test_addresses_have_upstreams_forms(items: str, inside: str, outside: str) -> None:
    addresses = Addresses([items])
    for _ in range(2):  # the second time from memory
        assert all(addresses.has(host) for host in inside.split())
        assert not any(addresses.has(host) for host in outside.split())


@pytest.mark.parametrize("text", ["10.1.2", "10.1.2.300", "host.example", "10.1.2.x-y", "*.1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        Addresses([text])


def account(**fields: object) -> Account:
    return Account(access_key="somebody", secret=b"1234567", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("who", "topic", "right"),
    [
        (account(default_topic=BOTH), "Any", BOTH),
        (account(default_topic=BOTH, topics={"Any": NONE}), "Any", NONE),
        (account(topics={"Any": SUB}), "Any", SUB),
        (account(topics={"Any": SUB}), "Other", NONE),
        (account(groups={"g": SUB}), "%RETRY%g", BOTH),
        (account(default_topic=BOTH), "%RETRY%g", NONE),
        (account(groups={"g": SUB}), "%DLQ%g", SUB),
        (account(default_topic=BOTH), "SCHEDULE_TOPIC_XXXX", NONE),
        (account(default_topic=BOTH), "rmq_sys_wheel_timer", NONE),
        (account(), "RMQ_SYS_TRACE_TOPIC", PUB),
        (account(topics={"RMQ_SYS_TRACE_TOPIC": SUB}), "RMQ_SYS_TRACE_TOPIC", BOTH),
        (account(admin=True), "SCHEDULE_TOPIC_XXXX", BOTH),
        (account(admin=True, topics={"A": SUB}), "A", SUB),
        (account(admin=True, topics={"A": SUB}), "B", NONE),
        (account(peer=True), "Any", SUB),
        (account(peer=True), "%RETRY%g", BOTH),
    ],
)
def test_rights_to_topics(who: Account, topic: str, right: Right) -> None:
    assert who.topic_right(topic) == right


def test_rights_to_groups() -> None:
    assert account(default_group=SUB).group_right("g") == SUB
    assert account(default_group=SUB).group_right("CID_RMQ_SYS_TRANS") == NONE
    assert account(default_group=SUB, groups={"g": NONE}).group_right("g") == NONE
    assert account(admin=True).group_right("CID_RMQ_SYS_TRANS") == BOTH
    assert account(peer=True).group_right("g") == SUB


def test_a_secret_is_not_in_the_text_of_an_account() -> None:
    assert "1234567" not in repr(account())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("accounts: [{accessKey: short, secretKey: 12345678}]", "accessKey must have 7"),
        ("accounts: [{accessKey: long-enough, secretKey: short}]", "account long-enough"),
        ("accounts: [{accessKey: long-enough, secretKey: [a]}]", "must be one text"),
        ("accounts: {a: b}", "must be a list"),
        ("accounts: [1]", "must be a list"),
        ("- a", "begin with a map"),
        ("a: b: c", "no YAML"),
        ("a: &x 1\nb: *x", "references"),
        ("[" * 200_000, "nested more than"),
        ("a: !!python/object/apply:os.getcwd []\n", None),
        ("globalWhiteRemoteAddresses: [nobody]", "is no address"),
        ("accounts: [{accessKey: long-enough, secretKey: 12345678, topicPerms: [A]}]", "NAME=PUB"),
        ("#" * (account_files.FILE_BYTES_MAX + 1), "larger than"),
        ("\x00", "no YAML"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_by_name(
    text: str, why: str | None, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "plain_acl.yml"
    path.write_text(text)
    disk = real_env().disk
    if why is None:
        assert account_files.read_all(disk, [str(path)]).accounts == {}  # a text, no object
        return
    with pytest.raises(ConfigError, match=why) as caught:
        account_files.read_all(disk, [str(path)])
    assert str(path) in str(caught.value)
    assert "12345678" not in str(caught.value)


async def test_further_files_add_accounts_and_the_first_one_wins(tmp_path: pathlib.Path) -> None:
    (tmp_path / "plain_acl.yml").write_text(TEAM)
    (tmp_path / "acl").mkdir()
    more = TEAM.replace("Mine=PUB", "Mine=SUB") + TEAM.replace("accounts:", "").replace(
        "the-team", "the-other"
    )
    (tmp_path / "acl" / "more.yml").write_text(more)
    (tmp_path / "acl" / "tools.yml").write_text("accessKey: x")
    accounts = Accounts(str(tmp_path / "plain_acl.yml"), real_env())
    await accounts.load()
    team = accounts.get("the-team")
    assert team is not None and team.topic_right("Mine") == PUB and team.secret == b"12345678"
    assert accounts.get("the-other") is not None
    assert len(accounts.files) == 2


async def test_without_a_file_the_server_says_what_to_write(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"no account file .*plain_acl.yml; write it"):
        await Accounts(str(tmp_path / "plain_acl.yml"), real_env()).load()


async def test_a_changed_file_counts_and_a_broken_one_does_not(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "plain_acl.yml"
    path.write_text(TEAM)
    accounts = Accounts(str(path), real_env())
    await accounts.load()
    before = accounts.generation
    assert not await accounts.look() and accounts.generation == before
    path.write_text(TEAM.replace("the-team", "the-new-team"))
    assert await accounts.look() and accounts.generation > before
    assert accounts.get("the-team") is None and accounts.get("the-new-team") is not None
    with caplog.at_level(logging.ERROR):
        path.write_text("accounts: [")
        assert not await accounts.look()
        assert not await accounts.look()  # said once
        os.unlink(path)
        assert not await accounts.look()
    assert len(caplog.records) == 2
    assert accounts.get("the-new-team") is not None
    path.write_text(TEAM)
    assert await accounts.look() and accounts.get("the-team") is not None


async def test_changes_go_to_the_file_and_keep_what_they_do_not_touch(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "plain_acl.yml"
    path.write_text(TEAM + "    note: of somebody\n")
    path.chmod(0o600)
    accounts = Accounts(str(path), real_env())
    await accounts.load()
    await accounts.put("the-team", {"topicPerms": ["Mine=SUB"]})
    await accounts.put("a-new-one", {"secretKey": "0012345", "admin": True})
    await accounts.set_white(["10.1.2.*"], "")
    with pytest.raises(ConfigError, match="secretKey must have"):
        await accounts.put("without-secret", {"admin": True})
    with pytest.raises(ConfigError, match="is no address"):
        await accounts.set_white(["nonsense"], "")
    with pytest.raises(ConfigError, match="no account file"):
        await accounts.set_white([], "/etc/passwd")
    again = Accounts(str(path), real_env())
    await again.load()
    team, new = again.get("the-team"), again.get("a-new-one")
    assert team is not None and team.topic_right("Mine") == SUB and team.secret == b"12345678"
    assert new is not None and new.admin and new.secret == b"0012345"
    assert again.white.has("10.1.2.3") and again.get("without-secret") is None
    assert again.files[0].counter == 3
    assert "of somebody" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    await accounts.remove("the-team")
    assert accounts.get("the-team") is None
    # The removed secret is nowhere on the disk.
    assert not any(b"12345678" in one.read_bytes() for one in tmp_path.iterdir() if one.is_file())
    with pytest.raises(ConfigError, match="no account 'the-team'"):
        await accounts.remove("the-team")
