"""Chunks: row blocks that are processed together, and what one step reads for them.

A chunk has R row blocks (in the backward kv blocks, by the transposed lists). In one step each of
them visits the next W blocks of its list, all in one batched product:

    row 0   q [bq, H]  ×  list 0 [t·W : (t+1)·W]   k [W·bk, H]   ─┐
    row 1   q [bq, H]  ×  list 1 [t·W : (t+1)·W]   k [W·bk, H]   ─┼─ s [R, bq, W·bk]
    …                                                             ┘

On a CPU a step has few row blocks and one kv block, so that it stays in cache. On a GPU it has many
of both, because launch overhead dominates there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake import _jax
from xsake.backends import Integers, Sizes, list_index, quotient, remainder
from xsake.backends.options import XlaSteps
from xsake.block_mask import BlockMask
from xsake.masks.rule import Leaf, Tokens

# Calls whose lists hold at most so many token pairs use one loop. A guess: with more, the loop for
# full blocks saves more time over many calls than it takes to compile.
FEW_PAIRS = 1 << 22


def device_steps(
    platform: str, deterministic: bool, block: tuple[int, int], pairs: int
) -> XlaSteps:
    """Default sizes of a step: a CPU's fits in cache; a GPU's amortizes about a dozen launches.

    `pairs` is the number of token pairs in the blocks that the lists of all heads can hold.

    The float32 logits of a GPU's step, rows x keys, are about the size of its L2 cache. On a CPU
    only products use several threads: with independent chunks in one loop body, one chunk reads or
    takes exponentials while another multiplies. Before JAX 0.11 batched products use one thread;
    separate products of independent block pairs use all threads, if the blocks are large enough.
    """
    one_loop = pairs <= FEW_PAIRS
    if platform == "cpu":
        # measured: 9 chains are slower than 12, and 16 are no faster
        in_chains = _jax.version() < (0, 11) and min(block) >= 128
        # blocks of 16 and 32 are faster several at once
        return XlaSteps(512, 64, side_by_side=4, chains=12 if in_chains else 0, one_loop=one_loop)
    return XlaSteps(16384, 1024, dq_by_rows=deterministic, one_loop=one_loop)


def blocks_per_step(steps: XlaSteps, mask: BlockMask) -> int:
    """Blocks that a row visits in one step."""
    return min(max(1, steps.keys // mask.block[1]), mask.grid.counts[1])


# ---------------------------------------------------------------------------- reading and writing


def take(x: Array, b: Array, tokens: Array, n: Array, past: float | None = None) -> Array:
    """x[b, tokens, n] for every row, [R, L, D], from x [B, T, N, D] and tokens [R, L].

    Past the end: the last token again, or the number `past`.
    """
    ref = x.at[b[:, None], tokens, n[:, None]]
    if past is None:
        return ref.get(mode="clip", wrap_negative_indices=False)
    return ref.get(mode="fill", fill_value=past, wrap_negative_indices=False)


def flat(x: Array, at: Integers) -> Array:
    """x.reshape(-1)[at], for indices that are known to be inside."""
    return x.reshape(-1).at[at].get(mode="promise_in_bounds", wrap_negative_indices=False)


def zeros(sizes: Sizes, length: int, block: int, size: int, dtype: Any, like: Array) -> Array:
    """Zeros that blocks are written or added to: [B, length rounded up to blocks, N, size].

    Inside `jax.shard_map` they vary as `like` does.
    """
    nothing = jnp.zeros((sizes.B, length + -length % block, sizes.N, size), dtype)
    return _jax.vary(nothing, _jax.varying_axes(like))


_WINDOWS = lax.ScatterDimensionNumbers(
    update_window_dims=(2, 3), inserted_window_dims=(0, 2), scatter_dims_to_operand_dims=(0, 1, 2)
)


def add(x: Array, b: Array, first: Array, n: Array, blocks: Array) -> Array:
    """Adds blocks [R, W, block, D] to x[b, first : first + block, n], in place inside a loop.

    The length of x [B, L, N, D] is a multiple of the block; first is [R, W].
    """
    at = jnp.stack(jnp.broadcast_arrays(b[:, None], first, n[:, None]), axis=-1)
    return lax.scatter_add(
        x, at, blocks.astype(x.dtype), _WINDOWS, mode=lax.GatherScatterMode.FILL_OR_DROP
    )


_BLOCKS = lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2), inserted_window_dims=(0, 2), scatter_dims_to_operand_dims=(0, 1, 2)
)


def put(x: Array, chunk: Chunk, blocks: Array) -> Array:
    """Writes a chunk's results, blocks [R, block, D], to its tokens of x, in place in a loop.

    x is [B, L, N, D], L in whole blocks.
    """
    at = jnp.stack([chunk.b, chunk.i * blocks.shape[1], chunk.n], axis=-1)
    drop = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(x, at, blocks.astype(x.dtype), _BLOCKS, unique_indices=True, mode=drop)


# ------------------------------------------------------------------------------------------ chunks


class Visit(NamedTuple):
    """One step: every row block of a chunk visits W blocks.

    Forward i is [R, 1] and j [R, W]; by columns i is [R, W] and j [R, 1].
    """

    b: Array  # int32 [R]
    n: Array  # int32 [R]
    i: Array  # row blocks
    j: Array  # kv blocks
    live: Array | None  # bool [R, W]: not past the end of the list; None: all of them
    needs_rule: Array | None  # bool [R, W]; None: none of them

    def q_tokens(self, mask: BlockMask) -> Array:
        """Query indices [R, Q], possibly past T."""
        return _tokens(self.i, mask.block[0])

    def k_tokens(self, mask: BlockMask) -> Array:
        """Key indices [R, S'], possibly past S."""
        return _tokens(self.j, mask.block[1])

    def spread(self, x: Array, mask: BlockMask) -> Array:
        """x [R, W], a value for each block -> a value for each token pair, by broadcasting."""
        if x.shape[1] == 1:
            return x[:, :, None]
        if self.i.shape[1] > 1:
            return jnp.repeat(x, mask.block[0], axis=1)[:, :, None]
        return jnp.repeat(x, mask.block[1], axis=1)[:, None, :]

    def allowed(self, mask: BlockMask) -> Array | None:
        """Which token pairs, bool [R, Q, S'] by broadcasting; None: all of them."""
        if self.live is None or self.needs_rule is None:
            return None
        S, bk = mask.shape[1], mask.block[1]
        q, k = self.q_tokens(mask)[:, :, None], self.k_tokens(mask)[:, None, :]
        if mask.rule is None:
            inside = k < S
        else:
            b, n = self.b[:, None, None], self.n[:, None, None]
            inside = mask.rule.allows(Tokens.at(b, n, q, k))
            inside = inside if S % bk == 0 else inside & (k < S)
        return self.spread(self.live, mask) & (~self.spread(self.needs_rule, mask) | inside)


def _tokens(block_numbers: Array, block: int) -> Array:
    tokens = block_numbers[:, :, None] * block + jnp.arange(block)[None, None]
    return tokens.reshape(len(block_numbers), -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """R row blocks that are processed together, int32 [R] each; all chunks: [chunks, R]."""

    b: Leaf
    n: Leaf
    i: Leaf
    first: Leaf  # where the list begins in the flat index
    count: Leaf
    full: Leaf

    @classmethod
    def of(cls, mask: BlockMask, sizes: Sizes, row: Integers) -> Chunk:
        """The row blocks with these flat indices; -1 is padding with an empty list."""
        blocks, entries = mask.kv_count.shape[2], mask.kv_index.shape[2]
        real = row >= 0
        b, i, n = _coordinates(row.clip(0), blocks, sizes)
        which = list_index(mask, sizes, b, n)
        at = which * blocks + i
        first = which * entries + flat(mask.kv_start, at)
        count = jnp.where(real, flat(mask.kv_count, at), 0)
        full = jnp.where(real, flat(mask.full_count, at), 0)
        where = np.where if isinstance(row, np.ndarray) else jnp.where
        return cls(b, n, where(real, i, np.int32(blocks)), first, count, full)

    def tokens(self, block: int) -> Array:
        """Indices of the row blocks' own tokens, [R, block], possibly past the end."""
        return _tokens(self.i[:, None], block)

    def blocks_at(self, mask: BlockMask, rank: Array) -> Array:
        """The listed blocks of these ranks [R, W]; past its end a list repeats its last block."""
        rank = jnp.clip(rank, 0, jnp.maximum(self.count - 1, 0)[:, None])
        return flat(mask.kv_index, self.first[:, None] + rank)

    def loop(
        self,
        mask: BlockMask,
        steps: XlaSteps,
        by_columns: bool,
        step: Callable[..., Any],
        state: Any,
    ) -> Any:
        """Runs state = step(visit, state) to the end of the longest list, `width` blocks at once.

        The first step visits the last blocks of every list, which need the rule. It runs before the
        loops: lists of up to `width` blocks need no loop. While all blocks are full in every list,
        a visit has neither `live` nor `needs_rule`. With `one_loop` there is only one loop, for all
        visits.
        """
        width = blocks_per_step(steps, mask)
        ranks = jnp.arange(width, dtype=jnp.int32)[None]
        left = self.count - width  # blocks of each list that the first step leaves

        def visit(rank: Array, live: Array | None) -> Visit:
            own, listed = self.i[:, None], self.blocks_at(mask, rank)
            i, j = (listed, own) if by_columns else (own, listed)
            needs_rule = None if live is None else rank >= self.full[:, None]
            return Visit(self.b, self.n, i, j, live, needs_rule)

        def full(t: Array, state: Any) -> Any:
            return step(visit(t * width + ranks, None), state)

        def some_partial(t: Array, state: Any) -> Any:
            rank = t * width + ranks
            return step(visit(rank, rank < left[:, None]), state)

        def any_block(t: Array, state: Any) -> Any:
            rank = t * width + ranks
            return step(visit(rank, rank < self.count[:, None]), state)

        if steps.one_loop:
            state = _jax.vary(state, _jax.varying_axes(self.count))
            return lax.fori_loop(0, _steps(self.count.max(), width), any_block, state)
        last = left[:, None] + ranks
        state = step(visit(last, last >= 0), state)
        whole = quotient(jnp.maximum(jnp.minimum(self.full, left).min(), 0), width)
        state = lax.fori_loop(0, whole, full, state)
        return lax.fori_loop(whole, _steps(left.max(), width), some_partial, state)


def _steps(count: Array, width: int) -> Array:
    """How many steps of `width` blocks visit `count` of them; none if it is negative."""
    return quotient(jnp.maximum(count, 0) + (width - 1), width)


def _coordinates(row: Integers, blocks: int, sizes: Sizes) -> tuple[Integers, Integers, Integers]:
    """(b, i, n) of a row block's number."""
    above = quotient(row, sizes.N)
    return quotient(above, blocks), remainder(above, blocks), remainder(row, sizes.N)


MANY = 8  # the fewest chunks per independent sequence of chunks; fewer are not worth compiling


def work_order(
    mask: BlockMask, sizes: Sizes, steps: XlaSteps, side_by_side: int = 1
) -> list[Chunk]:
    """All row blocks, most visits first, in chunks of about `steps.rows` tokens, [steps, R] each.

    Returns one sequence of chunks, or up to `side_by_side` if there are many chunks. Row blocks
    with equally many visits stay in the order of memory: heads of the same tokens are neighbours.
    With `one_loop` all do if heads share their lists, because sorting takes long to compile.
    """
    blocks = mask.kv_count.shape[2]
    total, most = sizes.B * blocks * sizes.N, max(1, steps.rows // mask.block[0])
    chunks = -(-total // most)
    lists = max(1, min(side_by_side, chunks // MANY))
    chunks += -chunks % lists
    per_chunk = -(-total // chunks)  # chunks of equal size
    row = np.arange(total, dtype=np.int32)
    order: Any = row
    if chunks > 1 and (mask.kv_count.shape[1] > 1 or not steps.one_loop):
        b, i, n = _coordinates(row, blocks, sizes)
        at = list_index(mask, sizes, b, n) * blocks + i
        count, full = flat(mask.kv_count, at), flat(mask.full_count, at)
        order = jnp.lexsort((full, count))[::-1].astype(jnp.int32)
    xp = np if isinstance(order, np.ndarray) else jnp
    padded = xp.pad(order, (0, chunks * per_chunk - total), constant_values=-1)
    by_list = padded.reshape(-1, lists, per_chunk)
    return [Chunk.of(mask, sizes, by_list[:, i]) for i in range(lists)]
