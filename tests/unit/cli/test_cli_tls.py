"""`cosmo tls`, servers with settings of TLS, and commands that connect with it."""

from __future__ import annotations

import re
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import tls_kit
from tests.unit.cli.operating_kit import Done, cosmo, rows
from tests.unit.cli.test_cli_serve import UP, running

from cosmodrome.cli.support import settings
from cosmodrome.env.options import TlsOptions
from cosmodrome.errors import ConfigError

NOWHERE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the command, with the settings that it printed in tls.conf."""
    folder = tls_kit.certificates(tmp_path_factory.mktemp("tls"))  # or the test is skipped
    done = cosmo(NOWHERE, "tls", "make-test-certs", str(folder), "--host", "broker.test")
    assert done.code == 0
    (folder / "tls.conf").write_text(done.out)
    return folder


@pytest.fixture(autouse=True)
def own_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def served(certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Name server and HTTP port of a node that takes TLS only and wants certificates."""
    words = [
        *("--set", f"tls.config.file={certs / 'tls.conf'}"),
        *("--set", "tls.server.need.client.auth=require"),
        *("--data", str(tmp_path_factory.mktemp("data"))),
    ]
    with running(*UP, *words, env={"COSMO_TLS_SERVER_MODE": "enforcing"}) as node:
        text = node.say("Ctrl-C")
        found = (
            re.search(r"name server\s+(\S+)", text),
            re.search(r"health\s+https://([^/]+)", text),
        )
        assert found[0] and found[1], text
        yield found[0][1], found[1][1]


def with_tls(served: tuple[str, str], certs: Path, *words: str) -> Done:
    flags = ["--tls-ca", str(certs / "ca.pem")]
    flags += ["--tls-cert", str(certs / "client.pem"), "--tls-key", str(certs / "client.key")]
    return cosmo(served[0], *flags, *words)


def test_commands_connect_with_tls(served: tuple[str, str], certs: Path, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("hello\n")
    sent = with_tls(served, certs, "produce", "Secret", "--file", str(tmp_path / "lines"))
    assert sent.code == 0
    done = with_tls(served, certs, "consume", "Secret", "--count", "1", "--timeout", "30")
    assert done.code == 0 and done.out.split()[-1] == "hello"
    assert "Secret" in with_tls(served, certs, "topic", "list").out
    assert with_tls(served, certs, "mqadmin", "clusterList").code == 0


def test_without_tls_or_a_certificate_nobody_answers(served: tuple[str, str], certs: Path) -> None:
    assert cosmo(served[0], "topic", "list", "--timeout", "2").code == 3
    done = cosmo(served[0], "--tls-no-verify", "topic", "list", "--timeout", "2")
    assert done.code == 3
    done = cosmo(served[0], "--tls", "topic", "list", "--timeout", "2")
    assert done.code == 3 and "its certificate is not accepted" in done.err


def test_a_context_remembers_tls(served: tuple[str, str], certs: Path) -> None:
    files = [
        *("--tls-ca", str(certs / "ca.pem")),
        *("--tls-cert", str(certs / "client.pem"), "--tls-key", str(certs / "client.key")),
    ]
    assert cosmo("", "context", "add", "safe", served[0], *files).code == 0
    assert rows("", "context", "list") == [
        {"current": True, "name": "safe", "namesrv": served[0], "tls": True}
    ]
    assert cosmo("", "cluster", "status").code == 0
    assert cosmo("", "context", "add", "safe", served[0]).code == 0
    assert cosmo("", "cluster", "status", "--timeout", "2").code == 3


def test_probes_use_https(served: tuple[str, str], certs: Path) -> None:
    context = tls_kit.client(certs, shows=certs)
    with urllib.request.urlopen(f"https://{served[1]}/livez", context=context, timeout=30) as got:
        assert got.status == 200
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{served[1]}/livez", timeout=30)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--tls-ca", "/no/such.pem"), "--tls-ca /no/such.pem"),
        (("--tls-key", "k.pem"), "add --tls-cert"),
        (("--tls-cert", "/no/such.pem"), "belong together"),
    ],
)
def test_files_that_cannot_be_used(words: tuple[str, ...], why: str) -> None:
    done = cosmo(NOWHERE, *words, "topic", "list")
    assert done.code == 1 and why in done.err


# --- settings ------------------------------------------------------------------------------------


def test_settings_of_tls(certs: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.properties"
    own.write_text("tls.server.keyPassword=sesame\ntls.server.mode=enforcing\n")
    file = tmp_path / "broker.conf"
    file.write_text(f"tls.config.file={own}\ntls.server.mode=disabled\n")
    chosen = settings.for_broker({}, file=str(file))
    assert chosen.broker is not None
    assert chosen.broker.get(TlsOptions).tls_server_mode == "enforcing"
    assert chosen.broker.get(TlsOptions).tls_server_key_password == "sesame"
    assert "sesame" not in chosen.text() and "tls.server.keyPassword=***" in chosen.text()
    chosen = settings.for_broker({"COSMO_TLS_SERVER_MODE": "permissive"}, file=str(file))
    assert chosen.broker is not None
    assert chosen.broker.get(TlsOptions).tls_server_mode == "permissive"
    own.write_text("brokerName=x\n")
    with pytest.raises(ConfigError, match="brokerName"):
        settings.for_broker({}, file=str(file))


def test_a_server_without_certificate_does_not_enforce(tmp_path: Path) -> None:
    with running(*UP, "--data", str(tmp_path), "--set", "tls.server.mode=enforcing") as node:
        code, errors = node.finish()
    assert code == 1 and "set tls.server.certPath" in errors and "Traceback" not in errors


# --- certificates --------------------------------------------------------------------------------


def test_a_second_call_renews_what_the_authority_signed(certs: Path, tmp_path: Path) -> None:
    words = ("tls", "make-test-certs", str(tmp_path))
    assert cosmo(NOWHERE, *words).code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert cosmo(NOWHERE, *words).code == 0
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before["ca.pem"] == after["ca.pem"] and before["ca.key"] == after["ca.key"]
    assert before["server.pem"] != after["server.pem"]
    assert {path.stat().st_mode & 0o077 for path in tmp_path.glob("*.key")} == {0}


def test_the_certificate_names_the_hosts(certs: Path) -> None:
    shown = ssl.create_default_context(cafile=str(certs / "server.pem"))
    assert shown.cert_store_stats()["x509"] == 1
    text = (certs / "server.pem").read_text()
    assert b"broker.test" in ssl.PEM_cert_to_DER_cert(text)


def test_without_openssl_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install it"):
        cosmo(NOWHERE, "tls", "make-test-certs", str(tmp_path / "certs"))
