"""A running pair as operators see it: cluster status, doctor, haStatus, metrics."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.unit.access.access_kit import FILE as ACCOUNTS
from tests.unit.access.access_kit import SECRETS
from tests.unit.broker.broker_pair_kit import Member, Pair, pair, until
from tests.unit.broker.metrics_kit import Scrape
from tests.unit.cli.operating_kit import Done

from cosmodrome.cli.messages.produce import UNPROMISED
from cosmodrome.cli.serve.scraping import of_broker
from cosmodrome.client.values import SendStatus
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code
from cosmodrome.replication.values import FollowerState
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import KVTable
from cosmodrome.wire.commands.broker import GetBrokerHaStatus, GetBrokerRuntimeInfo
from cosmodrome.wire.report_bodies import HARuntimeInfo


async def shell(it: Pair, *words: str, stdin: str = "", **environment: str) -> Done:
    """A command in a process of its own: the brokers go on."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cosmodrome.cli",
        *words,
        "--timeout",
        "30",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COSMO_NAMESRV": it.namesrv, "NO_COLOR": "1", **environment},
    )
    out, err = await process.communicate(stdin.encode())
    return Done(process.returncode or 0, out.decode(), err.decode())


async def status(it: Pair) -> tuple[dict[int | None, dict[str, Any]], Done]:
    done = await shell(it, "cluster", "status", "-o", "json")
    return {row["id"]: row for row in json.loads(done.out)}, done


async def checks(it: Pair) -> dict[tuple[str, str], dict[str, Any]]:
    done = await shell(it, "check", "-o", "json")
    return {(row["check"], row["subject"]): row for row in json.loads(done.out)}


async def ha_status(member: Member) -> HARuntimeInfo:
    return bodies.decode(HARuntimeInfo, (await member.call(GetBrokerHaStatus())).body)


async def scrape(member: Member) -> Scrape:
    page = await of_broker(real_env(), member.broker).page()
    return Scrape(b"".join(page.chunks).decode())


async def test_a_pair_in_step(tmp_path: Path) -> None:
    async with pair(tmp_path, broker_role="SYNC_MASTER") as it:
        for _ in range(5):
            assert (await it.master.send(b"x" * 1000)).code == Code.SUCCESS
        rows, done = await status(it)
        assert done.code == 0 and done.err == ""
        master, slave = rows[0], rows[1]
        assert (master["state"], master["slaves"]) == ("up", 1)
        assert master["broker_role"] == "SYNC_MASTER" and master["lag_bytes"] is None
        assert (slave["state"], slave["lag_bytes"], slave["lag_s"]) == ("in step", 0, 0)
        assert slave["copied_percent"] == 100 and slave["last_contact_s"] < 30
        head = (await shell(it, "cluster", "status")).out.splitlines()[0]
        assert "SLAVES  LAG BYTES  LAG S  CONTACT S  COPIED %" in head
        told = await ha_status(it.master)
        assert told.master and told.in_sync_slave_nums == 1
        (link,) = told.ha_connection_info
        assert (link.node, link.slave_ack_offset) == ("pair:1", told.master_commit_log_max_offset)
        found = await checks(it)
        codes = ("replication", "pair clock", "pair version", "pair settings")
        assert {found[code, "pair/1"]["status"] for code in codes} == {"ok"}, found


async def test_peers_compare_settings_and_others_see_that_nothing_is_shown(tmp_path: Path) -> None:
    accounts = tmp_path / "accounts.yml"
    accounts.write_text(ACCOUNTS)
    peer = {"COSMO_ACCESS_KEY": "the-slave", "COSMO_SECRET_KEY": SECRETS["the-slave"].decode()}
    async with pair(tmp_path, acl_enable=True, acl_file=str(accounts)) as it:
        assert (await shell(it, "broker", "config", "get", **peer)).code == 5  # administrators only
        done = await shell(it, "check", "-o", "json", **peer)
        found = {(row["check"], row["subject"]): row for row in json.loads(done.out)}
        assert found["pair settings", "pair/1"]["status"] == "ok", found
        await it.slave.stop()
        await it.slave.start(message_delay_level="1s 2s")
        await until(lambda: it.slave.in_step)
        done = await shell(it, "check", "-o", "json", **peer)
        found = {(row["check"], row["subject"]): row for row in json.loads(done.out)}
        assert "messageDelayLevel is 1s 2s" in found["pair settings", "pair/1"]["says"]

        rows, done = await status(it)
        assert [row["state"] for row in rows.values()] == ["not shown"] * 2
        assert done.code == 5 and "has no credentials" in done.err
        found = await checks(it)
        for who in ("pair", "pair/1"):
            assert found["broker", who]["status"] == "unknown"
            assert "administrator" in found["broker", who]["next_step"]


