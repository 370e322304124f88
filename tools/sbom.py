"""`make sbom`: what the package is made of, as CycloneDX 1.5 JSON in `dist/sbom.json`.

Names, versions and hashes come from `requirements.lock`, licences from the installed metadata. The
same lock gives the same bytes. A dependency whose licence is not in `ALLOWED` ends the program.

Usage: python -m tools.sbom
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import uuid
from dataclasses import dataclass
from importlib.metadata import metadata

from peers.resolve import ROOT

OUT = ROOT / "dist" / "sbom.json"
LOCK = ROOT / "requirements.lock"
# What may be shipped with software under the Apache License.
ALLOWED = frozenset({"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "MIT", "PSF-2.0"})
# SPDX names of what older metadata says in words.
SPDX = {
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "Apache Software License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
}
BUILD_ONLY = frozenset({"cython", "setuptools"})  # they make the package and are not part of it


class Unclear(Exception):
    """A licence that nobody has looked at."""


@dataclass(frozen=True)
class Part:
    name: str
    version: str
    hashes: tuple[str, ...]
    licence: str

    def component(self) -> dict[str, object]:
        package_url = f"pkg:pypi/{self.name}@{self.version}"
        return {
            "type": "library",
            "bom-ref": package_url,
            "name": self.name,
            "version": self.version,
            "purl": package_url,
            "scope": "excluded" if self.name in BUILD_ONLY else "required",
            "hashes": [{"alg": "SHA-256", "content": one} for one in self.hashes],
            "licenses": [{"expression": self.licence}],
        }


def pinned(lock: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Name, version and hashes of each requirement."""
    found = []
    for block in re.split(r"\n(?=\S)", lock.replace("\\\n", " ")):
        if match := re.match(r"([\w.-]+)==(\S+)", block):
            hashes = tuple(sorted(re.findall(r"--hash=sha256:([0-9a-f]{64})", block)))
            found.append((match[1], match[2], hashes))
    return sorted(found)


def licence(name: str) -> str:
    """The SPDX expression of an installed package."""
    about = metadata(name).json
    expression = str(about.get("license_expression", ""))
    if not expression:
        kinds = [
            line.rpartition(" :: ")[2]
            for line in about.get("classifier", ())
            if line.startswith("License :: OSI Approved :: ")
        ]
        expression = " OR ".join(SPDX.get(kind, kind) for kind in kinds)
    if not expression:
        stated = str(about.get("license", "")).strip()
        expression = SPDX.get(stated, stated)
    words = [word for word in re.split(r"\s+(?:AND|OR)\s+|[()]", expression) if word.strip()]
    if not words or not all(word in ALLOWED for word in words):
        raise Unclear(
            f"{name} is under {expression or 'no stated licence'}; if it may be shipped, add that"
            " to ALLOWED in tools/sbom.py, else choose another dependency"
        )
    return expression


def parts() -> list[Part]:
    return [
        Part(name, version, hashes, licence(name))
        for name, version, hashes in pinned(LOCK.read_text())
    ]


def document(found: list[Part]) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    components = [part.component() for part in found]
    body = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "purl": own,
                "licenses": [{"expression": project["license"]}],
            }
        },
        "components": components,
        "dependencies": [
            {"ref": own, "dependsOn": sorted(str(one["bom-ref"]) for one in components)}
        ],
    }
    # A name for this very content: random ones would differ from build to build.
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    return (
        json.dumps({**body, "serialNumber": f"urn:uuid:{number}"}, indent=2, sort_keys=True) + "\n"
    )


def main() -> None:
    try:
        found = parts()
    except Unclear as error:
        sys.exit(str(error))
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(document(found))
    for part in found:
        print(f"{part.name:<12} {part.version:<10} {part.licence}")
    print(f"written to {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
