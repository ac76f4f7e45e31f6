"""The mask's rule inside one tile of a kernel."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.layouts import ROWS, TILE, pad_tokens


class RuleTile:
    """A KernelRule as the kernels evaluate it."""

    def __init__(self, rule, shape):
        self.allows = rule.allows
        self.row_arrays = len(rule.rows)
        self.column_arrays = len(rule.columns)
        self.S = shape.sizes.S
        self.has_short_block = shape.has_short_block
        # Without a rule the only partial blocks are those that reach past the last key.
        self.has_partial = rule.allows is not None or shape.has_short_block

    def split(self, refs) -> tuple[Any, Any, Any]:
        """(the rule's arrays per query, those per key, the refs that follow)."""
        rows, refs = refs[: self.row_arrays], refs[self.row_arrays :]
        return rows, refs[: self.column_arrays], refs[self.column_arrays :]

    def load(self, refs, work_tile, first, length, layout):
        """The values of `length` tokens from `first`, one vector for each array of the rule."""
        return [
            plgpu.load(
                x.at[work_tile.b if x.shape[0] > 1 else 0, pl.ds(first, length)],
                layout=layout,
                optimized=False,
            )
            for x in refs
        ]

    def allowed(self, work_tile, first_query, first_key, dims, row_values, column_values, width):
        """The pairs that the rule allows in a tile [64, width]: bools.

        dims: the tile's axis of queries and its axis of keys.
        """
        shape = (ROWS, width)
        q_index, k_index = (
            plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=TILE) + first
            for dim, first in zip(dims, (first_query, first_key), strict=True)
        )
        allowed = None
        if self.allows is not None:
            allowed = self.allows(
                work_tile.b,
                work_tile.n,
                q_index,
                k_index,
                [lax.broadcast_in_dim(x, shape, [dims[0]]) for x in row_values],
                [lax.broadcast_in_dim(x, shape, [dims[1]]) for x in column_values],
            )
        if self.has_short_block:
            inside = k_index < self.S
            allowed = inside if allowed is None else allowed & inside
        return allowed


def rule_operands(rule, shape):
    """The rule's arrays, per query and per key, padded to whole blocks.

    A tile may read past the end; what it finds there is masked.
    """
    rows = tuple(pad_tokens(x, shape.padded_rows) for x in rule.rows)
    columns = tuple(pad_tokens(x, shape.padded_keys) for x in rule.columns)
    return (*rows, *columns)
