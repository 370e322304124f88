"""Finding installed filters, and what a filter sees of a message."""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path

import pytest
from tests.unit.filterserver.filter_kit import GREEN, PACKED, install, installed, record

from cosmodrome.env.real import RealDisk, real_env
from cosmodrome.errors import ConfigError, ProtocolError, Refused
from cosmodrome.filterserver import filters as module
from cosmodrome.filterserver.filters import Filter, Installed, Message, load_filters


def load(folder: Path, *points: importlib.metadata.EntryPoint) -> dict[str, Filter]:
    return load_filters(str(folder), RealDisk(), points)


def always(message: Message) -> bool:
    return True


def point(name: str, value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, module.ENTRY_POINTS)


# --- the message ------------------------------------------------------------------------------


def test_what_a_filter_sees() -> None:
    message = Message(record(5, TAGS="A", KEYS="k1 k2", UNIQ_KEY="ID", colour="green"), "g")
    assert (message.topic, message.consumer_group) == ("T", "g")
    assert (message.tags, message.keys, message.message_id) == ("A", ("k1", "k2"), "ID")
    assert message.properties["colour"] == "green"
    assert message.body == b"hello"
    assert (message.queue_id, message.queue_offset, message.flag) == (3, 5, 9)
    assert (message.born_ms, message.store_ms, message.reconsume_times) == (111, 222, 2)
    assert message.born_host == ("192.0.2.9", 1234)


def test_a_message_without_properties() -> None:
    message = Message(record(), "g")
    assert (message.tags, message.keys, dict(message.properties)) == ("", (), {})
    assert len(message.message_id) == 32  # where it is stored


def test_bodies_are_decompressed_when_asked_for() -> None:
    assert Message(record(body=b"x" * 500, sys_flag=PACKED), "g").body == b"x" * 500
    damaged = record(body=b"x" * 500, sys_flag=PACKED)
    damaged.body = b"no lz4 at all"
    message = Message(damaged, "g")
    assert message.tags == ""
    with pytest.raises(ProtocolError):
        _ = message.body


def test_a_message_cannot_be_changed() -> None:
    message = Message(record(colour="green"), "g")
    with pytest.raises(AttributeError):
        message.topic = "U"  # type: ignore[misc]
    with pytest.raises(TypeError):
        message.properties["colour"] = "red"  # type: ignore[index]


# --- finding ----------------------------------------------------------------------------------


def test_files_and_packages(tmp_path: Path) -> None:
    install(tmp_path, GREEN)
    install(tmp_path, "this is not Python", name="notes.txt")
    install(tmp_path, "neither is this", name="_draft.py")
    found = load(tmp_path, point("com.acme.Packaged", f"{__name__}:always"))
    assert sorted(found) == ["acme.filters.All", "com.acme.Green", "com.acme.Packaged"]
    assert found["com.acme.Green"].origin == str(tmp_path / "some.py")
    assert found["com.acme.Packaged"].matches is always
    green = found["com.acme.Green"].matches
    assert green(Message(record(colour="green"), "g")) is True
    assert green(Message(record(colour="red"), "g")) is False


def test_no_folder_is_no_filters(tmp_path: Path) -> None:
    assert load(tmp_path / "missing") == {}


def test_a_file_may_use_dataclasses(tmp_path: Path) -> None:
    install(
        tmp_path,
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass(slots=True)\nclass Over:\n    limit: int\n"
        "    def __call__(self, message):\n        return len(message.body) > self.limit\n"
        'FILTERS = {"Over4": Over(4), "Over5": Over(5)}\n',
    )
    found = load(tmp_path)
    answers = [found[name].matches(Message(record(), "g")) for name in ("Over4", "Over5")]
    assert answers == [True, False]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\nFILTERS = {", "line 2: SyntaxError"),
        ("x = 1\ny = 1 / 0\nFILTERS = {}", "line 2: ZeroDivisionError"),
        ("import sys\nsys.exit(3)", "line 2: SystemExit"),
        ("import surely_missing", "No module named 'surely_missing'"),
        ("x = 1", "no table FILTERS"),
        ("FILTERS = [1]", "no table FILTERS"),
        ("FILTERS = {'a b': lambda m: True}", "'a b' is not a filter name"),
        ("FILTERS = {'../x': lambda m: True}", "is not a filter name"),
        ("FILTERS = {7: lambda m: True}", "'7' is not a filter name"),
        ("FILTERS = {'x' * 256: lambda m: True}", "is not a filter name"),
        ("FILTERS = {'a.B': 5}", "filter a.B is a int"),
        ("class C: pass\nFILTERS = {'a.B': C}", "filter a.B is a type"),
        ("async def f(m): return True\nFILTERS = {'a.B': f}", "without async"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = install(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_bad_packages_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"com\.acme\.X.*surely_missing"):
        load(tmp_path, point("com.acme.X", "surely_missing:f"))


def test_one_name_from_two_places(tmp_path: Path) -> None:
    install(tmp_path, GREEN, name="a.py")
    install(tmp_path, GREEN, name="b.py")
    with pytest.raises(ConfigError, match=r"a\.py and from .*b\.py; remove or rename"):
        load(tmp_path)


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, GREEN)
    monkeypatch.setattr(module, "FILE_BYTES_MAX", 10)
    with pytest.raises(ConfigError, match="at most 10"):
        load(tmp_path)
    monkeypatch.setattr(module, "FILES_MAX", 0)
    with pytest.raises(ConfigError, match="1 Python files"):
        load(tmp_path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path)


# --- the set in use ---------------------------------------------------------------------------


async def test_a_reload_replaces_all_or_nothing(tmp_path: Path) -> None:
    made = await installed(tmp_path)
    assert made.names() == ["acme.filters.All", "com.acme.Green"]
    green = made.find("com.acme.Green")
    install(tmp_path, "FILTERS = {'New': lambda m: True, 'bad name': None}")
    with pytest.raises(ConfigError):
        await made.load()
    assert made.find("com.acme.Green") is green
    install(tmp_path, "FILTERS = {'New': lambda m: True}")
    await made.load()
    assert made.names() == ["New"] and len(made) == 1


async def test_an_unknown_filter_says_how_to_install_it(tmp_path: Path) -> None:
    made = await installed(tmp_path)
    with pytest.raises(Refused) as caught:
        made.find("com.acme.Blue")
    for part in ("'com.acme.Blue' is not installed", "FILTERS", "SIGHUP", "acme.filters.All"):
        assert part in caught.value.remark


async def test_no_filters_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = Installed(str(tmp_path), real_env())
    with caplog.at_level(logging.WARNING):
        await made.load()
    assert "filters_missing" in caplog.text and str(tmp_path) in caplog.text
    with pytest.raises(Refused, match="Installed now: none"):
        made.find("x")
