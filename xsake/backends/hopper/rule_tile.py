"""The mask's rule inside one tile of a kernel."""

import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper import token_words
from xsake.backends.hopper.interval_tile import keep_columns
from xsake.backends.hopper.layouts import ROW, TILE


class RuleRefs(NamedTuple):
    """A rule's arrays in global memory."""

    rows: Any  # per query
    columns: Any  # per key
    tiles: Any  # words of token masks
    otherwise: Any = None  # those of the rule's `otherwise`


class RuleTile:
    """A KernelRule as the kernels evaluate it; `axis` is that of their work tiles."""

    def __init__(self, rule, shape, axis, interpret):
        self.allows = rule.allows
        self.axis = axis
        self.interpret = interpret
        self.is_interval, self.bounds = rule.is_interval, rule.bounds
        self.row_arrays = len(rule.rows)
        self.column_arrays = len(rule.columns)
        self.tile_arrays = len(rule.tiles)
        self.S = shape.sizes.S
        # Whether keys past the last one have to be masked.
        self.ends_inside = shape.has_short_block and not rule.is_interval
        # Without a rule the only partial blocks are those that reach past the last key.
        has_rule = rule.allows is not None or rule.is_interval
        self.has_partial = has_rule or shape.has_short_block
        self.otherwise = (
            None if rule.otherwise is None else RuleTile(rule.otherwise, shape, axis, interpret)
        )

    def split(self, refs) -> tuple[RuleRefs, Any]:
        """(the rule's arrays, the refs that follow)."""
        rows, refs = refs[: self.row_arrays], refs[self.row_arrays :]
        columns, refs = refs[: self.column_arrays], refs[self.column_arrays :]
        tiles, refs = refs[: self.tile_arrays], refs[self.tile_arrays :]
        if self.otherwise is None:
            return RuleRefs(rows, columns, tiles), refs
        otherwise, refs = self.otherwise.split(refs)
        return RuleRefs(rows, columns, tiles, otherwise), refs

    def decides(self, refs, work_tile, first):
        """Whether this rule decides in a work tile that begins at token `first`.

        None: it always does, because it has no `otherwise`.
        """
        if self.otherwise is None:
            return None
        (marked,) = refs.rows or refs.columns
        return marked[_batch_row(marked, work_tile), 0, first] >= 0

    def end_of_column(self, refs, work_tile, column):
        """The first row that sees neither this column nor one before it; -1: it is not known.

        For a rule that is an interval of rows for each column, whose ends do not decrease.
        """
        (ends,) = refs.columns
        batch_row = _batch_row(ends, work_tile)
        found = [ends[batch_row, end, column] for end in range(1, ends.shape[1], 2)]
        return functools.reduce(jnp.maximum, found)

    def partial_steps(self, full, count, decides):
        """(rule, first step, end) of each loop over partial steps: this rule's, its otherwise's."""
        if not self.has_partial:
            return ()
        if decides is None:
            return ((self, full, count),)
        own = jnp.where(decides, count, full)
        return (self, full, own), (self.otherwise, own, count)

    def load(self, refs, work_tile, first, length, layout):
        """The values of `length` tokens from `first`, one vector for each integer of a token."""

        def vector(ref):
            return plgpu.load(ref.at[pl.ds(first, length)], layout=layout, optimized=False)

        values = []
        for ref in refs:
            of_row = ref.at[_batch_row(ref, work_tile)]
            if len(ref.shape) == 2:
                values.append(vector(of_row))
            else:
                values += [vector(of_row.at[i]) for i in range(ref.shape[1])]
        return values

    def load_words(self, refs, work_tile, first_row, first_column):
        """The token masks of 64 rows from `first_row` and of the columns from `first_column`."""
        at = work_tile, first_row, first_column, self.axis, self.interpret
        return [token_words.load(ref, *at) for ref in refs]

    def keep(
        self, x, fill, work_tile, first_query, first_key, dims, row_values, column_values, words=()
    ):
        """A tile x [64, columns] with `fill` where the rule forbids.

        dims: the tile's axis of queries and its axis of keys. words: as load_words returns them.
        """
        at = work_tile, first_query, first_key
        first_row, first_column = ((first_query, first_key)[dims.index(i)] for i in (0, 1))
        shift = token_words.shift_of(first_column, x.shape[1]) if words else 0
        tiles = []
        if self.interpret or not self.is_interval:
            tiles = [token_words.tile(word, shift, x.shape[1], self.interpret) for word in words]
        if not self.is_interval:
            values = row_values, column_values, tiles
            return jnp.where(self._allowed(*at, dims, *values, x.shape), x, fill)
        limits = row_values or column_values
        if self.bounds is not None:
            row = plgpu.broadcasted_iota(jnp.int32, x.shape[:1], 0, layout=ROW)
            limits = self.bounds(row + first_row)
        limits = [limit - first_column for limit in limits]
        if not self.interpret:
            return keep_columns(x, limits, fill, words, shift)
        column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=TILE)
        wide = [lax.broadcast_in_dim(limit, x.shape, [0]) for limit in limits]
        runs = [
            (column >= lo) & (column < hi) for lo, hi in zip(wide[::2], wide[1::2], strict=True)
        ]
        allowed = functools.reduce(operator.or_, runs)
        return jnp.where(functools.reduce(operator.and_, tiles, allowed), x, fill)

    def _allowed(
        self, work_tile, first_query, first_key, dims, row_values, column_values, tiles, shape
    ):
        """The pairs that the rule allows in a tile of this shape: bools."""
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
                tiles,
            )
        if self.ends_inside:
            inside = k_index < self.S
            allowed = inside if allowed is None else allowed & inside
        return allowed


def rule_operands(rule, shape, axis):
    """The rule's arrays, per query and per key, padded to whole blocks; token masks as words.

    A tile may read past the end; what it finds there is masked. axis: that of the work tiles.
    """
    rows = tuple(_pad(x, shape.padded_rows) for x in rule.rows)
    columns = tuple(_pad(x, shape.padded_keys) for x in rule.columns)
    tiles = tuple(token_words.pack(x, shape, axis) for x in rule.tiles)
    otherwise = () if rule.otherwise is None else rule_operands(rule.otherwise, shape, axis)
    return (*rows, *columns, *tiles, *otherwise)


def _pad(x, length):
    """x with zeros on its last axis, up to `length` tokens."""
    if x.shape[-1] == length:
        return x
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, length - x.shape[-1]),))


def _batch_row(ref, work_tile):
    return work_tile.b if ref.shape[0] > 1 else 0
