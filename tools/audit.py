"""`make audit`: pip-audit over the pinned dependencies, in an environment of its own.

Without a network nothing can be checked. The program then says so and fails: silence would look
like a clean result. Therefore it is no part of `.ci/run`.

Usage: python -m tools.audit
"""

from __future__ import annotations

import subprocess
import sys
import venv

from peers.resolve import ROOT

FOLDER = ROOT / "build" / "audit"
LOCKS = ("requirements.lock", "requirements-dev.lock")
# What pip-audit says when it was not told everything, whatever its exit code.
UNCHECKED = (
    "could not be audited",
    "ConnectionError",
    "ServiceError",
    "HTTPError",
    "Max retries",
    "Name or service",
    "timed out",
)


def verdict(lock: str, code: int, output: str) -> str:
    """Empty when the lock is clean; else what is wrong."""
    if any(word in output for word in UNCHECKED):
        return (
            f"{lock}: the database of vulnerabilities cannot be reached, or does not know all of"
            " these; this is no clean result. Try again where the network lets you"
        )
    return f"{lock}: see above; raise the versions with `make lock`" if code else ""


def run(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    return done.returncode, done.stdout + done.stderr


def main() -> None:
    if not (FOLDER / "bin" / "pip-audit").exists():
        venv.create(FOLDER, with_pip=True)
        code, output = run(str(FOLDER / "bin" / "pip"), "install", "-q", "pip-audit")
        if code:
            sys.exit(f"pip-audit cannot be installed; nothing was checked\n{output[-500:]}")
    wrong = []
    for lock in LOCKS:
        command = [str(FOLDER / "bin" / "pip-audit"), "--require-hashes", "--disable-pip"]
        code, output = run(*command, "-r", lock)
        print(output[-2000:])
        wrong.append(verdict(lock, code, output))
    if any(wrong):
        sys.exit("\n".join(filter(None, wrong)))


if __name__ == "__main__":
    main()
