"""What is shipped: its licences, its bill of materials, and what an audit that failed says."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tools import audit, sbom


def test_every_dependency_may_be_shipped() -> None:
    assert len(sbom.parts()) > 5  # `Unclear` is raised for what may not


def test_the_bill_names_every_pinned_dependency_with_its_hashes() -> None:
    found = json.loads(sbom.document(sbom.parts()))
    names = set(re.findall(r"^([\w.-]+)==", sbom.LOCK.read_text(), re.MULTILINE))
    assert {one["name"] for one in found["components"]} == names
    for one in found["components"]:
        assert one["hashes"] and one["licenses"] and one["version"]
        assert one["purl"] == one["bom-ref"]
    assert found["dependencies"][0]["dependsOn"] == sorted(
        one["bom-ref"] for one in found["components"]
    )


def test_the_same_lock_gives_the_same_bytes() -> None:
    assert sbom.document(sbom.parts()) == sbom.document(sbom.parts())


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"license_expression": "GPL-3.0-only"}, "GPL-3.0-only"),
        ({"license_expression": "MIT AND AGPL-3.0-only"}, "AGPL"),
        ({"classifier": ["License :: OSI Approved :: Mozilla Public License"]}, "Mozilla"),
        ({"license": "ask me"}, "ask me"),
        ({}, "no stated licence"),
    ],
)
def test_a_licence_that_nobody_looked_at_is_refused(
    about: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found:
        json = about

    monkeypatch.setattr(sbom, "metadata", lambda _name: Found)
    with pytest.raises(sbom.Unclear, match=why):
        sbom.licence("thing")


def test_an_audit_without_a_network_is_no_clean_audit() -> None:
    assert audit.verdict("a.lock", 0, "No known vulnerabilities found") == ""
    assert "no clean result" in audit.verdict("a.lock", 1, "requests.ConnectionError: …")
    assert "no clean result" in audit.verdict("a.lock", 0, "x could not be audited: x (1.0)")
    assert "make lock" in audit.verdict("a.lock", 1, "Found 1 known vulnerability")
