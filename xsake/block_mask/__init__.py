"""BlockMask: the one format that every backend reads, whose contents may change under jit.

    blocks of one head              the same head as lists
      0 1 2 3
    0 ◪ . . .     kv_start   [0, 1, 3, 5]     where a row's list begins in kv_index
    1 ■ ◪ . .     kv_count   [1, 2, 2, 3]     how many blocks the row visits
    2 ■ . ◪ .     full_count [0, 1, 1, 2]     how many of them, listed first, are full
    3 ■ ■ . ◪     kv_index   [0 | 0 1 | 0 2 | 0 1 3]

■ full: every token pair is allowed. ◪ partial: `rule` decides. A dot is never loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Bool, Int

from xsake import masks
from xsake.block_mask import draw
from xsake.block_mask.lists import (
    Lists,
    block_map,
    constant_spans,
    cut_to_capacity,
    listed_blocks,
    lists_from_map,
    lists_from_spans,
    lists_of_blocks,
    lists_of_rule,
    narrowed,
    transposed,
)
from xsake.masks import intervals
from xsake.masks.carrying import Picked, Swapped
from xsake.masks.rule import (
    Grid,
    Leaf,
    Rule,
    Spans,
    Tokens,
    carried,
    check_fits,
    partition_spec,
    result_sizes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    Axes = Any  # matplotlib is optional

__all__ = ["BLOCK", "BlockMask"]

BLOCK = 128  # tokens of a block on each side, unless asked otherwise
MAX_CONSTANT = 1 << 16  # listed blocks of a rule without arrays up to which lists are constants


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """For every row block, the list of kv blocks that it visits, full ones first.

    Row block i of head n visits kv_index[b, n, start : start + count], with
    start = kv_start[b, n, i] and count = kv_count[b, n, i].

    The leading axes are B (or 1, shared by the batch) and N (or K: shared by the query heads of a
    kv head; or 1: shared by all). A kv block that reaches past S is always partial, so that a loop
    over full blocks needs no bounds check.
    """

    kv_start: Leaf  # int32 [B|1, N|K|1, Tb]  where the row's list begins
    kv_count: Leaf  # int32 [B|1, N|K|1, Tb]  blocks to visit
    full_count: Leaf  # int32 [B|1, N|K|1, Tb]  how many of them, listed first, are full
    kv_index: Leaf  # int32 [B|1, N|K|1, M]  block numbers, row after row; the tail is never read
    overflow: Leaf  # bool []  a list did not fit into M and was cut: results would be wrong
    rule: Any  # Rule | None: decides inside partial blocks; None allows all of them
    # int32 [B|1, 1, 2, T] | None: the keys that the rule allows a query, from the first integer to
    # before the second (masks/intervals.py); for rules with arrays, where they are of that kind
    intervals: Leaf
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})  # (T, S) in tokens
    block: tuple[int, int] = dataclasses.field(metadata={"static": True})  # (block_q, block_k)

    # ------------------------------------------------------------------------------- constructors

    @staticmethod
    def from_rule(
        rule: Rule,
        shape: tuple[int, int],
        *,
        batch: int = 1,
        heads: int = 1,
        block: int | tuple[int, int] = BLOCK,
        capacity: int | None = None,
        q_positions: Int[ArrayLike, "*B T"] | None = None,
        kv_positions: Int[ArrayLike, "*C S"] | None = None,
    ) -> BlockMask:
        """A mask of all blocks in which the rule may allow a token pair.

        Args:
          rule: a `masks` rule.
          shape: (T, S) in tokens.
          batch: batch rows, if the rule depends on them; default: what its arrays have. The result
            has 1 if the rule does not depend on them.
          heads: query heads, likewise.
          block: tokens per block, one number or (block_q, block_k).
          capacity: blocks that one head can list. Default: an upper bound over all data that the
            rule may carry. A smaller one saves memory; overflow raises (under jit: `overflow`).
          q_positions: int [B|1, T], what causal and window rules compare; default arange.
          kv_positions: int [B|1, S].

        >>> from xsake import masks
        >>> BlockMask.from_rule(masks.causal(), (512, 512)).density()
        Array(1., dtype=float32)
        """
        rule = masks.at_positions(_a_rule(rule), q_positions, kv_positions)
        grid = _grid(shape, block, batch, heads, rule)
        rule = _numbered(rule, grid)
        if capacity is not None:
            lists, pairs = lists_of_rule(rule, grid, _checked_capacity(capacity))
            return _made(lists, pairs, rule, grid)
        bound = rule.upper_bound()
        spans = constant_spans(bound, grid)
        size = _capacity(bound, grid, spans)
        if spans is None or bound != rule or size > MAX_CONSTANT:
            lists, pairs = lists_of_rule(rule, grid, size)
            return _made(lists, pairs, rule, grid)
        # Known now, also under jit: a compiled call spends no time on them.
        lists = lists_from_spans(spans, grid, size, np)
        return _of_lists(Lists._make(map(jnp.asarray, lists)), None, rule, grid.shape, grid.block)

    @staticmethod
    def from_dense(
        blocks: Bool[ArrayLike, ...],
        rule: Rule | None = None,
        *,
        shape: tuple[int, int] | None = None,
        block: int | tuple[int, int] = BLOCK,
        capacity: int | None = None,
    ) -> BlockMask:
        """The blocks marked True, and inside them what `rule` allows.

        Args:
          blocks: bool [nq, nk], [N, nq, nk] or [B, N, nq, nk]; may be traced.
          rule: e.g. `masks.causal()`. Blocks in which it allows no pair are dropped; those in which
            it allows every pair are full.
          shape: (T, S); default nq · block_q and nk · block_k.
          block: tokens per block.
          capacity: as in `from_rule`.
        """
        blocks = jnp.asarray(blocks)
        if blocks.dtype != jnp.bool_ or not 2 <= blocks.ndim <= 4:
            raise ValueError(
                "blocks must be bool [nq, nk], [N, nq, nk] or [B, N, nq, nk], "
                f"got {blocks.dtype} {list(blocks.shape)}"
            )
        blocks = blocks.reshape((1,) * (4 - blocks.ndim) + blocks.shape)
        block = _block(block)
        if shape is None:
            shape = (blocks.shape[2] * block[0], blocks.shape[3] * block[1])
        ruled = masks.everything() if rule is None else _a_rule(rule)
        batch, heads, *_ = blocks.shape
        grid = _grid(shape, block, batch, heads, ruled)
        if grid.counts != blocks.shape[2:]:
            raise ValueError(
                f"shape {tuple(shape)} in blocks of {block} needs {list(grid.counts)} blocks, "
                f"but blocks has {list(blocks.shape[2:])}"
            )
        ruled = _numbered(ruled, grid)
        if capacity is None:
            bound = ruled.upper_bound()
            size = _capacity(bound, grid, constant_spans(bound, grid))
        else:
            size = _checked_capacity(capacity)
        lists, pairs = lists_of_blocks(blocks, ruled, grid, size)
        if capacity is None:  # every block that the rule allows fits
            lists = lists._replace(overflow=jnp.zeros((), bool))
        return _made(lists, pairs, None if rule is None else ruled, grid)

    @staticmethod
    def from_kv_blocks(
        kv_num_blocks: Int[ArrayLike, "B H Tb"],
        kv_indices: Int[ArrayLike, "B H Tb Sb"],
        full_kv_num_blocks: Int[ArrayLike, "B H Tb"] | None = None,
        full_kv_indices: Int[ArrayLike, "B H Tb _"] | None = None,
        *,
        block: int | tuple[int, int] = BLOCK,
        mask_mod: Rule | Callable[..., Any] | None = None,
        shape: tuple[int, int] | None = None,
    ) -> BlockMask:
        """From FlexAttention's arrays: counts [B, H, Tb] and padded lists [B, H, Tb, Sb].

        Full blocks have arrays of their own.

        `mask_mod` is a rule or a function of (b, h, q, k). The S side has kv_indices.shape[-1]
        blocks, unless `shape` says otherwise.
        """
        count, index = jnp.asarray(kv_num_blocks), jnp.asarray(kv_indices)
        if index.ndim != 4 or count.shape != index.shape[:3]:
            raise ValueError(
                "kv_num_blocks must be [B, H, Tb] and kv_indices [B, H, Tb, Sb], "
                f"got {list(count.shape)} and {list(index.shape)}"
            )
        block = _block(block)
        if shape is None:
            shape = (index.shape[2] * block[0], index.shape[3] * block[1])
        rule = mask_mod if isinstance(mask_mod, Rule) or mask_mod is None else masks.rule(mask_mod)
        batch, heads, *_ = index.shape
        grid = _grid(shape, block, batch, heads, rule or masks.everything())
        if grid.counts[0] != index.shape[2]:
            raise ValueError(
                f"shape {tuple(shape)} in blocks of {block} has {grid.counts[0]} row blocks, "
                f"but kv_indices has {index.shape[2]}"
            )
        partial = listed_blocks(count, index, grid.counts[1])
        full = jnp.zeros_like(partial)
        if (full_kv_indices is None) != (full_kv_num_blocks is None):
            raise ValueError(
                "full_kv_num_blocks and full_kv_indices come together, got one of them"
            )
        if full_kv_indices is not None:
            full = listed_blocks(
                jnp.asarray(full_kv_num_blocks), jnp.asarray(full_kv_indices), grid.counts[1]
            )
        capacity = grid.counts[0] * grid.counts[1]
        lists = lists_from_map(partial | full, full & ~partial, grid, capacity)
        rule = None if rule is None else _numbered(rule, grid)
        return _made(lists, intervals.intervals_with_data(rule, grid.shape), rule, grid)

    # ----------------------------------------------------------------------------------- contents

    @property
    def grid(self) -> Grid:
        """The blocks as a `masks.Grid`, with this mask's own batch rows and heads."""
        return Grid(self.shape, self.block, *self.kv_count.shape[:2])

    @property
    def lists(self) -> Lists:
        """The arrays alone."""
        return Lists(self.kv_start, self.kv_count, self.full_count, self.kv_index, self.overflow)

    def blocks(self) -> Array:
        """Every block's class, int8 [B|1, N|K|1, nq, nk]: 0 empty, 1 partial, 2 full."""
        return block_map(self.lists, *self.grid.counts)

    def to_dense(self, batch: int | None = None, heads: int | None = None) -> Array:
        """Every token pair, bool [B|1, N|1, T, S]. T x S in memory: for tests and inspection.

        Args:
          batch: batch rows of the result, if the rule depends on them; default the mask's own.
          heads: query heads; a mask with fewer is repeated over consecutive groups of them.
        """
        own_batch, own_heads = self.kv_count.shape[:2]
        batch, heads = batch or own_batch, heads or own_heads
        (T, S), (bq, bk) = self.shape, self.block
        classes = self.blocks()
        if own_heads not in (1, heads):
            classes = jnp.repeat(classes, heads // own_heads, axis=1)
        tokens = jnp.repeat(jnp.repeat(classes, bq, axis=2), bk, axis=3)[:, :, :T, :S]
        if self.rule is None:
            return tokens > 0
        index = jnp.ogrid[:batch, :heads, :T, :S]
        return (tokens == 2) | (tokens == 1) & self.rule.allows(Tokens.at(*index))

    def density(self, against: Rule | None = None) -> Array:
        """Blocks visited ÷ blocks that causality allows (÷ all, if the rule is not causal).

        Args:
          against: divide by the number of blocks that this rule allows instead.
        """
        if against is None:
            is_causal = self.rule is not None and self.rule.is_causal
            against = masks.causal() if is_causal else masks.everything()
        grid = self.grid
        spans = _a_rule(against).spans(grid)
        if spans is not None:
            lo, hi = (jnp.clip(x, 0, grid.counts[1]) for x in spans[:2])
            allowed = jnp.maximum(hi - lo, 0).astype(jnp.float32).sum() * grid.batch * grid.heads
        else:
            live = against.classify(grid)[0]
            size = (grid.batch, grid.heads, *grid.counts)
            allowed = jnp.broadcast_to(live, size).sum(dtype=jnp.float32)
        return self.kv_count.astype(jnp.float32).sum() / allowed

    # ------------------------------------------------------------------------------- derived masks

    def transpose(self) -> BlockMask:
        """The same blocks listed by column: what the backward pass visits. Keeps M.

        `kv_count[b, n, j]` of the result counts the row blocks that visit kv block j, and its
        `to_dense` is that of this mask, transposed.
        """
        lists = transposed(self.lists, self.grid.counts[1])
        rule = self.rule.a if isinstance(self.rule, Swapped) else self.rule and Swapped(self.rule)
        pairs = self.intervals
        pairs = None if pairs is None else intervals.transposed(pairs, self.shape[1])
        return _of_lists(lists, pairs, rule, self.shape[::-1], self.block[::-1])

    def __and__(self, rule: Rule) -> BlockMask:
        """Narrows the mask: blocks that `rule` empties are dropped, the others reclassified."""
        if not isinstance(rule, Rule):
            return NotImplemented
        own, grid = self.kv_count.shape[:2], self.grid
        batch = max(own[0], _carried_sizes(rule)[0])
        for name, size, asked in zip(("batch rows", "heads"), (batch, own[1]), (0, 1), strict=True):
            if size == 1 and result_sizes(rule, 2, 2, by_number=True)[asked] > 1:
                raise ValueError(
                    f"{rule} distinguishes {name}, but this mask is shared by all {name}; "
                    "build it with BlockMask.from_rule(rule, shape, batch=…, heads=…)"
                )
        grid = dataclasses.replace(grid, batch=batch)
        rule = _numbered(rule, grid)
        lists = narrowed(self.lists, rule, grid)
        both = rule if self.rule is None else self.rule & rule
        return _of_lists(lists, self._intervals_with(rule, both), both, self.shape, self.block)

    def _intervals_with(self, rule: Rule, both: Rule) -> Array | None:
        """The intervals of this mask's rule & another one."""
        if self.intervals is None:
            return intervals.intervals_with_data(both, self.shape)
        pairs = intervals.intervals_of(rule, self.shape)
        return None if pairs is None else intervals.intersection(self.intervals, pairs)

    def __getitem__(self, at: tuple[int, int]) -> BlockMask:
        """One batch row and head, `mask[b, n]`; an axis of size 1 takes any index."""
        b, n = at
        own = self.kv_count.shape[:2]
        for name, i, size in (("batch row", b, own[0]), ("head", n, own[1])):
            if size > 1 and not -size <= i < size:
                raise IndexError(f"{name} {i} is outside a mask with {size}")
        index = tuple(0 if size == 1 else i % size for i, size in zip((b, n), own, strict=True))
        rule = self.rule
        if rule is not None and result_sizes(rule, max(b + 1, 2), max(n + 1, 2)) != (1, 1):
            rule = Picked(rule, jnp.asarray(b), jnp.asarray(n))
        picked = (x[index][None, None] for x in self.lists[:4])
        pairs = self.intervals
        if pairs is not None and pairs.shape[0] > 1:
            pairs = pairs[b][None]
        lists = Lists._make([*picked, self.overflow])
        return _of_lists(lists, pairs, rule, self.shape, self.block)

    def partition_spec(
        self,
        batch: str | tuple[str, ...] | None = None,
        heads: str | tuple[str, ...] | None = None,
    ) -> BlockMask:
        """This mask with a PartitionSpec in place of every array: `in_specs` for `jax.shard_map`.

        Args:
          batch: mesh axis (or axes) over batch rows; axes of size 1 stay whole.
          heads: mesh axis over heads. Lists per kv head are split like key and value.
        """
        b, n = (
            name if size > 1 else None
            for name, size in zip((batch, heads), self.kv_count.shape[:2], strict=True)
        )
        rule = None if self.rule is None else partition_spec(self.rule, batch, heads)
        spec = PartitionSpec(b, n, None)
        pairs = None
        if self.intervals is not None:
            rows = batch if self.intervals.shape[0] > 1 else None
            pairs = PartitionSpec(rows, None, None, None)
        whole = PartitionSpec()
        return BlockMask(spec, spec, spec, spec, whole, rule, pairs, self.shape, self.block)

    # ------------------------------------------------------------------------------------ pictures

    def __repr__(self) -> str:
        return draw.title(self)

    def __str__(self) -> str:
        """Draws the first head: ■ full, ◪ partial, · empty. If large, a mark is several blocks."""
        return draw.text(self)

    def plot(self, b: int = 0, n: int = 0, axes: Axes | None = None) -> Axes:
        """Plots one head on matplotlib axes, which it returns: dark full, light partial."""
        return draw.plot(self, b, n, axes)


def _of_lists(
    lists: Lists,
    pairs: Array | None,
    rule: Rule | None,
    shape: tuple[int, int],
    block: tuple[int, int],
) -> BlockMask:
    start, count, full, index, overflow = lists
    return BlockMask(start, count, full, index, overflow, rule, pairs, shape, block)


def _made(lists: Lists, pairs: Array | None, rule: Rule | None, grid: Grid) -> BlockMask:
    """A BlockMask of these lists; a list that was cut raises, unless it is traced."""
    if not isinstance(lists.overflow, jax.core.Tracer) and bool(lists.overflow):
        needed = int(jnp.max(lists.kv_start[..., -1] + lists.kv_count[..., -1]))
        raise ValueError(
            f"capacity {lists.kv_index.shape[-1]} is too small: a head lists {needed} blocks; "
            "raise capacity or leave it out"
        )
    return _of_lists(cut_to_capacity(lists), pairs, rule, grid.shape, grid.block)


# ------------------------------------------------------------------------------------------- checks


def _a_rule(rule: Any) -> Rule:
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule must be a rule of xsake.masks, got {type(rule).__name__}; "
            "masks.rule(fn) wraps a function and masks.array(mask) a bool array"
        )
    return rule


