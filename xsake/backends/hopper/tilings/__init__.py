"""Measured tilings of the Hopper kernels: a JSON file per card, a record for each class of calls.

`xsake bench --autotune` times every candidate on a few calls of each class and writes the file: for
each class the fields that differ from the defaults, the speeds they were chosen for, and the
machine, versions and commit. A card without a file of its own uses the H200's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from xsake import _jax, masks
from xsake.backends import Sizes, kernel_rule
from xsake.backends.hopper import limits
from xsake.backends.options import BackwardTiling, ForwardTiling
from xsake.block_mask import BlockMask

FOLDER = Path(__file__).parent
H200 = FOLDER / "h200.json"
LONG = 8192  # a call with at least this many queries is in class "long"
SPARSE = 0.15  # lists whose capacity is below this fraction of all blocks are "sparse"


# Which class's tiling one takes that was not measured. Without a mask all lists are long, as under
# a causal one; but in the forward that may have work tiles of 192 queries, which only it can have.
ALIKE: dict[str, dict[str, tuple[str, ...]]] = {
    direction: {"one sparse": ("one",), "causal": ("one",), "bias": ("one",), "full": full}
    for direction, full in (("forward", ("one",)), ("backward", ("causal", "one")))
}
Bias = Literal["pairs", "keys"] | None  # of every pair, of every key, none


def bias_kind(shape: Sequence[int] | None) -> Bias:
    """What the tilings distinguish of a bias [B|1, N|1, T|1, S]; None: there is no bias."""
    return None if shape is None else "keys" if shape[2] == 1 else "pairs"


def call_class(sizes: Sizes, mask: BlockMask, bias: Bias = None) -> str:
    """What is known of a call when it is compiled: "128 short sparse".

    The kernel's head size; the length; and the lists. "one": all heads share a list, e.g. of
    documents, "one sparse" if its capacity is below 15% of all blocks, e.g. a window, "causal" if
    the mask is causal and nothing else, "full" if there is neither mask nor bias, "bias" if there
    is no mask but a bias of every pair, in any dtype; it is measured with bfloat16. Otherwise
    "sparse" or "mixed". Of heads of up to 64, "causal" is measured with work tiles of 192 queries,
    which no call with a bias has: a causal mask with a bias of pairs is "bias" there, with one of
    keys "one".
    """
    size = limits.padded_head_size(max(sizes.H, sizes.Hv))
    length = "short" if sizes.T < LONG else "long"
    row_blocks, kv_blocks = mask.grid.counts
    is_sparse = mask.kv_index.shape[-1] < SPARSE * row_blocks * kv_blocks
    is_everything = mask.is_rule and mask.rule == masks.everything()
    is_causal = kernel_rule.is_causal_alone(mask)
    # such calls have no work tiles of 192 queries, with which "causal" may have been measured
    no_tall_tiles = is_causal and bias is not None and size <= limits.TALL_HEAD_SIZE
    if bias == "pairs" and (is_everything or no_tall_tiles):
        lists = "bias"
    elif is_everything and bias is None:
        lists = "full"
    elif mask.kv_count.shape[1] == 1:
        lists = (
            "one sparse" if is_sparse else "causal" if is_causal and not no_tall_tiles else "one"
        )
    else:
        lists = "sparse" if is_sparse else "mixed"
    return f"{size} {length} {lists}"


def measured_forward(sizes: Sizes, mask: BlockMask, bias: Bias = None) -> ForwardTiling:
    """The fastest tiling measured for this class of calls; the default where none was measured."""
    return ForwardTiling(**_fields("forward", call_class(sizes, mask, bias)))


def measured_backward(sizes: Sizes, mask: BlockMask, has_bias: bool = False) -> BackwardTiling:
    """Likewise for the backward, whose classes know of a bias only that it is not "full"."""
    name = call_class(sizes, mask)
    return BackwardTiling(**_fields("backward", name.replace("full", "one") if has_bias else name))


def _fields(direction: str, name: str) -> dict[str, Any]:
    """Of the class, or of the first one like it that was measured."""
    records, (size, length, lists) = _table()[direction], name.split(" ", 2)
    for each in (lists, *ALIKE[direction].get(lists, ())):
        if (record := records.get(f"{size} {length} {each}")) is not None:
            return dict(record["tiling"])
    return {}


def path_of(card: str) -> Path:
    """The file of a card by the name that JAX has for it.

    >>> path_of("NVIDIA H100 80GB HBM3").name
    'h100-80gb-hbm3.json'
    """
    return FOLDER / f"{card.removeprefix('NVIDIA ').lower().replace(' ', '-')}.json"


@functools.cache
def _table() -> dict[str, Any]:
    own = path_of(_jax.device_kind())
    return json.loads((own if own.exists() else H200).read_text())["classes"]
