"""What the three kernels share: sizes, launches, products, and the rule inside a tile.

Arrays are laid out for blocks of whole tokens, X = B · K kv heads over all batch rows:

    q, d_out, out, dq   [X, N / K, T', H']      T', S': padded to whole blocks
    k, v, dk, dv        [X, S', H']             H': padded to 128 lanes
    lse, delta          [X, N / K, row blocks, 1, block_q]
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsake import _jax
from xsake.backends import Sizes
from xsake.backends.kernel_rule import KernelRule, by_query, translate
from xsake.backends.tpu.visits import BY_RULE, FULL, PARTIAL, Layout, Visit, divided, visits_of
from xsake.block_mask import BlockMask

LANES = 128


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed when the kernels are compiled."""

    scale: float
    soft_cap: float | None
    interpret: Any  # pltpu.InterpretParams, in tests; False on a TPU


class Problem:
    """One call as the kernels see it."""

    def __init__(self, settings: Settings, sizes: Sizes, mask: BlockMask):
        self.settings, self.sizes, self.mask = settings, sizes, mask.packed()
        self.group = sizes.N // sizes.K
        self.bq, self.bk = mask.block
        self.row_blocks, self.kv_blocks = mask.grid.counts
        self.has_short_block = sizes.S % self.bk != 0
        # Two integers a query where the mask has one interval each, else the rule of token pairs.
        # `rule` is what decides where `intervals` do not.
        self.intervals: list[Array] = []
        self.in_order: Array | None = None  # bool [B|1]: batch rows that intervals decide
        rule = None
        if mask.intervals is not None and mask.intervals.shape[2] == 2:
            pairs = by_query(mask)
            assert pairs is not None
            self.intervals, rule = [pairs.rows[0][:, i] for i in range(2)], pairs.otherwise
            self.in_order = None if rule is None else self.intervals[0][:, 0] >= 0
        else:
            rule = translate(mask.rule, *mask.shape)
        self.rule = rule or KernelRule(None)
        self.row_values = [*self.intervals, *self.rule.rows]
        decided = bool(self.intervals) or self.rule.allows is not None
        self.has_partial = decided or self.has_short_block

    # ---------------------------------------------------------------------------------- operands

    def rows(self, x: Array) -> Array:
        """[B, T, N, H] as [X, N / K, T', H']."""
        x = _padded(x.swapaxes(1, 2), self.row_blocks * self.bq)
        return x.reshape(-1, self.group, *x.shape[2:])

    def keys(self, x: Array) -> Array:
        """[B, S, K, H] as [X, S', H']."""
        x = _padded(x.swapaxes(1, 2), self.kv_blocks * self.bk)
        return x.reshape(-1, *x.shape[2:])

    def row_scalars(self, x: Array, past: float) -> Array:
        """[B, T, N] as [X, N / K, row blocks, 1, block_q]; `past` after the last query."""
        end = self.row_blocks * self.bq - self.sizes.T
        x = jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, end)), constant_values=past)
        return x.reshape(-1, self.group, self.row_blocks, 1, self.bq)

    def from_rows(self, x: Array, size: int) -> Array:
        """[X, N / K, T', H'] as [B, T, N, size]."""
        x = x.reshape(self.sizes.B, self.sizes.N, *x.shape[2:])
        return x[:, :, : self.sizes.T, :size].swapaxes(1, 2)

    def from_keys(self, x: Array, size: int) -> Array:
        """[X, S', H'] as [B, S, K, size]."""
        x = x.reshape(self.sizes.B, self.sizes.K, *x.shape[1:])
        return x[:, :, : self.sizes.S, :size].swapaxes(1, 2)

    def rule_operands(self) -> list[Array]:
        """The rule's integers, [B|1, blocks, 1, block] each: per query, then per key."""
        rows = [_in_blocks(x, self.row_blocks, self.bq) for x in self.row_values]
        return rows + [_in_blocks(x, self.kv_blocks, self.bk) for x in self.rule.columns]

    # ------------------------------------------------------------------------------------ launch

    def launch(self, name, body, operands, results, scratch, *, by_column=False):
        """Runs body(visit, refs…) for every visit.

        operands: (array, "rows" | "keys" | "row scalars") each. results: (size, dtype) each, by
        work tile: [X, N / K, T', size], or [X, S', size] where `by_column`.
        """
        layout = Layout.of(self.mask, self.sizes, by_column)
        specs = {kind: self._spec(layout, kind) for kind in ("rows", "keys", "row scalars")}
        rule_operands = self.rule_operands()
        arrays = [x for x, _ in operands] + rule_operands
        in_specs = [specs[kind](x.shape[-1]) for x, kind in operands]
        in_specs += [self._rule_spec(layout, x, i) for i, x in enumerate(rule_operands)]
        out_kind = "keys" if by_column else "rows"
        tokens = (
            (self.kv_blocks * self.bk,) if by_column else (self.group, self.row_blocks * self.bq)
        )
        # Inside `jax.shard_map`, operands and results vary alike.
        given = arrays, self.mask.transpose() if by_column else self.mask, self.in_order
        axes = _jax.varying_axes(*jax.tree.leaves(given))
        arrays, mask, in_order = _jax.vary(given, axes)
        varies = jax.typeof(arrays[0]).manual_axis_type
        shapes = [
            jax.ShapeDtypeStruct((layout.heads, *tokens, size), dtype, manual_axis_type=varies)
            for size, dtype in results
        ]
        visits = visits_of(mask, layout, self.has_partial, in_order)

        def one(launch: Any, before: Any) -> Any:
            """The results before, with those of the launch's work tiles."""
            table, total = visits.of_launch(launch)
            first, last = len(arrays), len(arrays) + len(before)

            def kernel(table, *refs):
                body(layout.at(table, pl.program_id(0)), *refs[:first], *refs[last:])

            found = pl.pallas_call(
                kernel,
                out_shape=shapes,
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=1,
                    grid=(total,),
                    in_specs=in_specs + [pl.BlockSpec(memory_space=pl.ANY) for _ in before],
                    out_specs=[specs[out_kind](size) for size, _ in results],
                    scratch_shapes=scratch,
                ),
                input_output_aliases={1 + first + i: i for i in range(len(before))},
                compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
                interpret=self.settings.interpret,
                name=name,
            )(table, *arrays, *before)
            return tuple(found)

        if not layout.is_split:
            return one(0, ())
        empty = _jax.vary(tuple(jnp.zeros(x.shape, x.dtype) for x in shapes), axes)
        return lax.fori_loop(0, visits.launches, one, empty)

    def _spec(self, layout: Layout, kind: str):
        """size -> the block of an array that a visit reads, or that its work tile writes."""

        def rows(t, table):
            visit = layout.at(table, t)
            return visit.x, visit.g, visit.i, 0

        def keys(t, table):
            visit = layout.at(table, t)
            return visit.x, visit.j, 0

        def row_scalars(t, table):
            return *rows(t, table), 0

        return {
            "rows": lambda size: pl.BlockSpec((None, None, self.bq, size), rows),
            "keys": lambda size: pl.BlockSpec((None, self.bk, size), keys),
            "row scalars": lambda size: pl.BlockSpec((None, None, None, 1, size), row_scalars),
        }[kind]

    def _rule_spec(self, layout: Layout, x: Array, number: int):
        is_of_queries = number < len(self.row_values)

        def block(t, table):
            visit = layout.at(table, t)
            b = divided(visit.x, self.sizes.K)[0] if x.shape[0] > 1 else 0
            return b, visit.i if is_of_queries else visit.j, 0, 0

        return pl.BlockSpec((None, None, 1, x.shape[-1]), block)

    # -------------------------------------------------------------------------------- inside a tile

    def split(self, refs):
        """(the rule's refs, the refs that follow)."""
        count = len(self.row_values) + len(self.rule.columns)
        return refs[:count], refs[count:]

    def logits(self, a: Array, b: Array) -> Array:
        """scale · a bᵀ, soft-capped, in float32."""
        s = product(a, b, (1, 1)) * self.settings.scale
        cap = self.settings.soft_cap
        return s if cap is None else cap * jnp.tanh(s / cap)

    def by_kind(self, visit: Visit, step) -> None:
        """step(kind), once for each kind of blocks that there are: FULL, PARTIAL, BY_RULE."""
        kinds = [FULL]
        kinds += [PARTIAL] if self.has_partial else []
        kinds += [] if self.in_order is None else [BY_RULE]
        for kind in kinds:
            pl.when(visit.kind == kind)(functools.partial(step, kind))

    def allowed(
        self, visit: Visit, kind: int, rule_refs, shape: tuple[int, int], dims: tuple[int, int]
    ):
        """Bools: the pairs of a partial block that are seen. dims: axes of queries and of keys."""
        k = lax.broadcasted_iota(jnp.int32, shape, dims[1]) + visit.j * self.bk
        if kind == PARTIAL and self.intervals:
            low, high = (along(ref, dims[0]) for ref in rule_refs[:2])
            return (k >= low) & (k < high)  # no key past the last one is below high
        q = lax.broadcasted_iota(jnp.int32, shape, dims[0]) + visit.i * self.bq
        seen = None
        if self.rule.allows is not None:
            rows = len(self.rule.rows)
            values = [
                jnp.broadcast_to(along(ref, dims[0 if number < rows else 1]), shape)
                for number, ref in enumerate(rule_refs[len(self.intervals) :])
            ]
            b, kv_head = divided(visit.x, self.sizes.K)
            n = kv_head * self.group + visit.g
            seen = self.rule.allows(b, n, q, k, values[:rows], values[rows:])
        if self.has_short_block:
            inside = k < self.sizes.S
            seen = inside if seen is None else seen & inside
        return seen


def along(ref, axis: int) -> Array:
    """The integers or floats of a block [1, tokens], along this axis of a tile."""
    return ref[...] if axis == 1 else jnp.expand_dims(ref[0], -1)


def product(a: Array, b: Array, contracted: tuple[int, int]) -> Array:
    """A product of two tiles in float32. Without `precision`, TPUs round float32 to bfloat16."""
    (i, j), dtype = contracted, jnp.float32
    precision = lax.Precision.HIGHEST if a.dtype == dtype else None
    dims = (((i,), (j,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=dtype)


def _padded(x: Array, tokens: int) -> Array:
    """[…, tokens, head] with zeros up to whole blocks and whole lanes."""
    size = math.ceil(x.shape[-1] / LANES) * LANES
    lead = ((0, 0),) * (x.ndim - 2)
    return jnp.pad(x, (*lead, (0, tokens - x.shape[-2]), (0, size - x.shape[-1])))


def _in_blocks(x: Array, blocks: int, block: int) -> Array:
    """[B|1, tokens] as [B|1, blocks, 1, block]; what lies past the end is never seen."""
    x = jnp.pad(x, ((0, 0), (0, blocks * block - x.shape[-1])))
    return x.reshape(len(x), blocks, 1, block)
