"""Records `tests/golden` again: `make golden`, or `python -m tools.golden json crash`.

Words choose parts: `json` (with `store`), `binary`, `crash`, `clients`; all without words.
Each part replaces only its own files, and only after it was recorded to its end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from peers import clients
from peers.clients import Client, Consumer, Letter
from peers.raw import create_topic

from tools.golden import recorder, stores
from tools.golden.scene import STORE_SETTINGS, Scene, code_names, copy_store, play, scene

OUT = Path(__file__).resolve().parents[2] / "tests" / "golden"
# Enough to fill a log file, consume queue files and index files in one queue.
BULK = 60
FLOOD = 110
# Not worth their size: what happens in them is recorded elsewhere.
LEFT_OUT = {
    *("bulk", "wait_for_delayed", "send_properties", "transaction_pending", "pull_stop"),
    *("clients_stop",),
}
# The second header form does not need every scenario again.
BINARY = (
    *("admin_start", "create_topic_and_group", "topic_route", "send_v2", "send_v2_unicode"),
    *("send_v1_code10", "send_oneway", "send_batch_320", "send_compressed_zlib"),
    *("send_error", "transaction", "unregister_client", "pull_start", "pull_found"),
    *("pull_not_found", "pull_offset_illegal", "pull_tag_filtered", "offset_queries"),
    *("update_consumer_offset", "query_consumer_offset", "pull_stop"),
    *("cluster_info", "kv_config", "topic_stats", "query_message_by_key", "view_message_by_id"),
    *("clean_ops", "delete_topic", "admin_shutdown"),
)
CLIENTS: dict[str, tuple[Client, Sequence[str], str]] = {
    "go_client": (clients.GO, ("sync", "oneway", "batch"), "push"),
    "cpp_client": (clients.CPP, ("sync", "orderly"), "orderly"),
    "node_client": (clients.NODE, ("sync",), "push"),
}


def record_json(work: Path) -> None:
    with scene(work / "json", code_names(work)) as stage:
        play(stage, BULK, "JSON")
    _write_wire(stage, "json")
    copy_store(stage.cluster.store, OUT / "store")
    read = stores.manifest(OUT / "store", work / "json-again", walk=True)
    stores.write_manifest(read, OUT / "store.manifest.json")


def record_binary(work: Path) -> None:
    with scene(work / "binary", code_names(work), "ROCKETMQ") as stage:
        play(stage, 0, "ROCKETMQ", BINARY)
    _write_wire(stage, "binary")


def record_crash(work: Path) -> None:
    stores.crash(work / "crash", FLOOD, OUT / "store-crash")
    read = stores.manifest(OUT / "store-crash", work / "crash-again", walk=False)
    stores.write_manifest(read, OUT / "store-crash.manifest.json")
    stores.tear(OUT / "store-crash", read, OUT / "store-torn")
    read = stores.manifest(OUT / "store-torn", work / "torn-again", walk=False)
    stores.write_manifest(stores.placed(read), OUT / "store-torn.manifest.json")


def record_clients(work: Path) -> None:
    with scene(work / "clients", code_names(work)) as stage:
        cluster = stage.cluster
        for name, (client, send_modes, consume_mode) in CLIENTS.items():
            create_topic(cluster.namesrv_port, cluster.broker_port, f"G_{client.name}", 2)
            stage.recorder.scenario = name
            print(f"  {name}", flush=True)
            _talk(stage, client, send_modes, consume_mode)
        stage.recorder.scenario = "broker_stop_unregister"
    _write_wire(stage, "clients")


def _talk(stage: Scene, client: Client, send_modes: Sequence[str], consume_mode: str) -> None:
    topic = f"G_{client.name}"
    letters = [Letter(b"body %d" % i, "TagA", f"key-{i}", shard=i) for i in range(2)]
    for mode in send_modes:
        clients.send(client, stage.namesrv, topic, f"p_{client.name}", mode, letters)
    place = (client, stage.namesrv, topic, f"g_{client.name}")
    with Consumer(*place, expression="TagA || TagB", mode=consume_mode) as consumer:
        consumer.receive(len(letters) * len(send_modes))


def _write_wire(stage: Scene, folder: str) -> None:
    target = OUT / "wire" / folder
    shutil.rmtree(target, ignore_errors=True)
    for name, lines in recorder.without_repetition(stage.recorder.lines).items():
        if lines and name not in LEFT_OUT:
            recorder.write(lines, target / f"{name}.jsonl", stage.neutral)


def _write_index() -> None:
    """Which request code was seen in which folder."""
    seen: dict[tuple[int, str, str], set[str]] = {}
    for path in sorted((OUT / "wire").glob("*/*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            # A code that nobody knows was sent to see how it is refused.
            if line["kind"] != "response" and line["name"] != str(line["code"]):
                key = (line["code"], line["name"], line["dir"])
                seen.setdefault(key, set()).add(path.parent.name)
    rows = [
        {"code": code, "name": name, "dir": direction, "sets": sorted(sets)}
        for (code, name, direction), sets in sorted(seen.items())
    ]
    text = ",\n".join(json.dumps(row) for row in rows)
    (OUT / "wire" / "index.json").write_text(f"[\n{text}\n]\n")


PARTS: dict[str, Callable[[Path], None]] = {
    "json": record_json,
    "binary": record_binary,
    "crash": record_crash,
    "clients": record_clients,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.golden", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--keep", action="store_true", help="keep the servers' directories")
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    work = Path(tempfile.mkdtemp(prefix="golden-"))
    OUT.mkdir(parents=True, exist_ok=True)
    try:
        for name in chosen.parts or PARTS:
            print(f"recording {name}", flush=True)
            PARTS[name](work / name)
        _write_index()
        options = {**{name: int(value) for name, value in STORE_SETTINGS.items()}}
        (OUT / "options.json").write_text(json.dumps(options, indent=2) + "\n")
    finally:
        if chosen.keep:
            print(f"kept {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
