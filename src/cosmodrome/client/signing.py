"""Signatures of the broker's access control (ACL 1.0): HMAC-SHA1 over header values and body."""

from __future__ import annotations

import base64
import hashlib
import hmac

from cosmodrome.client.options import Credentials
from cosmodrome.wire.frame import Frame

ACCESS_KEY, SIGNATURE, SECURITY_TOKEN = "AccessKey", "Signature", "SecurityToken"
# The server leaves this field out when it checks.
_UNSIGNED = frozenset({SIGNATURE, "_UNIQUE_KEY_QUERY"})


def sign(frame: Frame, credentials: Credentials) -> None:
    """Add key and signature to the header; it must not change after this."""
    ext = frame.ext
    ext[ACCESS_KEY] = credentials.access_key
    if credentials.security_token is not None:
        ext[SECURITY_TOKEN] = credentials.security_token
    values = "".join(ext[name] for name in sorted(ext) if name not in _UNSIGNED)
    digest = hmac.new(
        credentials.secret_key.encode(), values.encode() + frame.body, hashlib.sha1
    ).digest()
    ext[SIGNATURE] = base64.b64encode(digest).decode()