async def test_metrics_of_a_pair(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        await it.master.send()
        await until(lambda: it.slave.end() == 1)
        master, slave = await scrape(it.master), await scrape(it.slave)
        assert master.get("cosmodrome_replication_links") == 1
        assert master.get("cosmodrome_replication_slave_lag_bytes", slave="pair:1") is not None
        assert slave.get("cosmodrome_replication_state", state="in step") == 1
        assert slave.get("cosmodrome_replication_role", role="SLAVE") == 1
        assert slave.get("cosmodrome_replication_lag_bytes") == 0
        assert slave.get("cosmodrome_replication_links_made_total") == 1
        figures = await it.slave.call(GetBrokerRuntimeInfo())
        table = bodies.decode(KVTable, figures.body).table
        assert table["replicationState"] == "in step" and table["replicationRole"] == "SLAVE"


async def test_a_sync_master_without_its_slave(tmp_path: Path) -> None:
    async with pair(tmp_path, broker_role="SYNC_MASTER") as it:
        await it.slave.stop()
        await until(lambda: not it.master.source.links)
        for _ in range(3):
            assert (await it.master.send()).code == Code.SLAVE_NOT_AVAILABLE
        rows, done = await status(it)
        assert (rows[0]["state"], rows[0]["slaves"]) == ("no slave", 0)
        assert "pair is without a slave: sends are answered SLAVE_NOT_AVAILABLE" in done.err
        assert (await checks(it))["replication", "pair"]["status"] == "fail"
        page = await scrape(it.master)
        name = "cosmodrome_sends_unpromised_total"
        assert page.get(name, status="SLAVE_NOT_AVAILABLE") == 3
        assert page.get(name, status="FLUSH_SLAVE_TIMEOUT") == 0


async def test_produce_counts_what_is_not_promised(tmp_path: Path) -> None:
    async with pair(tmp_path, broker_role="SYNC_MASTER") as it:
        done = await shell(it, "produce", "T", stdin="kept by both")
        assert done.code == 0 and done.err.startswith("sent 1 message in"), done
        assert "answered" not in done.err
        await it.slave.stop()
        await until(lambda: not it.master.source.links)
        done = await shell(it, "produce", "T", stdin="one\ntwo")
        assert done.code == 0 and done.err.startswith("sent 2 messages in"), done
        assert "\n2 of them answered SLAVE_NOT_AVAILABLE (11): stored, but" in done.err
        assert "SLAVE_NOT" not in (await shell(it, "produce", "T", "-q", stdin="three")).err


def test_every_status_has_words() -> None:
    assert UNPROMISED.keys() == set(SendStatus) - {SendStatus.OK}


async def test_a_slave_without_its_master(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        await it.master.stop()
        await until(lambda: not it.slave.in_step)
        rows, done = await status(it)
        assert rows.keys() == {1}
        assert rows[1]["state"] in ("connecting", "no master", "not linked") and rows[1]["why"]
        assert f"pair/1 is {rows[1]['state']}" in done.err or "without a master" in done.err
        found = await checks(it)
        away = found["master", "pair"]
        assert away["status"] == "fail" and "Promote a slave by hand" in away["next_step"]
        end = it.slave.store.facts().max_offset
        assert f"pair/1 at {it.slave.broker.address} has the log up to {end}" in away["says"]
        assert found["replication", "pair/1"]["status"] == "fail"
        assert not [row for row in found.values() if "cosmo broker run" in str(row["next_step"])]


async def test_a_refused_slave_says_why_and_what_to_do(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        await it.master.send()
        await until(lambda: it.slave.end() == 1)
        await it.slave.stop()
        await it.slave.start(role="ASYNC_MASTER")  # somebody promotes it by mistake
        await it.slave.send(b"only here")
        await it.slave.stop()
        await it.master.stop()
        await it.master.start()
        await it.slave.start(role="SLAVE")
        await until(lambda: it.slave.follower.state is FollowerState.REFUSED)
        rows, done = await status(it)
        assert rows[1]["state"] == "refused" and "ahead" in rows[1]["why"]
        assert "--cut-at" in done.err
        told = (await ha_status(it.slave)).ha_client_runtime_info
        assert told.state == "refused" and isinstance(told.why, str) and "--cut-at" in told.why
        found = (await checks(it))["replication", "pair/1"]
        assert found["status"] == "fail" and "--cut-at" in found["says"]
        assert (await scrape(it.slave)).get("cosmodrome_replication_state", state="refused") == 1
        assert (
            (await scrape(it.master)).get("cosmodrome_replication_refused_links_total") or 0
        ) > 0
