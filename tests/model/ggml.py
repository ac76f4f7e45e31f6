"""The quantised blocks of GGUF, decoded element by element from ggml's definitions.

Each function takes the bytes of one block and returns its 32 or 256 values. It shares no code
with the `gguf` package, whose decoding the tests compare with it.
"""

from __future__ import annotations

import numpy as np


def f16(raw: bytes) -> float:
    return float(np.frombuffer(raw, np.float16)[0])


def nibbles(raw: bytes) -> list[int]:
    """Low halves of all bytes, then high halves."""
    return [b & 15 for b in raw] + [b >> 4 for b in raw]


def q4_0(raw: bytes) -> list[float]:
    return [f16(raw[:2]) * (q - 8) for q in nibbles(raw[2:])]


def q4_1(raw: bytes) -> list[float]:
    return [f16(raw[:2]) * q + f16(raw[2:4]) for q in nibbles(raw[4:])]


def q5_0(raw: bytes) -> list[float]:
    high = int.from_bytes(raw[2:6], "little")
    fives = [q | (high >> j & 1) << 4 for j, q in enumerate(nibbles(raw[6:]))]
    return [f16(raw[:2]) * (q - 16) for q in fives]


def q5_1(raw: bytes) -> list[float]:
    high = int.from_bytes(raw[4:8], "little")
    fives = [q | (high >> j & 1) << 4 for j, q in enumerate(nibbles(raw[8:]))]
    return [f16(raw[:2]) * q + f16(raw[2:4]) for q in fives]


def q8_0(raw: bytes) -> list[float]:
    return [f16(raw[:2]) * int(q) for q in np.frombuffer(raw[2:], np.int8)]


def scale_and_minimum(packed: bytes, j: int) -> tuple[int, int]:
    """Number j of the eight pairs of 6 bits in 12 bytes."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return (
        packed[j + 4] & 15 | packed[j - 4] >> 6 << 4,
        packed[j + 4] >> 4 | packed[j] >> 6 << 4,
    )


def q4_k(raw: bytes) -> list[float]:
    d, least, packed, quants = f16(raw[:2]), f16(raw[2:4]), raw[4:16], raw[16:]
    values = []
    for j in range(8):
        scale, minimum = scale_and_minimum(packed, j)
        part = quants[j // 2 * 32 :][:32]
        values += [d * scale * (b >> 4 if j % 2 else b & 15) - least * minimum for b in part]
    return values


def q5_k(raw: bytes) -> list[float]:
    d, least, packed = f16(raw[:2]), f16(raw[2:4]), raw[4:16]
    high, quants = raw[16:48], raw[48:]
    values = []
    for j in range(8):
        scale, minimum = scale_and_minimum(packed, j)
        part = quants[j // 2 * 32 :][:32]
        fives = [
            (b >> 4 if j % 2 else b & 15) + 16 * (high[l] >> j & 1) for l, b in enumerate(part)
        ]
        values += [d * scale * q - least * minimum for q in fives]
    return values


def q6_k(raw: bytes) -> list[float]:
    low, high, d = raw[:128], raw[128:192], f16(raw[208:])
    scales = [int(s) for s in np.frombuffer(raw[192:208], np.int8)]
    values = []
    for i in range(256):
        half, quarter, l = i // 128, i % 128 // 32, i % 32
        b = low[64 * half + 32 * (quarter % 2) + l]
        four = b >> 4 if quarter >= 2 else b & 15
        two = high[32 * half + l] >> 2 * quarter & 3
        values.append(d * scales[i // 16] * ((four | two << 4) - 32))
    return values


# name: (decoder, bytes of a block, values of a block, where its 16-bit scales lie)
BLOCKS = {
    "Q4_0": (q4_0, 18, 32, (0,)),
    "Q4_1": (q4_1, 20, 32, (0, 2)),
    "Q5_0": (q5_0, 22, 32, (0,)),
    "Q5_1": (q5_1, 24, 32, (0, 2)),
    "Q8_0": (q8_0, 34, 32, (0,)),
    "Q4_K": (q4_k, 144, 256, (0, 2)),
    "Q5_K": (q5_k, 176, 256, (0, 2)),
    "Q6_K": (q6_k, 210, 256, (208,)),
}


def draw(name: str, rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(random blocks as bytes [rows, …], their values, float64 [rows, columns])."""
    rng = np.random.default_rng(seed)
    if name in ("F32", "F16", "BF16"):
        values = rng.normal(size=(rows, columns)).astype(np.float32)
        if name == "BF16":  # the upper half of a float32
            values = (values.view(np.uint32) >> 16 << 16).view(np.float32)
            raw = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            raw = values.astype(name.replace("F", "float"))
            values = raw
        return raw.view(np.uint8), values.astype(np.float64)
    decode, size, count, scales = BLOCKS[name]
    blocks = rng.integers(0, 256, (rows * columns // count, size), np.uint8)
    for at in scales:
        drawn = rng.normal(0, 0.1, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = drawn[:, None].view(np.uint8)
    values = np.array([decode(block.tobytes()) for block in blocks])
    return blocks.reshape(rows, -1), values.reshape(rows, columns)
