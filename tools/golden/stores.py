"""The recorded stores and their manifests: what the Java side reads from a copy of each."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from peers.java import JavaCluster
from peers.process import dying_with_parent, free_port

from tools.golden.scene import BROKER_SETTINGS, copy_store, program

_TORN_KEEP_BYTES = 100
_PLACE = {
    *("topic", "queueId", "queueOffset", "commitLogOffset", "storeSize", "storeTimestamp"),
    *("msgId", "offsetMsgId", "keys", "cq_offset", "cq_size", "cq_tagsCode"),
}


def crash(directory: Path, count: int, target: Path) -> None:
    """Kills a broker while a producer is sending; its files go to `target` as they were left."""
    cluster = JavaCluster(directory, free_port(), free_port(-2, 1), settings=BROKER_SETTINGS)
    cluster.start()
    words = ("flood", cluster.namesrv_address, cluster.broker_address, str(count))
    child = subprocess.Popen(
        dying_with_parent(program("Scenarios", *words, home=directory)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdin is not None
        if child.stdout.readline().strip() != "sent":
            raise RuntimeError("the producer ended before the broker was killed")
        cluster.broker.kill9()
    finally:
        child.kill()
        child.communicate()
        cluster.kill9()
    copy_store(cluster.store, target)


def tear(store: Path, manifest: dict[str, Any], target: Path) -> None:
    """Damages a copy: half of the last message, one queue file and one index file are gone."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(store, target)
    last = max(manifest["messages"], key=lambda message: message["commitLogOffset"])
    at = last["commitLogOffset"]
    for segment in sorted((target / "commitlog").iterdir()):
        base = int(segment.name)
        data = bytearray(segment.read_bytes())
        if base <= at < base + len(data):
            cut = at - base + _TORN_KEEP_BYTES
            data[cut:] = bytes(len(data) - cut)
            segment.write_bytes(data)
    sorted((target / "consumequeue" / "CBulk" / "1").iterdir())[-1].unlink()
    sorted((target / "index").iterdir())[-1].unlink()


def manifest(store: Path, directory: Path, *, walk: bool) -> dict[str, Any]:
    """What the Java broker and client make of a copy of `store`."""
    copy_store(store, directory / "store")
    cluster = JavaCluster(directory, free_port(), free_port(-2, 1), settings=BROKER_SETTINGS)
    with cluster:
        out = directory / "manifest.json"
        words = (cluster.namesrv_address, cluster.broker_address, str(cluster.store), str(out))
        with (directory / "manifest.log").open("wb") as log:
            subprocess.run(
                program("Manifest", *words, home=directory),
                stdin=subprocess.DEVNULL,
                stderr=log,
                check=True,
                timeout=120,
            )
    read: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if not walk:
        del read["commitlog_walk"], read["search_offset"]
    return read


def placed(read: dict[str, Any]) -> dict[str, Any]:
    """The same without what is in the messages: only where they are."""
    messages = [
        {name: value for name, value in message.items() if name in _PLACE}
        for message in read["messages"]
    ]
    return {**read, "messages": messages}


def write_manifest(read: dict[str, Any], path: Path) -> None:
    """One line per item, so that a changed recording can be read as a difference."""
    members = []
    for name, value in read.items():
        if isinstance(value, list):
            items = ",\n".join(json.dumps(item, ensure_ascii=False) for item in value)
            members.append(f"{json.dumps(name)}: [\n{items}\n]")
        else:
            members.append(f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")
    path.write_text("{\n" + ",\n".join(members) + "\n}\n", encoding="utf-8")