def _block(block: Any) -> tuple[int, int]:
    pair = (block, block) if isinstance(block, (int, np.integer)) else tuple(block)
    if len(pair) != 2 or any(not isinstance(x, (int, np.integer)) or x < 1 for x in pair):
        raise ValueError(f"block must be a positive number or (block_q, block_k), got {block!r}")
    return int(pair[0]), int(pair[1])


def _grid(shape: Any, block: Any, batch: int, heads: int, rule: Rule) -> Grid:
    """The checked grid; a batch or heads of 1 are widened to the sizes of the rule's arrays."""
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if len(shape) != 2 or any(not isinstance(x, (int, np.integer)) or x < 1 for x in shape):
        raise ValueError(f"shape must be (T, S), two positive lengths, got {shape!r}")
    rows, own_heads = _carried_sizes(rule)
    batch, heads = rows if batch == 1 else batch, own_heads if heads == 1 else heads
    return Grid((int(shape[0]), int(shape[1])), _block(block), batch, heads)


def _checked_capacity(capacity: Any) -> int:
    if not isinstance(capacity, (int, np.integer)) or capacity < 1:
        raise ValueError(f"capacity must be a positive number of blocks, got {capacity!r}")
    return int(capacity)


def _capacity(bound: Rule, grid: Grid, spans: Spans | None) -> int:
    """Blocks that one head can list at most: so that M is static.

    bound: the rule's upper bound, whatever its data. spans: those of the bound.
    """
    if spans is not None:
        lo, hi = (np.clip(x, 0, grid.counts[1]) for x in spans[:2])
        return max(1, int(np.maximum(hi - lo, 0).sum()))
    with jax.ensure_compile_time_eval():
        live = np.broadcast_to(bound.classify(grid)[0], (1, 1, *grid.counts))
    return max(1, int(live.sum((-2, -1)).max()))


def _carried_sizes(rule: Rule) -> tuple[int, int]:
    """(batch rows, heads) of the arrays that a rule carries, 1 if they have no such axis."""
    sizes = [dict(zip(axes, shape, strict=True)) for _, axes, shape in carried(rule)]
    batch, heads = (max((size.get(axis, 1) for size in sizes), default=1) for axis in "bn")
    return batch, heads


def _numbered(rule: Rule, grid: Grid) -> Rule:
    """The rule, checked, with arrays of global batch rows and heads if it depends on them."""
    check_fits(rule, grid.batch, grid.heads, *grid.shape)
    batch, heads = result_sizes(rule, grid.batch, grid.heads, by_number=True)
    if batch == heads == 1:
        return rule
    b, n = (jnp.arange(size, dtype=jnp.int32) if size > 1 else None for size in (batch, heads))
    return masks.numbered(rule, b, n)
