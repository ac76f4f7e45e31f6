"""What the backward needs before its products, on Hopper (sm90).

    lists ── transposed lists ── work table      (transpose.py, work_table.py)
    out, d_out, lse ── delta, lse in base 2      (delta.py)
    intervals by query ── intervals by key       (interval_transpose.py)
    zeros to add dq to, counters for its cast

This is one launch if work tiles are sorted within each head or not at all (see also MAX_ROW_BLOCKS
and `HeadTables.fits`). One CTA per head makes its transposed lists and its part of the table, some
transpose intervals, the others do the delta pass. In separate launches, all but the last would each
occupy few multiprocessors.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake import _jax
from xsake.backends.hopper import work_table
from xsake.backends.hopper.delta import (
    COMPILER_PARAMS,
    SM_BYTES,
    DeltaPass,
    fits,
    operands,
    statistics,
)
from xsake.backends.hopper.interval_transpose import IntervalTranspose
from xsake.backends.hopper.layouts import ALIGNED, LOG2E, THREADS, WARP, round_up
from xsake.backends.hopper.shape import Shape
from xsake.backends.hopper.transpose import transpose_lists
from xsake.backends.options import BackwardTiling
from xsake.block_mask.lists import Lists

# The most row blocks for one launch: with more, `units` of transpose.py (4 bytes for each lane and
# row block) would need more shared memory than the delta pass, and two of its CTAs could
# not share an SM.
MAX_ROW_BLOCKS = SM_BYTES // 2 // (4 * THREADS)


class Prepared(NamedTuple):
    """What the backward kernels read and add to."""

    lse: Array  # in base 2, float32 [B, N, whole row blocks]; +inf in empty rows and past T
    delta: Array  # float32, the same shape; 0 in empty rows and past T
    table: Array  # work table of the transposed lists
    row_blocks: Array  # flat index of the transposed lists
    zeros: Array | None  # to add dq to, float32 [B, T, N, H]
    counters: Array | None  # for each row block, minus its number of visits
    intervals: Array | None = None  # by key, if they were asked for and this is one launch


def prepare(
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array | None,
    lists: Lists,
    shape: Shape,
    tiling: BackwardTiling,
    *,
    zeros: int | None,
    counts: bool = False,
    pairs: Array | None = None,
    interpret: Any = False,
) -> Prepared:
    """Computes what the backward kernels read and add to.

    zeros: head size of the zeros to add dq to; None: there are none. counts: compute counters.
    pairs: intervals by query [B|1, 2|4, T] that are to be transposed. Where T is not a multiple of
    8, plain XLA computes delta and the zeros.
    """
    B, N = shape.sizes.B, shape.sizes.N
    # Work tiles are per query head, so L2 groups are sized by q, d_out and dq of a query head.
    sizes = B, N, N, shape.head_bytes
    if not fits(out):
        found = _statistics_by_xla(out, lse, d_out, d_lse, shape.padded_rows, zeros)
    else:
        run = work_table.run_length(shape.kv_blocks, *sizes, tiling)
        by_head = work_table.HeadTables.fits(lists, shape.kv_blocks, run)
        if by_head and not interpret and shape.row_blocks <= MAX_ROW_BLOCKS:
            tables = work_table.HeadTables(lists, shape.kv_blocks, B, N, run, counts)
            delta_pass = DeltaPass(out, d_lse is not None, shape.padded_rows, zeros)
            intervals = IntervalTranspose(pairs, shape.sizes.S)
            pass_operands = operands(out, d_out, lse, d_lse)
            return _in_one_launch(tables, intervals, delta_pass, pass_operands)
        found = statistics(
            out,
            d_out,
            lse,
            d_lse,
            rows=shape.padded_rows,
            zeros=zeros,
            interpret=interpret,
        )
        found = *found, *[None] * (zeros is None)
    by_column = transpose_lists(lists, shape.kv_blocks, interpret)
    # With counters there is no tail, for the reason that `HeadTables` has.
    table = work_table.work_table(by_column, *sizes, tiling, interpret, has_tail=not counts)
    counters = -work_table.per_tile(lists.kv_count, B, N) if counts else None
    lse, delta, added_to = found
    return Prepared(lse, delta, table, by_column.kv_index.reshape(-1), added_to, counters)


def _in_one_launch(
    tables: work_table.HeadTables,
    intervals: IntervalTranspose,
    delta_pass: DeltaPass,
    pass_operands: tuple[Array, ...],
) -> Prepared:
    """The first CTAs build the tables, one head each, the next ones transpose intervals."""
    first = tables.heads + intervals.ctas  # CTA of the delta pass
    sms = _jax.multiprocessors()
    ctas = min(delta_pass.units, max(sms * delta_pass.per_sm - first, sms))
    reads = len(tables.operands), len(intervals.operands), len(pass_operands)
    writes = len(tables.out_type), len(intervals.out_type), len(delta_pass.out_type)

    def body(*refs, union, ready):
        tables_in, pairs_in, pass_in, tables_out, pairs_out, pass_out = _split(
            refs, *reads, *writes
        )
        (tables_smem, pass_smem) = union
        cta = lax.axis_index("cta")

        @pl.when(cta < tables.heads)
        def _():
            smem = dict(zip(tables.smem, tables_smem, strict=True))
            tables.run(cta, (*tables_in, *tables_out), smem)

        @pl.when((cta >= tables.heads) & (cta < first))
        def _():
            intervals.run(cta - tables.heads, (*pairs_in, *pairs_out))

        @pl.when(cta >= first)
        def _():
            smem = dict(zip(delta_pass.smem, pass_smem, strict=True))
            delta_pass.run(cta - first, ctas, (*pass_in, *pass_out), smem, ready)

    results = plgpu.kernel(
        body,
        out_type=(*tables.out_type, *intervals.out_type, *delta_pass.out_type),
        scratch_types=dict(
            union=plgpu.RefUnion([*tables.smem.values()], [*delta_pass.smem.values()]),
            ready=delta_pass.barriers,
        ),
        grid=(first + ctas,),
        grid_names=("cta",),
        kernel_name="xsake_prepare",
        # The tables need sums over all lanes, with one integer of scratch for each warp.
        compiler_params=dataclasses.replace(
            COMPILER_PARAMS, reduction_scratch_bytes=THREADS // WARP * 4
        ),
    )(*tables.operands, *intervals.operands, *pass_operands)
    (row_blocks, table, *counters), by_key, (lse, delta, *zeros) = _split(results, *writes)
    return Prepared(
        lse=lse,
        delta=delta,
        table=table.reshape(-1, work_table.WIDTH),
        row_blocks=row_blocks,
        zeros=zeros[0] if zeros else None,
        counters=counters[0] if counters else None,
        intervals=intervals.result(by_key),
    )


def _split(values: Any, *sizes: int) -> list[Any]:
    """Consecutive groups of the values, of the given sizes."""
    values = iter(values)
    return [[next(values) for _ in range(size)] for size in sizes]


def _statistics_by_xla(out, lse, d_out, d_lse, rows, zeros):
    """(lse in base 2, delta, zeros or None) in plain JAX."""
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(axis=-1)
    # Without the barrier XLA fuses the sum with the transposes around it; it is many times slower
    # then, because it is no row reduction any more.
    delta = jax.lax.optimization_barrier(delta).swapaxes(1, 2)
    if d_lse is not None:
        delta = delta - d_lse
    empty = lse == -jnp.inf
    lse = jnp.where(empty, jnp.inf, lse * LOG2E)
    delta = jnp.where(empty, 0.0, delta)
    B, T, N, _ = out.shape
    past = ((0, 0), (0, 0), (0, rows - T))
    lse, delta = jnp.pad(lse, past, constant_values=jnp.inf), jnp.pad(delta, past)
    if zeros is None:
        return lse, delta, None
    return lse, delta, jnp.zeros((B, round_up(T, ALIGNED), N, zeros), jnp.float32)
