"""Chunks: rows of blocks that the `xla` backend works on together, and what a step reads for them.

A chunk has R rows of blocks (forward: row blocks of a head; backward: kv blocks, by the transposed
lists). In one step each meets the next W blocks of its list, all of them in one batched product:

    row 0   q [bq, H]  ×  list 0 [t·W : (t+1)·W]   k [W·bk, H]   ─┐
    row 1   q [bq, H]  ×  list 1 [t·W : (t+1)·W]   k [W·bk, H]   ─┼─ s [R, bq, W·bk]
    …                                                             ┘

CPUs take few rows and one block, so that a step stays in their cache. GPUs take many of both: what
they wait for is the start of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from xsake import _jax
from xsake.backends import Sizes, mask_place
from xsake.block_mask import BlockMask
from xsake.masks.rule import Leaf, Tokens


@dataclasses.dataclass(frozen=True)
class Steps:
    """How much is worked on at once, and how dq is summed."""

    rows: int  # query rows of a chunk; by columns, keys
    # Keys that each of them meets in one step, at least one block; by columns, query rows.
    keys: int
    dq_by_rows: bool = False  # in a pass of its own: two products more, nothing is added in place
    # Chunks of the forward that do not wait for one another, where there are many of them.
    side_by_side: int = 1
    # Of the forward, single visits side by side instead of chunks (xla_chains); 0: chunks.
    chains: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "keys", "side_by_side"):
            if getattr(self, name) < 1:
                raise ValueError(f"Steps.{name} must be at least 1, got {getattr(self, name)}")
        if self.chains < 0:
            raise ValueError(f"Steps.chains must not be negative, got {self.chains}")

    @classmethod
    def of_device(cls, platform: str, deterministic: bool, block: tuple[int, int]) -> Steps:
        """A CPU's step stays in its cache and adds in order; a GPU's is worth a dozen launches.

        What a GPU's step writes (float32 logits, rows x keys) is about the size of its L2 cache. Of
        a CPU's step only the products use several threads; with chunks side by side, some of them
        read or take exponentials while another one multiplies. Before JAX 0.11 the products of a
        chunk have one thread too; chains have them all, where a block is worth its own product.
        """
        if platform == "cpu":
            # of chains, nine gain less and sixteen no more
            in_chains = _jax.version() < (0, 11) and min(block) >= 128
            return cls(512, 1, side_by_side=4, chains=12 if in_chains else 0)
        return cls(16384, 1024, dq_by_rows=deterministic)

    def width(self, mask: BlockMask) -> int:
        """Blocks that a row meets in one step."""
        return min(max(1, self.keys // mask.block[1]), mask.grid.counts[1])


# ---------------------------------------------------------------------------- reading and writing


def take(x: Array, b: Array, tokens: Array, n: Array, past: float | None = None) -> Array:
    """x[b, tokens, n] for every row, [R, L, D], from x [B, T, N, D] and tokens [R, L].

    Past the end: the last token again, or the number `past`.
    """
    at = b[:, None], tokens, n[:, None]
    return x.at[at].get(mode="clip") if past is None else x.at[at].get(mode="fill", fill_value=past)


def zeros(sizes: Sizes, length: int, block: int, size: int, dtype: Any) -> Array:
    """[B, length in whole blocks, N, size]: where blocks are put, or added."""
    return jnp.zeros((sizes.B, length + -length % block, sizes.N, size), dtype)


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
    """Writes what a chunk made, blocks [R, block, D], to its own tokens of x, in place in a loop.

    x is [B, L, N, D], L in whole blocks.
    """
    at = jnp.stack([chunk.b, chunk.i * blocks.shape[1], chunk.n], axis=-1)
    drop = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(x, at, blocks.astype(x.dtype), _BLOCKS, unique_indices=True, mode=drop)


# ------------------------------------------------------------------------------------------ chunks


class Visit(NamedTuple):
    """One step: every row of a chunk meets W blocks.

    Forward i is [R, 1] and j [R, W]; by columns i is [R, W] and j [R, 1].
    """

    b: Array  # int32 [R]
    n: Array  # int32 [R]
    i: Array  # row blocks
    j: Array  # kv blocks
    live: Array | None  # bool [R, W]: not past the end of the row's list; None: all of them
    needs_rule: Array | None  # bool [R, W]; None: none of them

    def q_tokens(self, mask: BlockMask) -> Array:
        """Query indices [R, Q], possibly past T."""
        return _tokens(self.i, mask.block[0])

    def k_tokens(self, mask: BlockMask) -> Array:
        """Key indices [R, S'], possibly past S."""
        return _tokens(self.j, mask.block[1])

    def spread(self, x: Array, mask: BlockMask) -> Array:
        """x [R, W], one for each block met -> one for each token pair, by broadcasting."""
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
    return (block_numbers[:, :, None] * block + jnp.arange(block)).reshape(len(block_numbers), -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """R rows of blocks that are worked on together, int32 [R] each; all chunks: [chunks, R]."""

    b: Leaf
    n: Leaf
    i: Leaf
    first: Leaf  # where the row's list begins in the flat index
    count: Leaf
    full: Leaf

    @classmethod
    def of(cls, mask: BlockMask, sizes: Sizes, row: Array) -> Chunk:
        """Looks the rows up; -1 stands for one past the last, which visits nothing."""
        blocks, entries = mask.kv_count.shape[2], mask.kv_index.shape[2]
        real, row = row >= 0, jnp.maximum(row, 0)
        b, i, n = _coordinates(row, blocks, sizes)
        place = mask_place(mask, sizes, b, n)
        at = place * blocks + i
        first = place * entries + mask.kv_start.reshape(-1)[at]
        count = jnp.where(real, mask.kv_count.reshape(-1)[at], 0)
        full = jnp.where(real, mask.full_count.reshape(-1)[at], 0)
        return cls(b, n, jnp.where(real, i, blocks), first, count, full)

    def tokens(self, block: int) -> Array:
        """Indices of the rows' own tokens, [R, block], possibly past the end."""
        return _tokens(self.i[:, None], block)

    def blocks_at(self, mask: BlockMask, rank: Array) -> Array:
        """The blocks of these ranks [R, W]; past its end a row repeats its last, no foreign one."""
        rank = jnp.clip(rank, 0, jnp.maximum(self.count - 1, 0)[:, None])
        return mask.kv_index.reshape(-1)[self.first[:, None] + rank]

    def loop(
        self, mask: BlockMask, width: int, by_columns: bool, step: Callable[..., Any], state: Any
    ) -> Any:
        """Runs step(visit, state) over every block of the longest row, `width` of each at once.

        The first step meets the last blocks of every row, those that need the rule; so a row of one
        block has no loop, and a state can begin as what the first step gives. After it, while all
        blocks are full for every row, a visit has neither `live` nor `needs_rule`.
        """
        ranks = jnp.arange(width, dtype=jnp.int32)[None]
        left = self.count - width  # after the first step, the first so many of a row's list

        def visit(rank: Array, live: Array | None) -> Visit:
            own, met = self.i[:, None], self.blocks_at(mask, rank)
            i, j = (met, own) if by_columns else (own, met)
            needs_rule = None if live is None else rank >= self.full[:, None]
            return Visit(self.b, self.n, i, j, live, needs_rule)

        def full(t: Array, state: Any) -> Any:
            return step(visit(t * width + ranks, None), state)

        def some_partial(t: Array, state: Any) -> Any:
            rank = t * width + ranks
            return step(visit(rank, rank < left[:, None]), state)

        last = left[:, None] + ranks
        state = step(visit(last, last >= 0), state)
        whole = jnp.maximum(jnp.minimum(self.full, left).min(), 0) // width
        state = lax.fori_loop(0, whole, full, state)
        return lax.fori_loop(whole, -(-left.max() // width), some_partial, state)


def _coordinates(row: Array, blocks: int, sizes: Sizes) -> tuple[Array, Array, Array]:
    """(b, i, n) of a row's number."""
    return row // (blocks * sizes.N), row // sizes.N % blocks, row % sizes.N


MANY = 8  # chunks for each of those side by side; fewer are not worth compiling


def work_order(mask: BlockMask, sizes: Sizes, rows: int, side_by_side: int = 1) -> list[Chunk]:
    """All rows of blocks, most visits first, in chunks of about `rows` tokens, [turns, R] each.

    One list of chunks, or where there are many up to `side_by_side` of them. Among equals, heads of
    the same tokens follow one another: they lie side by side in memory.
    """
    blocks = mask.kv_count.shape[2]
    total, most = sizes.B * blocks * sizes.N, max(1, rows // mask.block[0])
    chunks = -(-total // most)
    lists = max(1, min(side_by_side, chunks // MANY))
    chunks += -chunks % lists
    per_chunk = -(-total // chunks)  # chunks of equal size
    row = jnp.arange(total, dtype=jnp.int32)
    b, i, n = _coordinates(row, blocks, sizes)
    place = mask_place(mask, sizes, b, n) * blocks + i
    count, full = mask.kv_count.reshape(-1)[place], mask.full_count.reshape(-1)[place]
    order = jnp.lexsort((full, count))[::-1].astype(jnp.int32)
    padded = jnp.pad(order, (0, chunks * per_chunk - total), constant_values=-1)
    dealt = padded.reshape(-1, lists, per_chunk)
    return [Chunk.of(mask, sizes, dealt[:, i]) for i in range(lists)]


# -------------------------------------------------------------------------------------------- bias


class BiasBlocks:
    """A bias [B|1, N|1, T|1, S|1], read and added to by blocks."""

    def __init__(self, bias: Array, mask: BlockMask, sizes: Sizes) -> None:
        self.shape, self.mask, self.dtype = bias.shape, mask, bias.dtype
        sides = zip(bias.shape[2:], mask.block, strict=True)
        self.block = tuple(block if d > 1 else 1 for d, block in sides)
        ends = [(0, -d % block) for d, block in zip(bias.shape[2:], self.block, strict=True)]
        self.padded = jnp.pad(bias, ((0, 0), (0, 0), *ends))
        self.is_own = has_own_bias(bias, sizes)

    def _starts(self, at: Visit) -> Array:
        """Where the blocks begin, int32 [R, W, 4]; axes of size 1 are shared."""
        steps = (1, 1, *self.block)
        given = (at.b[:, None], at.n[:, None], at.i, at.j)
        starts = [
            index * step if d > 1 else jnp.zeros_like(index)
            for index, step, d in zip(given, steps, self.shape, strict=True)
        ]
        return jnp.stack(jnp.broadcast_arrays(*starts), axis=-1)

    def at(self, visit: Visit) -> Array:
        """The bias of every token pair, [R, Q, S'] by broadcasting."""
        R, by_columns = visit.b.shape[0], visit.i.shape[1] > 1
        (tq, tk), (bq, bk) = self.block, self.mask.block
        # [R, W, tq, tk] by columns, else [R, tq, W, tk]
        numbers = lax.GatherDimensionNumbers(
            offset_dims=(2, 3) if by_columns else (1, 3),
            collapsed_slice_dims=(0, 1),
            start_index_map=(0, 1, 2, 3),
        )
        sizes, inside = (1, 1, tq, tk), lax.GatherScatterMode.CLIP
        x = lax.gather(self.padded, self._starts(visit), numbers, sizes, mode=inside)
        if by_columns:
            return jnp.broadcast_to(x, (*x.shape[:2], bq, tk)).reshape(R, -1, tk)
        return jnp.broadcast_to(x, (*x.shape[:3], bk)).reshape(R, tq, -1)

    def add(self, total: Array, visit: Visit, ds: Array) -> Array:
        """Adds the logit gradients of a visit by columns, [R, W·block_q, block_k], to a total.

        Where every pair of tokens has its own number no two blocks meet, so that a GPU needs no
        atomics; what is past the end of a list is then dropped instead of added as 0.
        """
        R, W = visit.i.shape
        (tq, tk), (bq, bk) = self.block, self.mask.block
        shares = ds.reshape(R, W, bq, bk)
        shares = shares.sum(2, keepdims=True) if tq == 1 else shares
        shares = shares.sum(3, keepdims=True) if tk == 1 else shares
        starts = self._starts(visit)
        if self.is_own and visit.live is not None:
            starts = jnp.where(visit.live[..., None], starts, jnp.iinfo(jnp.int32).max)
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=(2, 3),
            inserted_window_dims=(0, 1),
            scatter_dims_to_operand_dims=(0, 1, 2, 3),
        )
        drop = lax.GatherScatterMode.FILL_OR_DROP
        return lax.scatter_add(
            total, starts, shares, numbers, unique_indices=self.is_own, mode=drop
        )

    def whole(self, total: Array) -> Array:
        """A total in bias's shape and dtype."""
        return total[:, :, : self.shape[2], : self.shape[3]].astype(self.dtype)


def has_own_bias(bias: Array, sizes: Sizes) -> bool:
    """Whether no two token pairs share a number of the bias."""
    return bias.shape == (sizes.B, sizes.N, sizes.T, sizes.S)
