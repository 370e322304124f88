"""Targets of access control: signatures, account files, and both lanes behind the gate.

Inputs are requests that nobody signed. They are signed when they are tried, otherwise hardly a
change would get past the signature; some are signed badly, and some are changed after that.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.engine import Broken, Target, dented, ending
from tests.fuzz.parsers import twin
from tests.fuzz.servers import LaneTarget, cut, dented_frames, streams
from tests.twins.signing import KEY, SECRET, signed
from tests.twins.test_twins_guarded import FILE, signed_in_a_way
from tests.twins.test_twins_lanes import frame, send_fields
from tests.twins.test_twins_signed import ASKED

from cosmodrome.access import account_files
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError
from cosmodrome.speed.signed import pure

DENIED = "Multi"  # a topic of some requests
SIGNED_WORDS = (
    *LaneTarget.words,
    *(b'"AccessKey":"the-key",', b'"Signature":"",', b'"_UNIQUE_KEY_QUERY":"1",', b'"":"",'),
)


def sign(data: bytes, chance: random.Random) -> list[bytes]:
    """The requests of a stream, most of them as an account signs them."""
    frames = cut(data)
    for at, one in enumerate(frames):
        with contextlib.suppress(struct.error):  # too broken for a field more
            frames[at] = signed_in_a_way(chance, one)
    if frames and chance.random() < 0.3:
        at = chance.randrange(len(frames))
        frames[at] = dented(frames[at], chance, SIGNED_WORDS, frames)
    return cut(b"".join(frames))


class SignedTarget(Target):
    """What compiled code takes for proven, the law does too, with the same rights."""

    name = "signed"
    words = SIGNED_WORDS

    def __init__(self) -> None:
        self._native = twin("signed")
        # Shapes of headers that compiled code knows before an input comes.
        styles = (0, 4, 5)
        self._usual = [signed(frame(310, 1, send_fields(), b"x", style=style)) for style in styles]

    def corpus(self) -> Sequence[bytes]:
        return streams()

    def mutate(self, data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
        return dented_frames(data, chance, self.words, others)

    def check(self, data: bytes, chance: random.Random) -> str:
        frames = sign(data, chance)
        whole = b"".join(frames)
        law, rights = self._proven(pure, [whole, *frames])
        if self._native is None:
            return f"{law[:3]}"
        found, asked = self._proven(self._native, [whole, *frames])
        ends = {0}
        for one in frames:
            ends.add(max(ends) + len(one))
        if found[0] not in ends or any(own > most for own, most in zip(found, law, strict=True)):
            raise Broken(f"proven: compiled {found}, law {law}")
        if not asked <= rights:
            raise Broken(f"rights: compiled {asked}, law {rights}")
        return f"{[bool(end) for end in found[:4]]} {len(asked)} {len(rights)}"

    def _proven(self, core: Any, inputs: Sequence[bytes]) -> tuple[list[int], set[object]]:
        """How far each input is proven, and which rights were asked for."""
        asked: set[object] = set()

        def allows(*right: Any) -> bool:
            asked.add(right)
            return DENIED not in right[2]

        signatures = core.Signatures(ASKED, {KEY: SECRET}.get, allows)
        for one in self._usual:
            signatures.proven_end(memoryview(one), 0)
        return [signatures.proven_end(memoryview(one), 0) for one in inputs], asked


class AccountsTarget(Target):
    """Texts of `plain_acl.yml`: accounts that can be asked, or an error that names the file."""

    name = "accounts"
    words = (
        *(b"accounts:\n", b"- accessKey: ", b"  secretKey: ", b"  admin: true\n", b"  topicPerms:"),
        *(b"  - Orders=PUB|SUB\n", b"=", b"globalWhiteRemoteAddresses:\n", b"- 10.0.0.*\n"),
        *(b"  whiteRemoteAddress: ", b"192.168.{1,2}.*", b"10.0.0.1-9", b"::1/64", b"10.*.*.*\n"),
        *(b"*a", b"&a ", b"<<: ", b"!!python/object:os.system ", b"!!binary ", b"? ", b"| \n"),
        *(b"> \n", b"---\n", b"...\n", b"%YAML 9\n", b"\t", b"[", b"]", b"{", b"}", b"'", b'"'),
        *(b"\\x00", b"\xff", b"\0", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"#", b": ", b"- - - - - -"),
        *(b"dataVersion:\n- counter: 9\n", b"null", b"~", b"true", b"0x10", b"1e9", b"\\ud800"),
    )

    def __init__(self) -> None:
        self._disk = real_env().disk

    def corpus(self) -> Sequence[bytes]:
        entry = b"- accessKey: some-key\n  secretKey: some-secret\n  whiteRemoteAddress: 10.0.0.1\n"
        more = (
            b"  admin: false\n  defaultTopicPerm: DENY\n  topicPerms:\n  - a=PUB|SUB\n  - b=SUB\n"
        )
        return [
            FILE.encode(),
            b"",
            b"accounts:\n" + entry + more,
            b"accounts:\n" + entry + b"- {accessKey: other-key, secretKey: other-secret}\n",
            b"globalWhiteRemoteAddresses:\n- 10.10.103.*\n- 192.168.0.0-9\n- fe80::*\n",
            account_files.text_of({"accounts": [], "dataVersion": [{"counter": "1"}]}),
        ]

    def check(self, data: bytes, chance: random.Random) -> str:
        path = "plain_acl.yml"
        try:
            found = account_files.read_all(self._disk, [path], {path: data})
        except ConfigError as error:
            if path not in str(error):
                raise Broken(f"the error does not name the file: {error}") from None
            return ending(error)[:60]
        for account in found.accounts.values():
            account.topic_right("%RETRY%a")
            account.group_right("a")
            account.white.has("10.0.0.1")
        found.white.has("::1")
        document = account_files.parse(data, path)
        if account_files.parse(account_files.text_of(document), path) != document:
            raise Broken(f"written again it is another document: {document}")
        return f"{min(len(found.accounts), 3)} {found.files[0].counter > 0}"


class GuardedTarget(LaneTarget):
    """Both lanes with access control: what is signed, badly signed and not signed at all."""

    name = "guarded"
    words = SIGNED_WORDS

    def __init__(self) -> None:
        super().__init__()
        path = Path(self._scratch.name) / "plain_acl.yml"
        path.write_text(FILE)
        self._broker = {"acl_enable": True, "acl_file": str(path)}

    def check(self, data: bytes, chance: random.Random) -> str:
        return super().check(b"".join(sign(data, chance)), chance)
