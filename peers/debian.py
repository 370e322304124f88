"""Programs from Debian packages, unpacked into `build/peers` and not installed.

A program that is on PATH already is taken as it is. The packages come through the machine's own
apt, as it is configured, in whatever version it offers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from peers.resolve import BUILD, make_once, require, run_with_tries


def program(name: str, packages: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Path of a program and what its environment needs; `packages` has its libraries too."""
    installed = shutil.which(name)
    if installed is not None:
        return installed, {}
    root = BUILD / f"debian-{name}"

    def make() -> None:
        require("apt-get", "dpkg-deb")
        archives = root / "archives"
        archives.mkdir(parents=True, exist_ok=True)
        run_with_tries(["apt-get", "-q", "download", *packages], cwd=archives)
        for archive in sorted(archives.glob("*.deb")):
            run_with_tries(["dpkg-deb", "-x", str(archive), str(root)], cwd=archives)

    make_once(f"debian-{name}", [name, *packages], root, make)
    paths = [root / folder / name for folder in ("usr/bin", "usr/sbin")]
    path = next((path for path in paths if path.exists()), paths[0])
    libraries = [str(folder) for folder in sorted((root / "usr" / "lib").glob("*-linux-gnu*"))]
    return str(path), {"LD_LIBRARY_PATH": os.pathsep.join(libraries)} if libraries else {}
