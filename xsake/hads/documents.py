"""Packed documents: which pairs of blocks contain tokens of a common document.

tokens     a a a a | a a b b | b b b b | b c c c      blocks 0 … 3, documents a, b, c
row 2      .         o         o         o            o: b has tokens in block 2 and in this one
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int


def shared_blocks(segment_ids: Int[Array, "B T"], block: int) -> Bool[Array, "B n n"]:
    """For each pair of blocks: whether a document has tokens in both. Documents must be contiguous.

    A contiguous document with tokens in blocks j < i contains the last token of block j and the
    first token of block i.

    >>> shared_blocks(jnp.array([[0, 0, 0, 1, 1, 1]]), 2).astype(int)[0]
    Array([[1, 1, 0],
           [1, 1, 1],
           [0, 1, 1]], dtype=int32)
    """
    rest = -segment_ids.shape[1] % block
    ids = jnp.pad(segment_ids, ((0, 0), (0, rest)), mode="edge")
    ids = ids.reshape(ids.shape[0], -1, block)
    first, last = ids[..., 0], ids[..., -1]
    n = first.shape[1]
    below = first[:, :, None] == last[:, None, :]  # for j < i
    above = last[:, :, None] == first[:, None, :]
    return jnp.where(np.tri(n, k=-1, dtype=bool), below, above) | np.eye(n, dtype=bool)
