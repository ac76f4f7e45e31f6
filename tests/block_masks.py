"""Masks and what they should hold, for the tests of BlockMask."""

from __future__ import annotations

import jax
import numpy as np

from tests.specs import to_rule, zoo
from xsake import BlockMask

# B, N, T, S and block: aligned, unaligned, T > S, a block larger than either side.
CASES = {
    "unaligned": ((2, 2, 50, 71), (16, 32)),
    "aligned": ((2, 3, 64, 64), (16, 16)),
    "odd, long queries": ((1, 2, 93, 37), (32, 16)),
    "one block": ((1, 2, 21, 30), (64, 128)),
}
NAMES = list(zoo(*CASES["aligned"][0]))
SOME = ["causal", "window", "stride longer than a block", "documents", "causal at positions"]
# Every rule in the hardest case; the rest of the cases with a few.
PAIRS = [(case, name) for case in CASES for name in (NAMES if case == "unaligned" else SOME)]


def build(spec, sizes, block, **more):
    B, N, T, S = sizes
    return BlockMask.from_rule(to_rule(spec), (T, S), batch=B, heads=N, block=block, **more)


@jax.jit
def seen(mask):
    """(to_dense, blocks) in one program."""
    return mask.to_dense(), mask.blocks()


def full_size(x, sizes):
    """A mask's [B|1, N|K|1, ...] with every batch row and query head written out."""
    x = np.asarray(x)
    x = np.repeat(x, sizes[1] // x.shape[1], axis=1)
    return np.broadcast_to(x, (sizes[0], sizes[1], *x.shape[2:]))


def true_blocks(see, block):
    """0 empty, 1 partial, 2 full, by looking at every token; past the last key is partial."""
    *_, T, S = see.shape
    found = np.zeros((*see.shape[:2], -(-T // block[0]), -(-S // block[1])), np.int8)
    for i in range(found.shape[2]):
        for j in range(found.shape[3]):
            stop = (j + 1) * block[1]
            part = see[:, :, i * block[0] : (i + 1) * block[0], j * block[1] : stop]
            full = part.all((2, 3)) & (stop <= S)
            found[:, :, i, j] = np.where(full, 2, part.any((2, 3)))
    return found


def listed_blocks(mask):
    """The lists read as the class docstring says, as 0 empty, 1 partial, 2 full."""
    start, count, full, index = map(
        np.asarray, (mask.kv_start, mask.kv_count, mask.full_count, mask.kv_index)
    )
    assert {x.dtype for x in (start, count, full, index)} == {np.dtype(np.int32)}
    found = np.zeros((*count.shape, -(-mask.shape[1] // mask.block[1])), np.int8)
    for b, n, i in np.ndindex(*count.shape):
        row = index[b, n, start[b, n, i] : start[b, n, i] + count[b, n, i]]
        assert len(row) == count[b, n, i] >= full[b, n, i] >= 0
        assert len(set(row)) == len(row)
        found[b, n, i, row] = 1
        found[b, n, i, row[: full[b, n, i]]] = 2
    return found
