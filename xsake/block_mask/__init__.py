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
from xsake.block_mask import draw, tree
from xsake.block_mask.checks import (
    a_rule,
    block_sizes,
    carried_sizes,
    check_not_cut,
    checked_capacity,
    checked_grid,
    head_index,
    largest_capacity,
    numbered,
    only_and,
)
from xsake.block_mask.lists import (
    Lists,
    block_map,
    both,
    cut_to_capacity,
    density_against,
    flex_blocks,
    lists_from_map,
    lists_from_spans,
    lists_of_blocks,
    lists_of_classes,
    lists_of_rule,
    narrowed,
    repacked,
    token_map,
    transposed,
)
from xsake.masks import intervals
from xsake.masks.carrying import Picked, Swapped
from xsake.masks.rule import (
    Grid,
    Leaf,
    Rule,
    combine,
    no_truth_value,
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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """For every row block, the list of kv blocks that it visits, full ones first.

    Row block i of head n visits kv_index[b, n, start : start + count], with
    start = kv_start[b, n, i] and count = kv_count[b, n, i].

    The leading axes are B (or 1, shared by the batch) and N (or K: shared by the query heads of a
    kv head; or 1: shared by all). A kv block that reaches past S is always partial, so that a loop
    over full blocks needs no bounds check.

    The constructors below write the lists row after row. In a mask made by hand, lists may lie in
    any order and be shared by row blocks; such a mask is repacked wherever it is used.
    """

    kv_start: Leaf  # int32 [B|1, N|K|1, Tb]  where the row's list begins
    kv_count: Leaf  # int32 [B|1, N|K|1, Tb]  blocks to visit
    full_count: Leaf  # int32 [B|1, N|K|1, Tb]  how many of them, listed first, are full
    kv_index: Leaf  # int32 [B|1, N|K|1, M]  block numbers, row after row; the tail is never read
    overflow: Leaf  # bool []  a list did not fit into M and was cut; None: none can have been
    rule: Any  # Rule | None: decides inside partial blocks; None allows all of them
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})  # (T, S) in tokens
    block: tuple[int, int] = dataclasses.field(metadata={"static": True})  # (block_q, block_k)
    # int32 [B|1, 1, 2|4, T] | None: the keys that the rule allows a query, from one integer to
    # before the next (masks/intervals.py); on GPUs and TPUs, for rules with arrays of that kind
    intervals: Leaf = None
    # Whether the lists lie row after row. False if made by hand or by `dataclasses.replace`.
    is_packed: bool = dataclasses.field(default=False, init=False, metadata={"static": True})
    # Whether every block in which the rule allows a token pair is listed: the rule is the mask.
    is_rule: bool = dataclasses.field(default=False, init=False, metadata={"static": True})

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
            rule may carry. A smaller one saves memory. If a head has more, this raises; under jit
            it sets `overflow` instead, and attention with the mask returns NaN.
          q_positions: int [B|1, T], what causal and window rules compare; default arange.
          kv_positions: int [B|1, S].

        >>> from xsake import masks
        >>> BlockMask.from_rule(masks.causal(), (512, 512)).density()
        Array(1., dtype=float32)
        """
        rule = masks.at_positions(a_rule(rule), q_positions, kv_positions)
        grid = checked_grid(shape, block, batch, heads, rule)
        rule = numbered(rule, grid)
        if capacity is not None:
            lists = lists_of_rule(rule, grid, checked_capacity(capacity))
            return _made(lists, rule, grid, holds_all=False)
        bound, size = rule.upper_bound(), largest_capacity(rule, grid)
        spans = bound.spans(grid)
        if spans is None or bound != rule or size > MAX_CONSTANT:
            return _made(lists_of_rule(rule, grid, size), rule, grid, True, is_rule=True)
        # Known now, also under jit: a compiled call spends no time on them.
        *arrays, _ = lists_from_spans(spans, grid, size, np)
        lists = Lists._make([*map(jnp.asarray, arrays), None])
        return _of_lists(lists, None, rule, grid.shape, grid.block, is_rule=True)

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
        block = block_sizes(block)
        if shape is None:
            shape = (blocks.shape[2] * block[0], blocks.shape[3] * block[1])
        ruled = masks.everything() if rule is None else a_rule(rule)
        batch, heads, *_ = blocks.shape
        grid = checked_grid(shape, block, batch, heads, ruled)
        if grid.counts != blocks.shape[2:]:
            raise ValueError(
                f"shape {tuple(shape)} in blocks of {block} needs {list(grid.counts)} blocks, "
                f"but blocks has {list(blocks.shape[2:])}"
            )
        ruled = numbered(ruled, grid)
        size = largest_capacity(ruled, grid) if capacity is None else checked_capacity(capacity)
        lists = lists_of_blocks(blocks, ruled, grid, size)
        return _made(lists, None if rule is None else ruled, grid, capacity is None)

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

        Full blocks have arrays of their own. `mask_mod` is a rule or a function of (b, h, q, k).
        The S side has kv_indices.shape[-1] blocks, unless `shape` says otherwise.
        """
        block = block_sizes(block)
        if (full_kv_indices is None) != (full_kv_num_blocks is None):
            raise ValueError(
                "full_kv_num_blocks and full_kv_indices come together, got one of them"
            )
        width = jnp.shape(kv_indices)[-1:]
        nk = -(-shape[1] // block[1]) if shape is not None and len(shape) == 2 else width[0]
        partial = flex_blocks(kv_num_blocks, kv_indices, nk, "")
        if shape is None:
            shape = (partial.shape[2] * block[0], nk * block[1])
        rule = mask_mod if isinstance(mask_mod, Rule) or mask_mod is None else masks.rule(mask_mod)
        batch, heads, rows, _ = partial.shape
        ruled = masks.everything() if rule is None else rule
        grid = checked_grid(shape, block, batch, heads, ruled)
        if grid.counts[0] != rows:
            raise ValueError(
                f"shape {tuple(shape)} in blocks of {block} has {grid.counts[0]} row blocks, "
                f"but kv_indices has {rows}"
            )
        full = jnp.zeros_like(partial)
        if full_kv_indices is not None:
            full = flex_blocks(full_kv_num_blocks, full_kv_indices, nk, "full_", partial.shape[:3])
        lists = lists_from_map(partial | full, full & ~partial, grid, rows * grid.counts[1])
        rule = None if rule is None else numbered(rule, grid)
        return _made(lists, rule, grid, holds_all=True)

    @staticmethod
    def from_classes(
        classes: Int[Array | np.ndarray, "B H Tb Sb"],
        rule: Rule | None,
        shape: tuple[int, int],
        block: tuple[int, int],
    ) -> BlockMask:
        """The inverse of `blocks()`: classes 0 empty, 1 partial, 2 full, which may be traced.

        Lists of a NumPy array are constants under jit. `rule` decides inside partial blocks and has
        arrays of this shape; it is not checked.
        """
        grid = Grid(shape, block, classes.shape[0], classes.shape[1])
        return _made(lists_of_classes(classes, grid), rule, grid, holds_all=True)

    @staticmethod
    def from_lists(
        lists: Lists, rule: Rule | None, shape: tuple[int, int], block: tuple[int, int]
    ) -> BlockMask:
        """The mask with these lists, row after row and full blocks first, which is not checked."""
        batch, heads, _ = lists.kv_count.shape
        return _made(lists, rule, Grid(shape, block, batch, heads), holds_all=True)

    # ----------------------------------------------------------------------------------- contents

    @property
    def grid(self) -> Grid:
        """The blocks as a `masks.Grid`, with this mask's own batch rows and heads."""
        return Grid(self.shape, self.block, *self.kv_count.shape[:2])

    @property
    def lists(self) -> Lists:
        """The arrays alone, lists row after row."""
        mask = self.packed()
        return Lists(mask.kv_start, mask.kv_count, mask.full_count, mask.kv_index, mask.overflow)

    def packed(self) -> BlockMask:
        """This mask with lists that lie row after row; itself, unless it was made by hand.

        Lists that are shared by row blocks are copied. M is then the number of blocks that a head
        lists, or that it could list where the mask is traced.
        """
        if self.is_packed:
            return self
        grid = self.grid
        arrays = self.kv_start, self.kv_count, self.full_count, self.kv_index
        size = grid.counts[0] * grid.counts[1]
        if not any(isinstance(x, jax.core.Tracer) for x in arrays):
            size = min(size, max(1, int(np.asarray(self.kv_count).sum(-1).max())))
        given = Lists._make([*map(jnp.asarray, arrays), self.overflow])
        lists = repacked(given, grid, size)
        return _of_lists(lists, self.intervals, self.rule, self.shape, self.block)

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
        grid = dataclasses.replace(self.grid, batch=batch or own_batch, heads=heads or own_heads)
        return token_map(None if self.is_rule else self.lists, self.rule, grid)

    def density(self, against: Rule | None = None) -> Array:
        """Blocks visited ÷ blocks that causality allows (÷ all, if the rule is not causal).

        Args:
          against: divide by the number of blocks that this rule allows instead.
        """
        if against is None:
            is_causal = self.rule is not None and self.rule.is_causal
            against = masks.causal() if is_causal else masks.everything()
        return density_against(self.kv_count, a_rule(against), self.grid)

    # ------------------------------------------------------------------------------- derived masks

    def transpose(self) -> BlockMask:
        """The same blocks listed by column: what the backward pass visits. Keeps M.

        `kv_count[b, n, j]` of the result counts the row blocks that visit kv block j, and its
        `to_dense` is that of this mask, transposed.
        """
        lists = transposed(self.lists, self.grid.counts[1])
        rule = self.rule
        if rule is not None:
            rule = rule.a if isinstance(rule, Swapped) else Swapped(rule)
        pairs = self.intervals
        pairs = None if pairs is None else intervals.transposed(pairs, self.shape[1])
        return _of_lists(lists, pairs, rule, self.shape[::-1], self.block[::-1], self.is_rule)

    __array_ufunc__ = None  # NumPy leaves `array & mask` to the mask

    def __and__(self, other: BlockMask | Rule | Array | np.ndarray) -> BlockMask:
        """Narrows the mask: blocks that `other` empties are dropped, the others reclassified.

        `other` is a rule, a bool array as `masks.array` takes it, or a BlockMask with blocks of the
        same size. A mask that all heads share and an array by head give each head lists of its own.
        """
        if isinstance(other, (Array, np.ndarray)):
            other = masks.array(other)
        if isinstance(other, BlockMask):
            return _intersection(self, other)
        if not isinstance(other, Rule):
            return NotImplemented
        own, grid = self.kv_count.shape[:2], self.grid
        carried_batch, carried_heads = carried_sizes(other)
        batch, heads = max(own[0], carried_batch), carried_heads if own[1] == 1 else own[1]
        for name, size, asked in zip(("batch rows", "heads"), (batch, heads), (0, 1), strict=True):
            if size == 1 and result_sizes(other, 2, 2, by_number=True)[asked] > 1:
                raise ValueError(
                    f"{other} distinguishes {name}, but this mask is shared by all {name}; build "
                    "one mask of both rules: BlockMask.from_rule(a & b, shape, batch=…, heads=…)"
                )
        grid = dataclasses.replace(grid, batch=batch, heads=heads)
        rule = numbered(other, grid)
        lists = narrowed(self.lists, rule, grid)
        both = rule if self.rule is None else self.rule & rule
        pairs = self._intervals_with(rule, both)
        return _of_lists(lists, pairs, both, self.shape, self.block, self.is_rule)

    __rand__ = __and__  # rule & mask, array & mask
    __or__ = __ror__ = __invert__ = only_and
    __bool__ = no_truth_value

    def _intervals_with(self, rule: Rule, both: Rule) -> Array | None:
        """The intervals of this mask's rule & another one."""
        if self.intervals is None:
            return intervals.intervals_with_data(both, self.shape)
        pairs = intervals.intervals_of(rule, self.shape)
        return None if pairs is None else intervals.intersection(self.intervals, pairs)

    def __getitem__(self, at: tuple[int, int]) -> BlockMask:
        """One batch row and head, `mask[b, n]`; an axis of size 1 takes any index."""
        own = self.kv_count.shape[:2]
        b, n = head_index(at, own)
        index = tuple(0 if size == 1 else i % size for i, size in zip((b, n), own, strict=True))
        rule = self.rule
        if rule is not None and result_sizes(rule, max(b + 1, 2), max(n + 1, 2)) != (1, 1):
            rule = Picked(rule, jnp.asarray(b), jnp.asarray(n))
        *arrays, overflow = self.lists
        picked = (x[index][None, None] for x in arrays)
        pairs = self.intervals
        if pairs is not None and pairs.shape[0] > 1:
            pairs = pairs[b][None]
        lists = Lists._make([*picked, overflow])
        return _of_lists(lists, pairs, rule, self.shape, self.block, self.is_rule)

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
        overflow = None if self.overflow is None else PartitionSpec()
        specs = BlockMask(spec, spec, spec, spec, overflow, rule, self.shape, self.block, pairs)
        return _marked(specs, self.is_packed, self.is_rule)

    # ------------------------------------------------------------------------------------ pictures

    def __repr__(self) -> str:
        return draw.title(self)

    def __str__(self) -> str:
        """Draws the first head: ■ full, ◪ partial, · empty. If large, a mark is several blocks."""
        return draw.text(self)

    def plot(self, b: int = 0, n: int = 0, axes: Axes | None = None) -> Axes:
        """Plots one head on matplotlib axes, which it returns, with a legend at their right."""
        return draw.plot(self, b, n, axes)


tree.register(BlockMask)


def _of_lists(
    lists: Lists,
    pairs: Array | None,
    rule: Rule | None,
    shape: tuple[int, int],
    block: tuple[int, int],
    is_rule: bool = False,
) -> BlockMask:
    return _marked(BlockMask(*lists, rule, shape, block, pairs), True, is_rule)


def _marked(mask: BlockMask, is_packed: bool, is_rule: bool) -> BlockMask:
    mask.__dict__.update(is_packed=is_packed, is_rule=is_rule)
    return mask


def _made(
    lists: Lists, rule: Rule | None, grid: Grid, holds_all: bool, is_rule: bool = False
) -> BlockMask:
    """A BlockMask of these lists; a list that was cut raises, unless it is traced.

    holds_all: the capacity is an upper bound, so that no list can be cut.
    """
    is_known = not isinstance(lists.overflow, jax.core.Tracer)
    if is_known and not holds_all:
        check_not_cut(lists)
    if is_known or holds_all:
        lists = lists._replace(overflow=None)
    pairs = intervals.intervals_with_data(rule, grid.shape)
    if not holds_all:
        lists = cut_to_capacity(lists)
    return _of_lists(lists, pairs, rule, grid.shape, grid.block, is_rule)


def _intersection(one: BlockMask, two: BlockMask) -> BlockMask:
    """What both masks allow."""
    if (one.shape, one.block) != (two.shape, two.block):
        raise ValueError(
            f"mask & mask needs equal shapes and blocks, got {one.shape} in blocks of {one.block} "
            f"and {two.shape} in blocks of {two.block}; build both with the same block"
        )
    sizes = zip(one.kv_count.shape[:2], two.kv_count.shape[:2], strict=True)
    (batch, fewer), (heads, groups) = ((max(x), min(x)) for x in sizes)
    if fewer not in (1, batch) or heads % groups:
        raise ValueError(
            f"mask & mask needs batch rows and heads that fit, got {one.kv_count.shape[:2]} and "
            f"{two.kv_count.shape[:2]}"
        )
    grid = Grid(one.shape, one.block, batch, heads)
    rules = [mask.rule for mask in (one, two) if mask.rule is not None]
    rule = combine(rules) if rules else None
    pairs = intervals.intervals_with_data(rule, one.shape)
    lists, is_rule = both(one.lists, two.lists, grid), one.is_rule and two.is_rule
    return _of_lists(lists, pairs, rule, one.shape, one.block, is_rule)
