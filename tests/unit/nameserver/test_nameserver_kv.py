from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from cosmodrome.env.base import Env
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError, Refused
from cosmodrome.nameserver import kv as module
from cosmodrome.nameserver.kv import KeyValues


@pytest.fixture
def env() -> Env:
    return real_env(seed=1)


async def opened(path: Path | str, env: Env) -> KeyValues:
    table = KeyValues(str(path), env)
    await table.load()
    return table


async def test_put_get_delete_survive_a_restart(tmp_path: Path, env: Env) -> None:
    path = tmp_path / "namesrv" / "kvConfig.json"
    table = await opened(path, env)
    await table.put("NS", "k", "值")
    await table.put("NS", "other", "")
    await table.put("NS2", "k", "2")
    assert json.loads(path.read_text()) == {
        "configTable": {"NS": {"k": "值", "other": ""}, "NS2": {"k": "2"}}
    }
    await table.delete("NS", "k")
    await table.delete("NS", "other")
    await table.delete("Nowhere", "k")
    again = await opened(path, env)
    for each in (table, again):
        assert each.get("NS", "k") is None
        assert each.get("NS2", "k") == "2"
        assert each.namespace("NS") == {}
        assert each.namespace("Nowhere") is None


async def test_without_path_it_stays_in_memory(tmp_path: Path, env: Env) -> None:
    table = await opened("", env)
    await table.put("NS", "k", "v")
    assert table.get("NS", "k") == "v"
    assert list(tmp_path.iterdir()) == []


async def test_it_reads_what_upstream_wrote(tmp_path: Path, env: Env) -> None:
    path = tmp_path / "kvConfig.json"
    path.write_text('{\n\t"configTable":{"NS1":{},"ORDER_TOPIC_CONFIG":{"T":"a:3"}\n\t}\n}')
    assert (await opened(path, env)).get("ORDER_TOPIC_CONFIG", "T") == "a:3"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"configTable":{"a":1}}', b'"\xff"'])
async def test_a_damaged_file_falls_back_to_the_previous_generation(
    tmp_path: Path, env: Env, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    path = tmp_path / "kvConfig.json"
    table = await opened(path, env)
    await table.put("NS", "k", "1")
    await table.put("NS", "k", "2")
    path.write_bytes(damage)
    with caplog.at_level(logging.ERROR):
        again = await opened(path, env)
    assert again.get("NS", "k") == "1"
    assert "damaged" in caplog.text and str(path) in caplog.text


async def test_two_damaged_files_stop_the_start(tmp_path: Path, env: Env) -> None:
    path = tmp_path / "kvConfig.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="repair"):
        await opened(path, env)
    Path(f"{path}.bak").write_text("[]")
    with pytest.raises(ConfigError, match="repair"):
        await opened(path, env)


async def test_a_failed_save_changes_nothing(tmp_path: Path, env: Env) -> None:
    blocker = tmp_path / "file"
    table = await opened(tmp_path / "file" / "kvConfig.json", env)
    blocker.write_text("not a directory")
    with pytest.raises(Refused, match="Nothing was changed"):
        await table.put("NS", "k", "v")
    assert table.namespace("NS") is None
    blocker.unlink()
    await table.put("NS", "k", "v")
    assert table.get("NS", "k") == "v"


async def test_changes_at_once_all_arrive(tmp_path: Path, env: Env) -> None:
    path = tmp_path / "kvConfig.json"
    table = await opened(path, env)
    await asyncio.gather(*(table.put("NS", str(number), "v") for number in range(20)))
    assert len((await opened(path, env)).namespace("NS") or ()) == 20


async def test_limits(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    table = await opened("", env)
    for namespace, key in (("", "k"), ("n", ""), ("n" * 1025, "k"), ("n", "k" * 1025)):
        with pytest.raises(Refused, match="characters"):
            await table.put(namespace, key, "v")
    monkeypatch.setattr(module, "FILE_BYTES_MAX", 100)
    await table.put("n", "k", "v")
    with pytest.raises(Refused, match="delete entries"):
        await table.put("n", "big", "v" * 100)
    assert table.namespace("n") == {"k": "v"}


async def test_the_table_is_logged(env: Env, caplog: pytest.LogCaptureFixture) -> None:
    table = await opened("", env)
    await table.put("NS", "k", "v1")
    with caplog.at_level(logging.INFO):
        table.write_to_log()
    assert "namespace=NS key=k value='v1'" in caplog.text
