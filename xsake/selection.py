"""Which blocks a row visits: from scores to a choice, as many as the budget of each row says.

    scores [..., n, n] ─┐
    counts [..., n] ────┴─ keep_top ─ bool [..., n, n] ─ to_mask ─ BlockMask

The first block and the diagonal are forced: every row keeps them. All of it runs under jit.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import _jax, masks
from xsake.block_mask import BlockMask

COUNTED = 64  # blocks of a row, up to which a GPU finds the best without sorting
LARGE = 3e38  # finite in float32: scores that are not stay below the forced blocks
FORCED_BLOCKS = 2  # the first block and the diagonal


def is_forced(row: Any, column: Any, band: int = 0) -> Any:
    """Whether row block `row` always keeps a block: the first, the diagonal, `band` before it."""
    return (column == 0) | ((column <= row) & (column >= row - band))


@functools.partial(jax.jit, static_argnames="band")
def keep_top(scores: Any, counts: Any, band: int = 0, first: Any = 0) -> Array:
    """Marks the counts[…, i] best allowed blocks of every row i, the forced ones first.

    Args:
      scores: [..., R, n], rows first … first + R - 1; NaN is the lowest score.
      counts: int [..., R]; fewer than the forced keeps the forced, more than a row may have all.
      band: blocks before the diagonal that are forced too.
      first: number of the first row.

    Returns:
      bool [..., R, n]; of equal scores the earlier block is taken, so a row keeps exactly its
      count.

    >>> keep_top(jnp.zeros((4, 4)), jnp.array([1, 2, 2, 3])).sum(-1)
    Array([1, 2, 2, 3], dtype=int32)
    """
    counted = _jax.platform() == "gpu" and jnp.shape(scores)[-1] <= COUNTED
    return (_kept_by_counting if counted else _kept_by_sorting)(scores, counts, band, first)


def _kept_by_counting(scores: Any, counts: Any, band: int, first: Any) -> Array:
    """`keep_top` in few steps but n² for a row: on a GPU, the number of steps is what costs."""
    always, may = _standing(scores, band, first)
    return (always | (ranks(scores, band, first) < jnp.asarray(counts)[..., None])) & may


def _kept_by_sorting(scores: Any, counts: Any, band: int, first: Any) -> Array:
    """`keep_top` for long rows, and where a device does one thing after another."""
    s = _with_forced(scores, band, first)
    n = s.shape[-1]
    always, may = _standing(s, band, first)
    counts = jnp.clip(jnp.asarray(counts), *(x.sum(-1, dtype=jnp.int32) for x in (always, may)))
    counts = jnp.broadcast_to(counts, s.shape[:-1])[..., None]
    last = jnp.take_along_axis(jnp.sort(s, axis=-1), n - counts, axis=-1)  # the worst that is kept
    above, level = s > last, s == last
    room = counts - above.sum(-1, keepdims=True)
    return (above | level & (jnp.cumsum(level, -1) <= room)) & may


def ranks(scores: Any, band: int = 0, first: Any = 0) -> Array:
    """The place of every block in its row's order, int32 [..., R, n]: forced first, then by score.

    `ranks(scores) < counts` is `keep_top(scores, counts)`, for all counts at once. By counting, n²
    for a row: no sort, and nothing but the result in memory.
    """
    scores = _with_forced(scores, band, first)
    above = scores[..., None, :] > scores[..., :, None]
    n = scores.shape[-1]
    level = (scores[..., None, :] == scores[..., :, None]) & np.tri(n, k=-1, dtype=bool)
    return (above | level).sum(-1, dtype=jnp.int32)


def _standing(scores: Any, band: int, first: Any) -> tuple[Array, Array]:
    """(forced, allowed) for scores [..., R, n]: rows of `rows.forced` and `rows.allowed`."""
    R, n = scores.shape[-2:]
    row, column = first + jnp.arange(R)[:, None], jnp.arange(n)
    may = column <= row
    return may & ((column == 0) | (column >= row - band)), may


def _with_forced(scores: Any, band: int, first: Any = 0) -> Array:
    """Scores that put forced blocks first (inf) and what causality forbids last (-inf)."""
    finite = jnp.nan_to_num(
        jnp.asarray(scores, jnp.float32), nan=-LARGE, posinf=LARGE, neginf=-LARGE
    )
    always, may = _standing(scores, band, first)
    return jnp.where(always, jnp.inf, jnp.where(may, finite, -jnp.inf))


def counts_for_mass(scores: Any, share: float, cap: Any, band: int = 0, first: Any = 0) -> Array:
    """Top-p: the fewest blocks whose estimated mass reaches `share`; the forced at least.

    Args:
      scores: [..., R, n] logarithms of estimated mass.
      share: of each row's estimated mass, 0 to 1.
      cap: int [..., R], at most so many: the budget.
      band: as in `keep_top`.
      first: as in `keep_top`.

    Returns:
      int32 [..., R] for `keep_top`.
    """
    always, may = _standing(scores, band, first)
    p = jax.nn.softmax(jnp.where(may, jnp.nan_to_num(scores, nan=-1e30), -jnp.inf), axis=-1)
    order = jnp.argsort(-_with_forced(scores, band, first), axis=-1, stable=True)
    needed = (jnp.cumsum(jnp.take_along_axis(p, order, axis=-1), -1) < share).sum(-1) + 1
    return jnp.clip(needed, always.sum(-1), cap).astype(jnp.int32)


def to_mask(blocks: Any, length: int, block: int) -> BlockMask:
    """The marked blocks [N, n, n] or [B, N, n, n] as a BlockMask, causal inside them.

    Its capacity is all that causality allows, so that no choice can overflow it.
    """
    return BlockMask.from_dense(blocks, masks.causal(), shape=(length, length), block=block)
