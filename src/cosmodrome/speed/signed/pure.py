"""Signed requests in plain Python: the law that `native.pyx` is compared with.

A request is proven when its signature is that of a known account over all its fields and its body,
and when that account may do what is asked. What is signed: the values of all fields in the order of
their names, without the signature itself, and then the body. Whatever is not proven is not refused
here: the slow lane decides about it and says what is wrong.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable, Mapping

from cosmodrome.errors import ProtocolError
from cosmodrome.layout import (
    ACCESS_KEY,
    FRAME_BYTES_MAX,
    FRAME_LENGTH,
    FRAME_PREFIX,
    HEADER_LENGTH_MASK,
    RIGHTS_KEPT_MAX,
    SIGNATURE,
    SIGNED_HEADER_BYTES_MAX,
    UNSIGNED_FIELDS,
)
from cosmodrome.speed.core.pure import decode_header

SecretOf = Callable[[str], bytes | None]
Allows = Callable[[str, int, tuple[str, ...]], bool]


class Signatures:
    """Says how far the requests of a buffer are proven; see the module."""

    def __init__(
        self, asked: Mapping[int, tuple[str, ...]], secret_of: SecretOf, allows: Allows
    ) -> None:
        """`asked`: the codes that can be proven, each with the fields its rights depend on.

        `secret_of` gives the secret of an access key, None when there is no such account;
        `allows` says whether the account may do that with those values of the fields. Both are
        remembered until `forget`.
        """
        self._asked = dict(asked)
        self._secret_of = secret_of
        self._allows = allows
        self._secrets: dict[str, bytes] = {}
        self._allowed: set[tuple[str, int, tuple[str, ...]]] = set()

    def forget(self) -> None:
        """Accounts or rights changed."""
        self._secrets.clear()
        self._allowed.clear()

    def proven_end(self, view: memoryview, at: int) -> int:
        """Where the first frame begins, from `at` on, that is not whole or not proven."""
        size = len(view)
        while size - at >= FRAME_PREFIX.size:
            length, word = FRAME_PREFIX.unpack_from(view, at)
            end = at + FRAME_LENGTH.size + length
            if not 4 <= length <= FRAME_BYTES_MAX - FRAME_LENGTH.size or end > size:
                break
            header_at = at + FRAME_PREFIX.size
            header_end = header_at + (word & HEADER_LENGTH_MASK)
            if header_end > end or header_end - header_at > SIGNED_HEADER_BYTES_MAX:
                break
            header = bytes(view[header_at:header_end])
            if not self._is_proven(word >> 24, header, view[header_end:end]):
                break
            at = end
        return at

    def _is_proven(self, serialize: int, header: bytes, body: memoryview) -> bool:
        try:
            code, _, _, _, _, _, ext = decode_header(serialize, header)
        except ProtocolError:
            return False
        names = self._asked.get(code)
        if names is None:
            return False
        key, signature = ext.get(ACCESS_KEY), ext.get(SIGNATURE)
        if key is None or signature is None or not all(name in ext for name in names):
            return False
        secret = self._secrets.get(key) or self._secret_of(key)
        if secret is None:
            return False
        self._secrets[key] = secret
        values = "".join(ext[name] for name in sorted(ext) if name not in UNSIGNED_FIELDS)
        digest = hmac.digest(secret, b"".join((values.encode(), body)), "sha1")
        if not hmac.compare_digest(base64.b64encode(digest), signature.encode()):
            return False
        right = (key, code, tuple(ext[name] for name in names))
        if right in self._allowed:
            return True
        if not self._allows(*right):
            return False
        if len(self._allowed) >= RIGHTS_KEPT_MAX:
            self._allowed.clear()
        self._allowed.add(right)
        return True
