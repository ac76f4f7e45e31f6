"""A plan on rows of several documents: blocks that share no document do not compete.

    j →   0 1 2 3 4        documents a a|a b b|b …: row i may use block j if some document
row i     a a ab b b       has tokens in both; of those, the plan's best counts[i] are kept
  4       . . o o o
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import selection
from xsake.block_mask import BLOCK, BlockMask
from xsake.hads import Plan, row_blocks
from xsake.train.config import Config


class Attention:
    """plan(layer, q, k) -> BlockMask for rows with these segment ids; what a model takes as mask.

    Without it a row would spend its budget on blocks that the documents then forbid.
    """

    def __init__(self, plan: Plan, segment_ids: Any) -> None:
        self.plan = plan
        self.shared = shared_blocks(jnp.asarray(segment_ids), plan.terms.block)

    def __call__(self, layer: Any, q: Array, k: Array) -> BlockMask:
        """The mask of one layer, [B, N] lists."""
        blocks = self.blocks(layer, q, k)
        return selection.to_mask(blocks, q.shape[1], self.plan.terms.block)

    def blocks(self, layer: Any, q: Array, k: Array) -> Array:
        """The blocks of `__call__`, bool [B, N, n, n]."""
        terms, n = self.plan.terms, self.shared.shape[-1]
        if self.plan.counts.shape[-1] != n:
            raise ValueError(
                f"the plan has {self.plan.counts.shape[-1]} rows of blocks and the input {n}: "
                f"make it plan.at({q.shape[1]})"
            )
        counts = jnp.asarray(self.plan.counts)[layer]
        scores = self.plan.scored(layer, q, k)
        shared = self.shared[:, None]
        # what is forced takes no place of a row's own blocks where it is another document's
        counts = counts + (row_blocks.forced(n, terms.band) & ~shared).sum(-1, dtype=jnp.int32)
        kept = selection.keep_top(jnp.where(shared, scores, -jnp.inf), counts, terms.band)
        return kept & shared


def shared_blocks(segment_ids: Array, block: int) -> Array:
    """Which blocks hold tokens of a common document: int [B, T], rising in a row -> bool [B, n, n].

    >>> shared_blocks(jnp.array([[0, 0, 0, 1, 1, 1]]), 2).astype(int)[0]
    Array([[1, 1, 0],
           [1, 1, 1],
           [0, 1, 1]], dtype=int32)
    """
    rest = -segment_ids.shape[1] % block
    ids = jnp.pad(segment_ids, ((0, 0), (0, rest)), mode="edge")
    ids = ids.reshape(ids.shape[0], -1, block)
    first, last = ids[..., 0], ids[..., -1]
    return (first[:, :, None] <= last[:, None, :]) & (first[:, None, :] <= last[:, :, None])


def visited_density(config: Config, plan: Plan | None, segment_ids: np.ndarray) -> float | None:
    """Blocks that the rows of a batch visit ÷ blocks that causality allows in them, 0 to 1.

        Σ min(counts[l, h, i], own[b, i]) ÷ (layers · N · B · n (n + 1) / 2)

    over layers, heads, rows of the batch and rows of blocks; own[b, i] is how many blocks up to i
    share a document with block i. Without a plan, all of them. None for a model with windows,
    which visits less.
    """
    if config.model.window is not None:
        return None
    block = BLOCK if plan is None else plan.terms.block
    ids = segment_ids if config.data.separate else np.zeros_like(segment_ids)
    own = np.asarray(shared_blocks(jnp.asarray(ids), block))
    n = own.shape[-1]
    own = np.tril(own).sum(-1)[:, None, None]
    counts = row_blocks.ceilings(n) if plan is None else np.asarray(plan.counts)
    return float(np.minimum(counts, own).mean() / ((n + 1) / 2))
