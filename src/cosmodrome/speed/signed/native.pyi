from cosmodrome.speed.signed.pure import Signatures as Signatures

def hmac_sha1(secret: bytes, first: bytes, second: bytes, *, plain: bool, times: int = 1) -> bytes:
    """HMAC-SHA1 of a message in two parts; `plain` does without the processor's own rounds.

    It is made so many times with a key that is prepared once, as `Signatures` does.
    """
