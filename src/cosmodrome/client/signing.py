"""Signs what a client sends, for servers with access control."""

from __future__ import annotations

from cosmodrome.client.options import Credentials
from cosmodrome.wire import signature
from cosmodrome.wire.frame import Frame


def sign(frame: Frame, credentials: Credentials) -> None:
    """Add key and signature to the header; it must not change after this."""
    if credentials.security_token is not None:
        frame.ext[signature.SECURITY_TOKEN] = credentials.security_token
    signature.sign(frame, credentials.access_key, credentials.secret_key.encode())
