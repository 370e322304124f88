"""Which filter a group uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.filterserver.filter_kit import CALL, GREEN, install, installed

from cosmodrome.errors import Refused
from cosmodrome.filterserver import choices as module
from cosmodrome.filterserver.choices import Choices
from cosmodrome.wire.commands.filter import RegisterMessageFilterClass


def choose(
    choices: Choices, name: str, group: str = "g", topic: str = "T", body: bytes = b"class X {}"
) -> None:
    ask = RegisterMessageFilterClass(
        consumer_group=group, topic=topic, class_name=name, class_crc=1, body=body
    )
    assert choices.choose(ask, CALL).code == 0


async def test_the_last_choice_counts(tmp_path: Path) -> None:
    choices = Choices(await installed(tmp_path))
    choose(choices, "com.acme.Green")
    choose(choices, "acme.filters.All", topic="U")
    assert choices.of("g", "T").name == "com.acme.Green"
    choose(choices, "acme.filters.All")
    assert choices.of("g", "T").name == "acme.filters.All"
    assert len(choices) == 2


async def test_no_choice_yet(tmp_path: Path) -> None:
    choices = Choices(await installed(tmp_path))
    choose(choices, "com.acme.Green")
    for group, topic in (("h", "T"), ("g", "U")):
        with pytest.raises(Refused, match="next heartbeat"):
            choices.of(group, topic)


async def test_a_filter_may_be_installed_later(tmp_path: Path) -> None:
    filters = await installed(tmp_path)
    choices = Choices(filters)
    with pytest.raises(Refused, match="not installed"):
        choose(choices, "com.acme.Later")
    with pytest.raises(Refused, match=r"com\.acme\.Later' is not installed"):
        choices.of("g", "T")
    install(tmp_path, GREEN.replace("com.acme.Green", "com.acme.Later"))
    await filters.load()
    assert choices.of("g", "T").name == "com.acme.Later"


async def test_code_that_is_sent_is_not_even_read(tmp_path: Path) -> None:
    choices = Choices(await installed(tmp_path))
    code = b"FILTERS = {'com.acme.Sent': print}"
    with pytest.raises(Refused, match="code sent by clients is never run"):
        choose(choices, "com.acme.Sent", body=code)
    choose(choices, "com.acme.Green", body=b"\xff\xfe not text")
    assert choices.of("g", "T").matches.__module__.startswith("cosmodrome_installed_filter_")


@pytest.mark.parametrize(
    ("group", "topic", "name"),
    [("../g", "T", "com.acme.Green"), ("g", "a/b", "com.acme.Green"), ("g", "T", "os; rm -rf")],
)
async def test_names_are_checked(tmp_path: Path, group: str, topic: str, name: str) -> None:
    choices = Choices(await installed(tmp_path))
    with pytest.raises(Refused):
        choose(choices, name, group, topic)
    assert len(choices) == 0


async def test_the_table_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHOICES_MAX", 2)
    choices = Choices(await installed(tmp_path))
    for group in ("a", "b", "a", "c"):
        choose(choices, "com.acme.Green", group)
    assert len(choices) == 2
    assert choices.of("a", "T") and choices.of("c", "T")
    with pytest.raises(Refused):
        choices.of("b", "T")
