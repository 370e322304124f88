"""Damaged files: told, or harmless, and never somebody else's message.

One prepared store is copied for every case and one of its files is damaged. Then either the
start is refused by an error that names the file and says what to do, or the store serves. What it
serves is compared with the manifest of what was sent:

- A record at a place is the one that was sent there. If its bytes differ, the log itself was
  damaged, and its checksum says so unless the damage lies where the format has no checksum.
- What is missing has been reported in the log, or is by `cosmo store check`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.store.store_kit import ALWAYS_MS, HandClock, draft, faulty_env, small

from cosmodrome.broker.members.groups import Groups
from cosmodrome.broker.members.offsets import Offsets
from cosmodrome.broker.members.topics import Topics
from cosmodrome.cli.main import cosmo
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError, ProtocolError, StoreError
from cosmodrome.store.store import Draft, Store
from cosmodrome.wire.record import Record, decode_record

CASES_PER_KIND = 55
SEED = "damage"
KINDS = ("commitlog", "consumequeue", "index", "checkpoint", "abort")
Place = tuple[str, int, int]
PROBLEMS_FOUND = 6  # the exit code of `cosmo store check`
NEXT_STEPS = ("restore", "check", "set", "move", "remove", "free", "repair", "delete")


@dataclasses.dataclass
class Prepared:
    root: Path
    clock: HandClock
    manifest: dict[Place, tuple[int, bytes]]  # log offset, the whole record


def settings(root: Path) -> dict[str, object]:
    return {"root": root, "max_hash_slot_num": 20, "max_index_num": 40}


async def prepare(root: Path, *, clean: bool) -> Prepared:
    """Several files of every type; sends long after the first checkpoint, so it is used."""
    clock = HandClock()
    chance = random.Random(SEED)
    store = Store(small(**settings(root)), faulty_env(clock=clock))  # type: ignore[arg-type]
    await store.start()
    places: dict[Place, int] = {}
    for number in range(90):
        topic, queue_id = chance.choice("AB"), chance.randrange(2)
        message: Draft = draft(
            b"%d " % number + chance.randbytes(chance.randrange(300)),
            topic,
            queue_id,
            keys=f"k{number} all",
            tags="t",
        )
        stored = store.append(message)
        await store.durable(stored.end)
        places[topic, queue_id, stored.queue_offset] = stored.log_offset
        clock.at_ms += 400
        if number % 30 == 29:
            assert await store._upkeep.write_checkpoint()
    manifest = {}
    for place, log_offset in places.items():
        data = store.record(log_offset)
        assert data is not None
        manifest[place] = (log_offset, data)
    await (store.stop() if clean else store.abandon())
    if clean:
        assert not (root / "abort").exists()
    return Prepared(root, clock, manifest)


@pytest.fixture(scope="module", params=["clean", "crashed"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    root = tmp_path_factory.mktemp(request.param) / "store"
    return asyncio.run(prepare(root, clean=request.param == "clean"))


def damage(path: Path, chance: random.Random) -> str:
    """Damage one file; what was done, for the message of a failing case."""
    data = bytearray(path.read_bytes())
    size = len(data)
    used = len(data.rstrip(b"\0")) or size  # most of a file is empty: aim where data is
    at = chance.randrange(max(1, min(size, used + 16)))
    how = chance.choice(("flip", "flip", "flip", "zero", "garbage", "cut", "cut", "grow", "gone"))
    length = chance.choice((1, 8, 20, 64, 512, 2000))
    if how == "flip" and size:
        data[min(at, size - 1)] ^= 1 << chance.randrange(8)
    elif how == "zero":
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif how == "garbage":
        data[at : at + length] = chance.randbytes(len(data[at : at + length]))
    elif how == "cut":
        del data[at:]
    elif how == "grow":
        data += chance.randbytes(length)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data)
    return f"{path.name} {how} at {at} length {length}"


class Heard(logging.Handler):
    """Whether anything was said that an operator would look at."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler = Heard()
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)


def check_place(place: Place, data: bytes, wanted: bytes, *, log_damaged: bool) -> None:
    if data == wanted:
        return
    assert log_damaged, f"{place} is served with other bytes"
    try:
        record: Record = decode_record(data)
    except ProtocolError:
        return  # told: no client can decode it
    sent = decode_record(wanted)
    assert not record.body_is_intact() or record.body == sent.body, f"{place} has a wrong body"


