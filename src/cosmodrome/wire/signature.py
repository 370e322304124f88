"""Signatures of 4.x (ACL 1.0): HMAC-SHA1 over the values of the header and the body.

The text that is signed has the values of all header fields, in the order of their names, and then
the body. Nothing in it says when it was made, so a recorded request can be sent again.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping

from cosmodrome.layout import ACCESS_KEY, SIGNATURE, UNSIGNED_FIELDS
from cosmodrome.wire.frame import Frame

SECURITY_TOKEN = "SecurityToken"


def signature(secret: bytes, ext: Mapping[str, str], body: bytes) -> str:
    """The signature that a request with this header and body has to carry."""
    values = "".join([ext[name] for name in sorted(ext) if name not in UNSIGNED_FIELDS])
    # Compat: Java, too, writes a question mark for half of a surrogate pair.
    signed = values.encode(errors="replace") + body
    return base64.b64encode(hmac.digest(secret, signed, hashlib.sha1)).decode()


def sign(frame: Frame, access_key: str, secret: bytes) -> None:
    """Add key and signature to the header; it must not change after this."""
    frame.ext[ACCESS_KEY] = access_key
    frame.ext[SIGNATURE] = signature(secret, frame.ext, frame.body)
