"""Packed documents with a window and attention sinks, where each document has its own sinks.

python examples/packed_documents.py

Three documents share a sequence. A token sees the tokens of its own document that are in a window
before it, and the first tokens of that document. `masks.first(4)` alone means the first four tokens
of the *sequence*; with `masks.at_positions` it reads positions that restart in every document:

    token      0 1 2 3 4 | 5 6 7 8 | 9 …
    document   0 0 0 0 0 | 1 1 1 1 | 2 …
    position   0 1 2 3 4 | 0 1 2 3 | 0 …
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

import xsake
from xsake import BlockMask, masks


def packed_rule(lengths: list[int], window: int, sinks: int) -> masks.Rule:
    """Causal attention in each document, to its first `sinks` tokens and a window."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    near = masks.first(sinks) | masks.sliding_window(window)
    # Documents are consecutive, so that causality by index is causality in each document. By index
    # it excludes more blocks, because a block with the end of one document and the beginning of
    # the next has nearly all positions in it.
    return masks.causal() & masks.documents(ids) & masks.at_positions(near, positions, positions)


def main(
    lengths: tuple[int, ...] = (700, 900, 448),
    window: int = 128,
    sinks: int = 4,
    block: int = 64,
) -> float:
    """Compares the packed call with one call for each document; returns the largest difference."""
    T = sum(lengths)
    q, k, v = (jax.random.normal(jax.random.key(i), (1, T, 4, 64)) for i in range(3))
    mask = BlockMask.from_rule(packed_rule(list(lengths), window, sinks), (T, T), block=block)
    print(mask)
    packed = xsake.dot_product_attention(q, k, v, mask=mask)

    alone = masks.causal() & (masks.first(sinks) | masks.sliding_window(window))
    difference = 0.0
    for begin, end in itertools.pairwise(np.cumsum([0, *lengths]).tolist()):
        one = slice(begin, end)
        expected = xsake.dot_product_attention(q[:, one], k[:, one], v[:, one], mask=alone)
        difference = max(difference, float(jnp.abs(packed[:, one] - expected).max()))
    print(f"largest difference to each document by itself: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
