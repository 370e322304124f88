"""Transactions of one account against another that knows everything about them but the secret."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from tests.unit.access.push_kit import ACCOUNTS, OWNER, STRANGER, until, world

from cosmodrome.wire import commands

SOON: dict[str, Any] = {"transaction_check_interval": 10, "transaction_time_out": 0}
CHECK = 39


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
        owner, admin = here.client(OWNER), here.client("the-admin")
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
