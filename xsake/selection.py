"""Selects the kv blocks that each row block visits, from block scores.

    scores [..., R, n] ─┐
    counts [..., R] ────┴─ keep_top ─ bool [..., R, n] ─ to_mask ─ BlockMask

      0 1 2 3 4
    0 F              F  forced: the first block, the diagonal, and `band` blocks before it
    1 F F            o  optional: causality allows it, the scores decide
    2 F o F
    3 F o o F        A row block is a block of queries. For a chunk of a text, the R row blocks
    4 F o o o F      begin with number `first`; n is the number of kv blocks.

    scores [..., n] ─ top_indices ─ int32 [..., count], for lists of single queries (NSA)

Everything here runs under jit.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import ArrayLike, Bool, Float, Int

from xsake import _jax, masks
from xsake.block_mask import BlockMask

FORCED_BLOCKS = 2  # forced blocks of a row block without a band: the first and the diagonal
# Up to this many kv blocks are ranked by comparing all pairs; on a CPU, sorting 64 is faster.
MAX_COMPARED = {"gpu": 64, "cpu": 32}
LARGE = 3e38  # scores are clamped to ±LARGE, so that they rank between -inf and forced blocks (inf)

Index = int | Int[Array, ""]  # of a row block; may be traced
Blocks = TypeVar("Blocks", int, np.ndarray, Array)


def is_forced(row: Blocks, column: Blocks, band: int = 0) -> Blocks:
    """Whether row block `row` always visits kv block `column`; ints or arrays that broadcast.

    >>> [column for column in range(7) if is_forced(5, column, band=1)]
    [0, 4, 5]
    """
    return (column <= row) & ((column == 0) | (column >= row - band))


@functools.partial(jax.jit, static_argnames="band")
def keep_top(
    scores: Float[ArrayLike, "*batch R n"],
    counts: Int[ArrayLike, "*#batch R"],
    band: int = 0,
    first: Index = 0,
) -> Bool[Array, "*batch R n"]:
    """Marks the counts[…, i] allowed blocks of row block i that score highest, forced ones first.

    Args:
      scores: of row blocks first … first + R - 1; NaN is the lowest score.
      counts: raised to the number of forced blocks, lowered to that of allowed blocks.
      band: blocks before the diagonal that are forced too.
      first: number of the first row block.

    Returns:
      The marks. Ties go to the earlier block, so that each row block keeps exactly its count.

    >>> keep_top(jnp.zeros((4, 4)), jnp.array([1, 2, 2, 3])).sum(-1)
    Array([1, 2, 2, 3], dtype=int32)
    """
    compare = jnp.shape(scores)[-1] <= MAX_COMPARED.get(_jax.platform(), 0)
    return (_keep_by_rank if compare else _keep_by_sorting)(scores, counts, band, first)


def _keep_by_rank(
    scores: Float[ArrayLike, "*batch R n"],
    counts: Int[ArrayLike, "*#batch R"],
    band: int,
    first: Index,
) -> Bool[Array, "*batch R n"]:
    """`keep_top` in O(n²) but few operations: a GPU's launches dominate, and XLA's sort is slow."""
    forced, allowed = _forced_and_allowed(scores, band, first)
    few = ranks(scores, band, first) < _of_rank(counts, jnp.ndim(scores) - 1)[..., None]
    return (forced | few) & allowed


def _keep_by_sorting(
    scores: Float[ArrayLike, "*batch R n"],
    counts: Int[ArrayLike, "*#batch R"],
    band: int,
    first: Index,
) -> Bool[Array, "*batch R n"]:
    """`keep_top` for many kv blocks."""
    s = _with_forced(scores, band, first)
    n = s.shape[-1]
    forced, allowed = _forced_and_allowed(s, band, first)
    limits = (x.sum(-1, dtype=jnp.int32) for x in (forced, allowed))
    counts = jnp.clip(_of_rank(counts, s.ndim - 1), *limits)
    counts = jnp.broadcast_to(counts, s.shape[:-1])[..., None]
    lowest_kept = jnp.take_along_axis(jnp.sort(s, axis=-1), n - counts, axis=-1)
    above, tied = s > lowest_kept, s == lowest_kept
    ties_kept = counts - above.sum(-1, keepdims=True)
    return (above | tied & (jnp.cumsum(tied, -1) <= ties_kept)) & allowed


def ranks(
    scores: Float[ArrayLike, "*batch R n"], band: int = 0, first: Index = 0
) -> Int[Array, "*batch R n"]:
    """The rank of every kv block in its row block, int32: forced blocks first, then by score.

    `ranks(scores) < counts[..., None]` is `keep_top(scores, counts)` for counts from the number of
    forced blocks to the number of allowed blocks.
    Computed by comparing all pairs, O(n²) per row block; XLA fuses it and stores the result only.
    """
    s = _with_forced(scores, band, first)
    above = s[..., None, :] > s[..., :, None]
    n = s.shape[-1]
    earlier = _of_rank(np.tri(n, k=-1, dtype=bool), s.ndim + 1)
    tied_earlier = (s[..., None, :] == s[..., :, None]) & earlier
    return (above | tied_earlier).sum(-1, dtype=jnp.int32)


def top_indices(
    scores: Float[ArrayLike, "*batch n"],
    count: int,
    forced: Bool[Array, "*#batch n"],
    allowed: Bool[Array, "*#batch n"],
) -> Int[Array, "*batch c"]:
    """The `count` allowed blocks that score highest, forced ones first, as ascending int32 indices.

    Args:
      scores: NaN is the lowest score.
      count: c, or n if that is less. A list of fewer allowed blocks is filled up with -1.
      forced: blocks that come before all others if they are allowed.
      allowed: blocks that may be selected.

    Returns:
      The indices. Ties go to the earlier block.

    >>> allowed = jnp.array([True, True, True, False])
    >>> top_indices(jnp.array([3.0, 1.0, 3.0, 9.0]), 2, ~allowed, allowed)
    Array([0, 2], dtype=int32)
    """
    ranked = jnp.where(allowed, jnp.where(forced, jnp.inf, _finite(scores)), -jnp.inf)
    n = ranked.shape[-1]
    found, index = jax.lax.top_k(ranked, min(count, n))
    index = jnp.sort(jnp.where(found == -jnp.inf, n, index).astype(jnp.int32), axis=-1)
    return jnp.where(index == n, -1, index)


def _forced_and_allowed(
    scores: Float[ArrayLike, "*batch R n"], band: int, first: Index
) -> tuple[Bool[Array, ...], Bool[Array, ...]]:
    """Which blocks of these row blocks are forced, and which causality allows."""
    R, n = jnp.shape(scores)[-2:]
    row, column = first + jnp.arange(R)[:, None], jnp.arange(n)[None]
    forced, allowed = is_forced(row, column, band), column <= row
    return _of_rank(forced, jnp.ndim(scores)), _of_rank(allowed, jnp.ndim(scores))


def _of_rank(x: Any, ndim: int) -> Array:
    """x with leading axes of size 1: JAX may be set to refuse arrays of unequal ranks."""
    return jnp.asarray(x).reshape((1,) * (ndim - jnp.ndim(x)) + jnp.shape(x))


def _with_forced(
    scores: Float[ArrayLike, "*batch R n"], band: int, first: Index = 0
) -> Float[Array, "*batch R n"]:
    """Scores that put forced blocks first (inf) and what causality forbids last (-inf)."""
    forced, allowed = _forced_and_allowed(scores, band, first)
    return jnp.where(forced, jnp.inf, jnp.where(allowed, _finite(scores), -jnp.inf))


def _finite(scores: Float[ArrayLike, ...]) -> Float[Array, ...]:
    """The scores in float32, NaN as the lowest, clamped to ±LARGE."""
    return jnp.nan_to_num(jnp.asarray(scores, jnp.float32), nan=-LARGE, posinf=LARGE, neginf=-LARGE)


def counts_for_mass(
    scores: Float[ArrayLike, "*batch R n"],
    share: float,
    cap: Int[ArrayLike, "*#batch R"],
    band: int = 0,
    first: Index = 0,
) -> Int[Array, "*batch R"]:
    """Top-p: the fewest blocks whose estimated mass reaches `share`, at least the forced ones.

    Args:
      scores: logarithms of estimated mass.
      share: of each row block's estimated mass, 0 to 1.
      cap: at most this many blocks: the budget.
      band: as in `keep_top`.
      first: as in `keep_top`.

    Returns:
      int32 counts for `keep_top`.
    """
    forced, allowed = _forced_and_allowed(scores, band, first)
    p = jax.nn.softmax(jnp.where(allowed, jnp.nan_to_num(scores, nan=-1e30), -jnp.inf), axis=-1)
    order = jnp.argsort(-_with_forced(scores, band, first), axis=-1, stable=True)
    needed = (jnp.cumsum(jnp.take_along_axis(p, order, axis=-1), -1) < share).sum(-1) + 1
    return jnp.clip(needed, forced.sum(-1), _of_rank(cap, needed.ndim)).astype(jnp.int32)


def to_mask(
    blocks: Bool[ArrayLike, "N n n"] | Bool[ArrayLike, "B N n n"], length: int, block: int
) -> BlockMask:
    """The marked blocks as a BlockMask of `length` × `length` tokens, causal inside blocks.

    Its capacity is the number of blocks that causality allows, so that no choice overflows it.
    """
    return BlockMask.from_dense(blocks, masks.causal(), shape=(length, length), block=block)
