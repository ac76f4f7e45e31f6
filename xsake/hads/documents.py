"""Packed documents: which blocks can share attention.

tokens     a a a a | a a b b | b b b b | b c c c      blocks 0 … 3, documents a, b, c
row 2      .         o         o         .            o: b has tokens in block 2 and in this one
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int


def shared_blocks(segment_ids: Int[Array, "B T"], block: int) -> Bool[Array, "B n n"]:
    """Whether some document has tokens in both blocks; its tokens must be consecutive.

    Of a document with tokens in blocks j < i, one is the last of block j and one the first of i.

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
