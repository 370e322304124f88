"""`cosmo acl` and the four commands of mqadmin about accounts, against a broker that has some."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.access.access_kit import FILE
from tests.unit.cli.operating_kit import cosmo, in_all_forms, rows

from cosmodrome import blocking

ADMIN = {"COSMO_ACCESS_KEY": "the-admin", "COSMO_SECRET_KEY": "secret-of-admin"}


@pytest.fixture(scope="module")
def namesrv() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config", "plain_acl.yml")
        path.parent.mkdir()
        path.write_text(FILE)
        with blocking.embedded(data=folder, acl_enable=True) as node:
            yield node.namesrv


@pytest.fixture(autouse=True)
def as_administrator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ADMIN.items():
        monkeypatch.setenv(name, value)


def mqadmin(namesrv: str, *words: str) -> list[dict[str, Any]]:
    done = cosmo(namesrv, "mqadmin", *words, "--output", "json")
    assert done.code == 0, done
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


def test_accounts_are_made_shown_checked_and_deleted(namesrv: str) -> None:
    words = ("--topics", "A=PUB,B=SUB", "--default-group", "SUB", "--peer", "false")
    made = rows(namesrv, "acl", "set", "team-new", "--secret-key", "of-the-new-team", *words)
    assert made == [{"broker": "embedded", "access_key": "team-new", "outcome": "set"}]
    listed = in_all_forms(namesrv, "acl", "list")
    (one,) = (row for row in listed if row["access_key"] == "team-new")
    assert one["topics"] == "A=PUB,B=SUB" and one["default_group"] == "SUB" and not one["admin"]
    assert "of-the-new-team" not in cosmo(namesrv, "acl", "list", "-o", "wide").out
    rights = rows(namesrv, "acl", "check", "team-new", "-t", "A", "-t", "%RETRY%g", "-g", "g")
    assert [(row["name"], row["right"]) for row in rights] == [
        ("A", "PUB"),
        ("%RETRY%g", "PUB|SUB"),
        ("g", "SUB"),
    ]
    missing = cosmo(namesrv, "acl", "check", "team-nwe", "-t", "A")
    assert missing.code != 0 and "did you mean team-new?" in missing.err
    assert cosmo(namesrv, "acl", "delete", "team-new").code != 0  # there is nobody to ask
    assert rows(namesrv, "acl", "delete", "team-new", "--yes")[0]["outcome"] == "deleted"
    gone = cosmo(namesrv, "acl", "delete", "team-new", "--yes")
    assert gone.code != 0 and "there is no account" in gone.err


def test_a_secret_may_come_from_stdin(namesrv: str) -> None:
    done = cosmo(namesrv, "acl", "set", "from-stdin", "--secret-key", "-", stdin="it-is-secret\n")
    assert done.code == 0, done
    assert rows(namesrv, "acl", "delete", "from-stdin", "--yes")


def test_the_commands_of_mqadmin(namesrv: str) -> None:
    where = ("-c", "DefaultCluster")
    words = ("-a", "team-mq", "-s", "of-the-mq-team", "-t", "A=PUB|SUB", "-i", "DENY", "-m", "true")
    assert mqadmin(namesrv, "updateAclConfig", *where, *words)[0]["outcome"] == "set"
    before = mqadmin(namesrv, "clusterAclConfigVersion", *where)[0]["changes"]
    white = mqadmin(namesrv, "updateGlobalWhiteAddr", *where, "-g", "10.8.0.*,10.1.2.3")
    assert white == [{"broker": "embedded", "addresses": "10.8.0.*,10.1.2.3"}]
    assert rows(namesrv, "acl", "white") == white
    after = mqadmin(namesrv, "clusterAclConfigVersion", *where)[0]
    assert after["changes"] == before + 1 and after["file"].endswith("plain_acl.yml")
    deleted = mqadmin(namesrv, "deleteAclConfig", *where, "-a", "team-mq")
    assert deleted[0]["outcome"] == "deleted"


def test_who_is_no_administrator_is_told_what_is_missing(
    namesrv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSMO_ACCESS_KEY", "the-broad")
    monkeypatch.setenv("COSMO_SECRET_KEY", "secret-of-broad")
    done = cosmo(namesrv, "acl", "list")
    assert done.code != 0 and "account 'the-broad' is no administrator" in done.err
    monkeypatch.delenv("COSMO_ACCESS_KEY")
    done = cosmo(namesrv, "acl", "list")
    assert done.code != 0 and "no credentials" in done.err
