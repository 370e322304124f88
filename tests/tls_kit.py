"""Certificates for tests, and contexts of clients that use them."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest

from cosmodrome.cli.tls import make_certificates
from cosmodrome.env.options import TlsOptions
from cosmodrome.env.real import real_env
from cosmodrome.transport.certificates import Tls


def certificates(folder: Path, *, days: int = 100) -> Path:
    """A folder with ca.pem, server.pem, client.pem and their keys; a second call renews them."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is needed to make certificates")
    make_certificates(str(folder), days=days)
    return folder


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a server, as fields of `TlsOptions`."""
    return {
        "tls_server_cert_path": str(folder / "server.pem"),
        "tls_server_key_path": str(folder / "server.key"),
        "tls_client_trust_cert_path": str(folder / "ca.pem"),
        **changes,
    }


def mutual(folder: Path, **changes: Any) -> dict[str, Any]:
    """The same, and clients have to show a certificate, which this server has too."""
    return settings(
        folder,
        tls_server_need_client_auth="require",
        tls_server_trust_cert_path=str(folder / "ca.pem"),
        tls_client_cert_path=str(folder / "client.pem"),
        tls_client_key_path=str(folder / "client.key"),
        **changes,
    )


def server(chosen: dict[str, Any]) -> Tls:
    return Tls(TlsOptions(**chosen), real_env())


def client(folder: Path, *, shows: Path | None = None) -> ssl.SSLContext:
    """Trusts the authority in `folder`, and shows the certificate in `shows`."""
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if shows is not None:
        context.load_cert_chain(shows / "client.pem", shows / "client.key")
    return context
