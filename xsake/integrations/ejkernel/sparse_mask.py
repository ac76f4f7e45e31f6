"""SparseMask: for every row block, the range of kv blocks that it visits.

    blocks of one batch row       lower_bounds       [0, 0, 1]
      0 1 2                       upper_bounds       [1, 2, 3]
    0 ◪ . .                       lower_full_bounds  [0, 0, 1]
    1 ■ ◪ .                       upper_full_bounds  [0, 1, 2]
    2 . ■ ◪

A range is half open. Blocks that no range holds are dropped. Inside a range the rules of the call
(causal, window, segments) decide, in full blocks too: full bounds say where they allow every pair,
which XSAKE works out again, so that wrong ones cannot show a key that the rules hide.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake import masks
from xsake.arguments import per_token
from xsake.block_mask import BlockMask
from xsake.integrations.ejkernel.block_sizes import DEFAULT
from xsake.masks.integers import int_array, integers
from xsake.masks.rule import Grid, Leaf, Rule

__all__ = ["SparseMask", "block_mask", "create_sparsity_mask", "window_rule"]

BOUNDS = ("lower_bounds", "upper_bounds", "lower_full_bounds", "upper_full_bounds")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SparseMask:
    """Half-open ranges of kv blocks, int [B|1, 1|N, row blocks] each.

    ejkernel has one range for all heads; here every query head may have its own.
    """

    lower_bounds: Leaf
    upper_bounds: Leaf
    lower_full_bounds: Leaf = None
    upper_full_bounds: Leaf = None

    @classmethod
    def from_inputs(
        cls,
        q_positions: Any,
        q_segment_ids: Any,
        kv_positions: Any,
        kv_segment_ids: Any,
        kv_blocksize: int,
        q_blocksize: int,
        calculate_dkdv_mask: bool = False,
        causal: bool = True,
        window_left: int = -1,
        window_right: int = -1,
        mesh: Any = None,
    ) -> SparseMask:
        """Ranges that hold every block in which a query sees a key.

        Args:
          q_positions: int [B, T].
          q_segment_ids: int [B, T]; negative = padding.
          kv_positions: int [B, S].
          kv_segment_ids: int [B, S].
          kv_blocksize: tokens of a kv block.
          q_blocksize: tokens of a row block.
          calculate_dkdv_mask: ranges of row blocks for every kv block instead.
          causal: a query sees keys at its own position and before.
          window_left: keys before the query that it sees; -1 = no limit.
          window_right: keys after it; -1 = no limit.
          mesh: refused; ranges are plain arrays, which `jax.device_put` shards.
        """
        if mesh is not None:
            raise ValueError(
                "mesh would not shard the ranges, in ejkernel either; leave it out and shard the "
                "arrays with jax.device_put"
            )
        q_ids = int_array("q_segment_ids", q_segment_ids, 2)
        kv_ids = int_array("kv_segment_ids", kv_segment_ids, 2)
        (B, T), S = q_ids.shape, kv_ids.shape[1]
        limits = window_rule((window_left, window_right))
        limits = limits & masks.causal() if causal else limits
        rule = masks.at_positions(
            limits,
            per_token("q_positions", q_positions, B, T),
            per_token("kv_positions", kv_positions, B, S),
        )
        rule = rule & masks.documents(q_ids, kv_ids)
        block = (q_blocksize, kv_blocksize)
        blocks = BlockMask.from_rule(rule, (T, S), batch=B, block=block).blocks()
        if calculate_dkdv_mask:
            blocks = jnp.swapaxes(blocks, 2, 3)
        return cls(*_ranges(blocks))


def create_sparsity_mask(
    q_positions: Any,
    q_segment_ids: Any,
    kv_positions: Any,
    kv_segment_ids: Any,
    mesh: Any = None,
    kv_blocksize: int = DEFAULT,
    q_blocksize: int = DEFAULT,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
) -> tuple[SparseMask, SparseMask, SparseMask]:
    """Ranges of kv blocks for every row block, twice, and of row blocks for every kv block.

    The arguments are those of `SparseMask.from_inputs`; the result is what `qkv_layouts` takes.
    """
    forward, columns = (
        SparseMask.from_inputs(
            q_positions,
            q_segment_ids,
            kv_positions,
            kv_segment_ids,
            kv_blocksize,
            q_blocksize,
            by_column,
            causal,
            window_left,
            window_right,
            mesh,
        )
        for by_column in (False, True)
    )
    return forward, forward, columns


def window_rule(window: Any) -> Rule:
    """A rule of `sliding_window`: w, (left, right) or None; -1 or None = no limit on that side."""
    if window is None:
        return masks.everything()
    sides = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"sliding_window must be w or (left, right), got {window!r}")
    left, right = (None if side is None or side == -1 else side for side in sides)
    return masks.sliding_window(left, right)


def _ranges(blocks: Array) -> tuple[Array, Array, Array, Array]:
    """First and end of the live blocks, and of the first run of full ones, of the last axis."""
    nk = blocks.shape[-1]
    at = jnp.arange(nk, dtype=jnp.int32)
    live, full = blocks > 0, blocks == 2

    def first(marks: Array) -> Array:
        return jnp.where(marks, at, nk).min(-1)

    upper = jnp.where(live, at + 1, 0).max(-1)
    lower = jnp.minimum(first(live), upper)
    lower_full = first(full)
    upper_full = first(~full & (at > lower_full[..., None]))  # nk if the run reaches the end
    has_full = full.any(-1)
    return (
        lower,
        upper,
        jnp.where(has_full, lower_full, lower),
        jnp.where(has_full, upper_full, lower),
    )


# --------------------------------------------------------------------------------------- in a call


def block_mask(layouts: Any, rule: Rule, grid: Grid) -> BlockMask:
    """The BlockMask of `qkv_layouts`, one to three SparseMasks, with `rule` inside the blocks.

    The first one decides. The others are for ejkernel's backward; here the gradient is that of the
    forward, so they must hold every block that the forward visits.
    """
    layouts = tuple(layouts) if isinstance(layouts, (tuple, list)) else (layouts,)
    if not 1 <= len(layouts) <= 3 or not all(hasattr(x, "lower_bounds") for x in layouts):
        kinds = ", ".join(type(x).__name__ for x in layouts)
        raise TypeError(f"qkv_layouts must be one to three SparseMasks, got ({kinds})")
    blocks = _visited("qkv_layouts[0]", layouts[0], grid)
    mask = BlockMask.from_dense(blocks, rule, shape=grid.shape, block=grid.block)
    transposed = dataclasses.replace(grid, shape=grid.shape[::-1], block=grid.block[::-1])
    for i, layout in enumerate(layouts[1:], 1):
        other = _visited(f"qkv_layouts[{i}]", layout, transposed if i == 2 else grid)
        other = jnp.swapaxes(other, 2, 3) if i == 2 else other
        missed = ((mask.blocks() > 0) & ~other).any()
        if not isinstance(missed, jax.core.Tracer) and bool(missed):
            raise ValueError(
                f"qkv_layouts[{i}] drops blocks that qkv_layouts[0] visits, so gradients would not "
                "be those of the output; give what create_sparsity_mask returns, or "
                "qkv_layouts[0] alone"
            )
    return mask


def _visited(name: str, layout: Any, grid: Grid) -> Array:
    """bool [B|1, N|1, row blocks, kv blocks]: the blocks in a layout's ranges."""
    nq, nk = grid.counts
    bounds = {}
    for field in BOUNDS:
        given = getattr(layout, field)
        if given is None and "full" in field:
            continue
        if given is None:
            raise ValueError(f"{name}.{field} is None; a SparseMask needs lower and upper bounds")
        x = bounds[field] = integers(f"{name}.{field}", given)
        fits = x.ndim == 3 and x.shape[0] in (1, grid.batch) and x.shape[1] in (1, grid.heads)
        if not fits or x.shape[2] != nq:
            raise ValueError(
                f"{name}.{field} must be [{grid.batch}, 1, {nq}], for {grid.shape[0]} tokens in "
                f"blocks of {grid.block[0]}, got {list(x.shape)}; give the block sizes that the "
                "layout was built with"
            )
        if not isinstance(x, jax.core.Tracer) and int(x.max(initial=0)) > nk:
            raise ValueError(
                f"{name}.{field} reaches block {int(x.max())}, but {grid.shape[1]} tokens in "
                f"blocks of {grid.block[1]} are {nk}; give the block sizes that the layout was "
                "built with"
            )
    at = jnp.arange(nk, dtype=jnp.int32)
    lower, upper = (bounds[field][..., None] for field in BOUNDS[:2])
    return (lower <= at) & (at < upper)
