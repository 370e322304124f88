"""What the admin tool of 5.3 says about a pair of ours: `mqadmin haStatus`."""

from __future__ import annotations

import re
from pathlib import Path

from peers.clients import Client
from peers.java import mqadmin
from peers.pair import Pair
from peers.raw import call


def ha_status(pair: Pair, address: str) -> dict[str, str]:
    """The figures that it prints, by their names, and its rows of slaves under "rows"."""
    said = mqadmin(pair.namesrv, "haStatus", "-b", address, artifacts="server53", timeout_s=120)
    found = dict(re.findall(r"^#(\S+)\t(\S+)", said, re.MULTILINE))
    assert found, said
    return found | {"rows": "\n".join(re.findall(r"^\d[\d.]+:\d+ +\d+ .*$", said, re.MULTILINE))}


def test_ha_status_of_a_pair(java: Client, tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        fields = {"a": "p", "b": "TBW102", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1"}
        fields |= {"h": "0", "i": "", "j": "0", "k": "false", "l": "16", "m": "false"}
        pair.wait(lambda: call(pair.master.port, 310, fields, b"body")[0] == 0, 60)
        master = ha_status(pair, pair.master.address)
        end = str(pair.master.end)
        assert master["MasterAddr"] == pair.master.address
        assert (master["SlaveNum"], master["InSyncSlaveNum"]) == ("1", "1")
        assert master["MasterCommitLogMaxOffset"] == end != "0"
        assert re.fullmatch(rf"127\.0\.0\.1:\d+ +{end} +0 +\S+ +OK +{end}", master["rows"])
        slave = ha_status(pair, pair.slave.address)
        assert slave["MasterAddr"] == f"127.0.0.1:{pair.master.ha_port}"
        assert slave["CommitLogMaxOffset"] == end
