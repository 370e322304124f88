"""The releases that version numbers in frames stand for.

Versions are ordinals of a list of releases. From 4.0.0 on it is regular: a snapshot and a release
per patch, ten patches per minor version.
"""

from __future__ import annotations

VERSION_4_0_0 = 213
VERSIONS_PER_MINOR = 20


def release(version: int) -> str:
    """The release that a version number stands for; the number itself where that is not known."""
    steps = version - VERSION_4_0_0
    if steps < -1:
        return str(version)
    snapshot = "" if steps % 2 == 0 else "-SNAPSHOT"
    minor, patch = divmod((steps + 1) // 2, VERSIONS_PER_MINOR // 2)
    return f"{4 + minor // 10}.{minor % 10}.{patch}{snapshot}"
