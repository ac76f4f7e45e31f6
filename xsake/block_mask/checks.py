"""What the constructors of a BlockMask check and work out from their arguments."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import masks
from xsake.block_mask.lists import Lists
from xsake.masks.rule import Grid, Rule, carried, check_fits, result_sizes


def a_rule(rule: Any) -> Rule:
    """The rule, or an error that says how to make one."""
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule must be a rule of xsake.masks, got {type(rule).__name__}; "
            "masks.rule(fn) wraps a function and masks.array(mask) a bool array"
        )
    return rule


def only_and(*operands: Any) -> Any:
    """Refuses mask | x and ~mask: blocks that were left out are not known any more."""
    raise TypeError(
        "a BlockMask has & only; combine rules with | and ~ before BlockMask.from_rule, or bool "
        "blocks before BlockMask.from_dense"
    )


def head_index(at: Any, own: tuple[int, int]) -> tuple[int, int]:
    """b and n of mask[b, n], for a mask of these batch rows and heads."""
    pair = at if isinstance(at, tuple) and len(at) == 2 else ()
    if not pair or not all(isinstance(x, (int, np.integer)) for x in pair):
        raise TypeError(f"a mask is indexed by mask[b, n] with two integers, got {at!r}")
    for name, i, size in zip(("batch row", "head"), pair, own, strict=True):
        if size > 1 and not -size <= i < size:
            raise IndexError(f"{name} {i} is outside a mask with {size}")
    return int(pair[0]), int(pair[1])


def check_not_cut(lists: Lists) -> None:
    """Raises if a list did not fit, which is known."""
    if bool(lists.overflow):
        needed = int(jnp.max(lists.kv_start[..., -1] + lists.kv_count[..., -1]))
        raise ValueError(
            f"capacity {lists.kv_index.shape[-1]} is too small: a head lists {needed} blocks; "
            "raise capacity or leave it out"
        )


def block_sizes(block: Any) -> tuple[int, int]:
    """(block_q, block_k) from one number or two."""
    pair = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
    if len(pair) != 2 or any(not isinstance(x, (int, np.integer)) or x < 1 for x in pair):
        raise ValueError(f"block must be a positive number or (block_q, block_k), got {block!r}")
    return int(pair[0]), int(pair[1])


def checked_grid(shape: Any, block: Any, batch: int, heads: int, rule: Rule) -> Grid:
    """The checked grid; a batch or heads of 1 are widened to the sizes of the rule's arrays."""
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if len(shape) != 2 or any(not isinstance(x, (int, np.integer)) or x < 1 for x in shape):
        raise ValueError(f"shape must be (T, S), two positive lengths, got {shape!r}")
    rows, own_heads = carried_sizes(rule)
    batch, heads = rows if batch == 1 else batch, own_heads if heads == 1 else heads
    if min(batch, heads) < 0:
        raise ValueError(f"batch and heads must not be negative, got {batch} and {heads}")
    return Grid((int(shape[0]), int(shape[1])), block_sizes(block), batch, heads)


def checked_capacity(capacity: Any) -> int:
    """A capacity that the caller asks for."""
    if not isinstance(capacity, (int, np.integer)) or capacity < 1:
        raise ValueError(f"capacity must be a positive number of blocks, got {capacity!r}")
    return int(capacity)


def largest_capacity(rule: Rule, grid: Grid) -> int:
    """Blocks that one head can list at most, whatever the rule's data: so that M is static."""
    bound = rule.upper_bound()
    if (spans := bound.spans(grid)) is not None:
        return max(1, int(spans.live_counts(grid.counts[1]).sum()))
    return max(1, _most_live(bound, grid))


@functools.lru_cache(maxsize=1024)
def _most_live(bound: Rule, grid: Grid) -> int:
    """The largest number of blocks that a head can list, under a rule without arrays."""

    def most() -> Array:
        live = jnp.broadcast_to(bound.classify(grid)[0], (1, 1, *grid.counts))
        return live.sum((-2, -1)).max()

    # Compiled as one program, also while another one is traced, and where nothing else is jitted.
    with jax.disable_jit(False):
        return int(jax.jit(most).lower().compile()())


def carried_sizes(rule: Rule) -> tuple[int, int]:
    """(batch rows, heads) of the arrays that a rule carries, 1 if they have no such axis."""
    sizes = [dict(zip(axes, shape, strict=True)) for _, _, axes, shape in carried(rule)]
    batch, heads = (max((size.get(axis, 1) for size in sizes), default=1) for axis in "bn")
    return batch, heads


def numbered(rule: Rule, grid: Grid) -> Rule:
    """The rule, checked, with arrays of global batch rows and heads if it depends on them."""
    check_fits(rule, grid.batch, grid.heads, *grid.shape)
    batch, heads = result_sizes(rule, grid.batch, grid.heads, by_number=True)
    if batch == heads == 1:
        return rule
    b, n = (jnp.arange(size, dtype=jnp.int32) if size > 1 else None for size in (batch, heads))
    return masks.numbered(rule, b, n)
