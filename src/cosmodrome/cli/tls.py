"""`cosmo tls`: certificates to try TLS with, made by the `openssl` program."""

from __future__ import annotations

import ipaddress
import os.path
import shutil
import subprocess
import tempfile

import click

from cosmodrome.env.real import RealDisk
from cosmodrome.errors import ConfigError

ALWAYS_NAMED = ("localhost", "127.0.0.1", "::1")
DAYS = 365
OPENSSL_SECONDS_MAX = 60
_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_AUTHORITY = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")
_LEAF = "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n"


@click.group()
def tls() -> None:
    """Certificates for TLS."""


@tls.command("make-test-certs")
@click.argument("folder", metavar="DIR")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    help="Name or address of the server besides localhost; may be repeated.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 825),
    default=DAYS,
    show_default=True,
    help="How long they are valid.",
)
def make_test_certs(folder: str, hosts: tuple[str, ...], days: int) -> None:
    """Make an authority, a server's and a client's certificate in DIR.

    Use them to try TLS, and for nothing else: whoever can read DIR can sign certificates. An
    authority that is there is used again, so a second call renews both certificates.
    """
    make_certificates(folder, hosts, days)
    at = os.path.abspath(folder)
    click.echo(f"""# settings of servers (-c FILE, or tls.config.file)
tls.server.mode=permissive
tls.server.certPath={at}/server.pem
tls.server.keyPath={at}/server.key
tls.server.trustCertPath={at}/ca.pem
tls.client.certPath={at}/client.pem
tls.client.keyPath={at}/client.key
# to ask clients for a certificate:
#tls.server.need.client.auth=require
# a client: cosmo --tls-ca {at}/ca.pem --tls-cert {at}/client.pem --tls-key {at}/client.key …""")


def make_certificates(folder: str, hosts: tuple[str, ...] = (), days: int = DAYS) -> None:
    """ca.pem, server.pem and client.pem, each with its .key."""
    disk = RealDisk()
    disk.make_dirs(folder)
    authority = os.path.join(folder, "ca")
    if not disk.exists(f"{authority}.pem"):
        extensions = [word for text in _AUTHORITY for word in ("-addext", text)]
        subject = ("-subj", "/CN=Cosmodrome test authority", "-days", str(days))
        files = ("-keyout", f"{authority}.key", "-out", f"{authority}.pem")
        _openssl("req", "-x509", *_EC, *subject, *extensions, *files)
    names = ",".join(map(_alternative, dict.fromkeys((*ALWAYS_NAMED, *hosts))))
    # A broker is a client of name servers and of its master; it may show the same certificate.
    _sign(folder, "server", days, f"extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName={names}")
    _sign(folder, "client", days, "extendedKeyUsage=clientAuth")


def _sign(folder: str, name: str, days: int, extensions: str) -> None:
    """A new key, and a certificate for it; both are there at once when they are there."""
    disk = RealDisk()
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        request, key, made, more = (
            os.path.join(draft, end) for end in ("request", "key", "certificate", "extensions")
        )
        disk.replace(more, (_LEAF + extensions + "\n").encode(), keep=False)
        subject = ("-subj", f"/CN=cosmodrome test {name}")
        _openssl("req", "-new", *_EC, *subject, "-keyout", key, "-out", request)
        authority = os.path.join(folder, "ca")
        signer = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial")
        files = ("-in", request, "-out", made, "-extfile", more)
        _openssl("x509", "-req", "-sha256", "-days", str(days), *signer, *files)
        for source, end in ((key, "key"), (made, "pem")):
            os.replace(source, os.path.join(folder, f"{name}.{end}"))


def _alternative(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"


def _openssl(*words: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise ConfigError(
            "certificates are made by the program openssl; install it (package openssl)"
        )
    done = subprocess.run(
        [program, *words], capture_output=True, text=True, timeout=OPENSSL_SECONDS_MAX, check=False
    )
    if done.returncode:
        raise ConfigError(f"openssl {words[0]} failed: {done.stderr.strip()[-400:]}")
