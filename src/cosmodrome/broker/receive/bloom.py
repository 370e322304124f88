"""Bit positions of a consumer group in the filter bitmaps that upstream keeps.

Compat: only `consumerFilter.json` holds them here, so that a RocketMQ broker with its default
settings (`maxErrorRateOfBloomFilter` 20, `expectConsumerNumUseFilter` 32) goes on with the file.
The hash is murmur3 for 128 bits on 64-bit words, seed 0, of which the first half is used.
"""

from __future__ import annotations

BIT_COUNT = 112
HASH_COUNT = 3

_MASK = (1 << 64) - 1
_C1 = 0x87C37B91114253D5
_C2 = 0x4CF5AD432745937F


def bit_positions(group: str, topic: str) -> list[int]:
    word = _murmur3(f"{group}#{topic}".encode())
    low, high = word & 0xFFFFFFFF, word >> 32
    positions = []
    for step in range(1, HASH_COUNT + 1):
        mixed = (low + step * high) & 0xFFFFFFFF
        if mixed >= 1 << 31:
            mixed ^= 0xFFFFFFFF
        positions.append(mixed % BIT_COUNT)
    return positions


def _murmur3(data: bytes) -> int:
    """The first 64 bits of murmur3_x64_128."""
    one = other = 0
    whole = len(data) & ~15
    for at in range(0, whole, 16):
        one ^= _mixed_one(int.from_bytes(data[at : at + 8], "little"))
        one = (_rotated(one, 27) + other) & _MASK
        one = (one * 5 + 0x52DCE729) & _MASK
        other ^= _mixed_other(int.from_bytes(data[at + 8 : at + 16], "little"))
        other = (_rotated(other, 31) + one) & _MASK
        other = (other * 5 + 0x38495AB5) & _MASK
    other ^= _mixed_other(int.from_bytes(data[whole + 8 :], "little"))
    one ^= _mixed_one(int.from_bytes(data[whole : whole + 8], "little"))
    one ^= len(data)
    other ^= len(data)
    one = (one + other) & _MASK
    other = (other + one) & _MASK
    return (_finished(one) + _finished(other)) & _MASK


def _mixed_one(word: int) -> int:
    return _rotated(word * _C1 & _MASK, 31) * _C2 & _MASK


def _mixed_other(word: int) -> int:
    return _rotated(word * _C2 & _MASK, 33) * _C1 & _MASK


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & _MASK


def _finished(word: int) -> int:
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD & _MASK
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return word ^ word >> 33
