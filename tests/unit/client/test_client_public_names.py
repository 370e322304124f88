"""The names users import are there, and importing the package alone loads none of them."""

from __future__ import annotations

import subprocess
import sys

import cosmodrome


def test_every_public_name_can_be_had() -> None:
    assert sorted(cosmodrome._HOMES) == sorted(cosmodrome.__all__)
    for name in cosmodrome.__all__:
        assert getattr(cosmodrome, name).__name__ == name
    assert set(cosmodrome.__all__) <= set(dir(cosmodrome))
    assert not hasattr(cosmodrome, "Nonsense")


def test_the_package_alone_is_light() -> None:
    code = "import sys, cosmodrome; print([m for m in sys.modules if m.startswith('cosmodrome.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_client_needs_nothing_that_only_unix_has() -> None:
    missing = ("fcntl", "resource", "pwd", "grp", "termios", "uvloop")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
        "import cosmodrome\n"
        "for name in cosmodrome.__all__: getattr(cosmodrome, name)\n"
        "import cosmodrome.blocking"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
