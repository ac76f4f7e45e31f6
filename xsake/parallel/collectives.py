"""The collectives of a compiled module: how many of each kind, and how many bytes they receive."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

ITEM_BYTES = {"pred": 1, "bf16": 2}  # the other types have their bits in their name
KINDS = ("collective-permute", "all-to-all", "all-gather", "all-reduce", "reduce-scatter")
_LINE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")
_SHAPE = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """The collectives of one kind in a module, each counted once, loops or not."""

    count: int
    bytes: int  # of their results on one device


def collectives(compiled: Any) -> dict[str, Collective]:
    """By kind, from `jax.jit(f).lower(…).compile()` or its text.

    A collective in a loop is counted once. The ring's loop has one for each of its steps.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    found: dict[str, list[int]] = {}
    for shapes, kind in _LINE.findall(text):
        sizes = [_bytes(dtype, axes) for dtype, axes in _SHAPE.findall(shapes)]
        found.setdefault(kind, []).append(sum(sizes))
    return {kind: Collective(len(sizes), sum(sizes)) for kind, sizes in found.items()}


def _bytes(dtype: str, axes: str) -> int:
    count = 1
    for axis in axes.split(","):
        count *= int(axis) if axis else 1
    if dtype in ITEM_BYTES:
        return count * ITEM_BYTES[dtype]
    bits = re.search(r"\d+", dtype)
    return count * int(bits[0]) // 8 if bits else 0
