"""One frame: a length word, a header in JSON or binary form, and a body."""

from __future__ import annotations

import dataclasses

from cosmodrome.layout import FLAG_ONEWAY, FLAG_RESPONSE, SERIALIZE_JSON

VERSION = 409  # what every frame of ours reports: the ordinal of 4.9.8
LANGUAGE = 3  # PYTHON


@dataclasses.dataclass(slots=True)
class Frame:
    code: int
    opaque: int
    flag: int = 0
    ext: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""
    remark: str | None = None
    version: int = VERSION
    language: int = LANGUAGE
    serialize: int = SERIALIZE_JSON

    @property
    def is_response(self) -> bool:
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & FLAG_ONEWAY)