def judge(store: Store, case: Prepared, *, log_damaged: bool) -> int:
    """Compare everything served with the manifest; how many messages are missing."""
    missing = 0
    for topic, queue_id in {place[:2] for place in case.manifest}:
        wanted = {p[2]: item for p, item in case.manifest.items() if p[:2] == (topic, queue_id)}
        for offset, (log_offset, data) in wanted.items():
            batch = store.read(topic, queue_id, offset, 1)
            if batch.count and batch.next_offset == offset + 1:
                place = (topic, queue_id, offset)
                check_place(place, batch.data, data, log_damaged=log_damaged)
            else:
                missing += 1
            alone = store.record(log_offset)
            if alone is not None:
                check_place((topic, queue_id, offset), alone, data, log_damaged=log_damaged)
        _, most = store.bounds(topic, queue_id)
        for offset in range(len(wanted), min(most, len(wanted) + 50)):
            assert not store.read(topic, queue_id, offset, 1).count, "an invented message"
    known = {data for _, data in case.manifest.values()}
    for number in range(90):
        for topic in "AB":
            for record in store.find(topic, f"k{number}", 64, 0, ALWAYS_MS).records:
                assert log_damaged or record in known
    return missing


@pytest.mark.parametrize("kind", KINDS)
async def test_damage_is_told_or_harmless(
    prepared: Prepared, kind: str, tmp_path: Path, heard: Heard
) -> None:
    chance = random.Random(f"{SEED}-{kind}")
    refused = cases = 0
    for number in range(CASES_PER_KIND):
        root = tmp_path / f"case{number}"
        shutil.copytree(prepared.root, root)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        chosen = [p for p in files if kind in str(p.relative_to(root)).split("/")[0]]
        if not chosen:
            (root / kind).write_bytes(chance.randbytes(10))  # it is not there: now it is
            chosen = [root / kind]
        path = chance.choice(chosen)
        what = f"case {number}: {damage(path, chance)}"
        path_kept, unheard = path.exists(), ""
        heard.lines.clear()
        cases += 1
        clock = HandClock(prepared.clock.at_ms)
        store = Store(small(**settings(root)), faulty_env(clock=clock))  # type: ignore[arg-type]
        try:
            await store.start()
        except (StoreError, ConfigError) as error:
            refused += 1
            assert str(root) in str(error), f"{what}: {error} names no file"
            assert any(word in str(error) for word in NEXT_STEPS), f"{what}: {error}"
            shutil.rmtree(root)
            continue
        try:
            missing = judge(store, prepared, log_damaged=kind == "commitlog")
            # The oldest file may go in silence: that is how messages expire.
            oldest = path == min(p for p in chosen if p.parent == path.parent)
            if missing and not heard.lines and (path_kept or not oldest):
                # The end of a queue is found by its files alone after an orderly stop. What is
                # gone there only the checker can know.
                assert kind == "consumequeue", f"{missing} messages are missing, nobody was told"
                unheard = what
            if kind not in ("commitlog", "consumequeue"):
                assert not missing
            # It also goes on: a new message is taken and read back.
            stored = store.append(draft(b"new", "N"))
            await store.durable(stored.end)
            assert store.read("N", 0, stored.queue_offset, 1).count == 1
        except BaseException as error:
            error.add_note(what)
            raise
        finally:
            await store.stop()
        if unheard:
            told = CliRunner().invoke(cosmo, ["store", "check", str(root)])
            assert told.exit_code == PROBLEMS_FOUND, f"{unheard}: {told.output}"
        shutil.rmtree(root)
    assert cases == CASES_PER_KIND


@pytest.mark.parametrize("table", ["topics.json", "subscriptionGroup.json", "consumerOffset.json"])
@pytest.mark.parametrize("both", [False, True], ids=["file", "file-and-backup"])
async def test_damaged_tables_are_told(tmp_path: Path, table: str, both: bool) -> None:
    chance = random.Random(f"{SEED}-{table}-{both}")
    env = real_env(1)
    options = BrokerOptions(broker_name="b")
    store = Store(small(tmp_path / "store"), env)

    def open_table(path: Path) -> Topics | Groups | Offsets:
        if table == "topics.json":
            return Topics(options, str(path), env)
        if table == "subscriptionGroup.json":
            return Groups(options, str(path), env)
        return Offsets(options, str(path), store, env)

    first = tmp_path / "first" / table
    rows = open_table(first)
    await rows.start()
    for number in range(2):  # twice, so that there is a previous generation
        if isinstance(rows, Topics):
            rows.ensure(f"T{number}", 4, 6)
        elif isinstance(rows, Groups):
            rows.find(f"G{number}")
        else:
            rows.commit("G", f"T{number}", 0, number)
        await rows.stop()
        rows = open_table(first)
        await rows.start()
    await rows.stop()
    backup = first.with_name(table + ".bak")
    assert first.exists() and backup.exists()
    refused = 0
    for number in range(20):
        path = tmp_path / f"case{number}" / table
        path.parent.mkdir()
        shutil.copy(first, path)
        shutil.copy(backup, path.with_name(backup.name))
        what = damage(path, chance)
        if both:
            what += ", " + damage(path.with_name(backup.name), chance)
        rows = open_table(path)
        try:
            await rows.start()
        except (StoreError, ConfigError) as error:
            refused += 1
            assert both, f"{what}: the previous generation was not used: {error}"
            assert str(path) in str(error), f"{what}: {error}"
            assert any(word in str(error) for word in NEXT_STEPS), f"{what}: {error}"
        else:
            await rows.stop()
    assert refused > 2 or not both
