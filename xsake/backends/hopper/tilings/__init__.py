"""Which tiling the Hopper kernels take: rows of h200.json, which a program measured.

`xsake bench --autotune` times every candidate on a few calls of each class and writes the file: for
each class the fields that differ from the defaults, the speeds they were chosen for, and the
machine, versions and commit.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from xsake.backends import Sizes
from xsake.block_mask import BlockMask

TABLE = Path(__file__).with_name("h200.json")


def call_class(sizes: Sizes, mask: BlockMask) -> str:
    """What is known of a call when it is compiled: "128 short sparse".

    The head size that the kernel has, the length (long from 8,192 queries) and the lists: "one"
    for all heads, or lists of their own with room for less than 15% of the blocks ("sparse"), or
    for more ("mixed").
    """
    size = next(size for size in (64, 128, 256) if max(sizes.H, sizes.Hv) <= size)
    length = "short" if sizes.T < 8192 else "long"
    rows, columns = mask.grid.counts
    if mask.kv_count.shape[0] * mask.kv_count.shape[1] == 1:
        lists = "one"
    elif mask.kv_index.shape[-1] < 0.15 * rows * columns:
        lists = "sparse"
    else:
        lists = "mixed"
    return f"{size} {length} {lists}"


def measured(direction: str, sizes: Sizes, mask: BlockMask) -> dict[str, Any]:
    """The fields of the fastest tiling measured for this class; none where none was measured."""
    row = _table()[direction].get(call_class(sizes, mask))
    return {} if row is None else dict(row["tiling"])


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())["classes"]
