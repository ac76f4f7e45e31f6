"""What the backward needs before its products, on Hopper (sm90): lists by column, work, delta.

    lists ── by column ── table of work          (hopper_tables)
    out, d_out, lse ── delta, lse in base 2      (hopper_delta)
    zeros to add dq to, counters for its cast

Where heads have lists of their own that are sorted head by head, or not at all, it is one launch: a
CTA for each head makes its lists and its rows of the table while the others run through memory.
Apart, little of the card works on the first two, and each waits for the one before it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake import _jax
from xsake.backends.hopper import delta as hopper_delta
from xsake.backends.hopper import work_table as hopper_tables
from xsake.backends.hopper.items import LOG2E, THREADS, WARP, per_item
from xsake.block_mask.lists import Lists

# Rows of blocks: with more, lists (4 bytes a lane) would take shared memory from the pass, of which
# two CTAs share an SM.
TOGETHER_ROWS = hopper_delta.SM_BYTES // 2 // (4 * THREADS)


class Prepared(NamedTuple):
    """What the kernels read and add to."""

    lse: Array  # in base 2, float32 [B, N, whole row blocks]; +inf where a row is empty or past T
    delta: Array  # the same; 0 there
    table: Array  # of the work by column
    row_blocks: Array  # of every column's list, flat
    zeros: Array | None  # to add dq to, float32 [B, T, N, H]
    counters: Array | None  # - visits of every row block


def prepare(
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array | None,
    lists: Lists,
    shape: Any,
    tiling: Any,
    *,
    zeros: int | None,
    counts: bool = False,
    interpret: Any = False,
) -> Prepared:
    """All of it; `zeros` of that size and `counts` if they are asked for.

    T in whole eights: lengths that are no multiple of 8 take plain XLA for delta and zeros.
    """
    columns = shape.kv_blocks
    rows = shape.row_blocks * shape.block[0]
    # kv blocks of every query head are items: its own q, d_out and dq stand in L2
    sizes = shape.batch, shape.heads, shape.heads, shape.head_bytes
    if not hopper_delta.fits(out):
        statistics = _statistics_by_xla(out, lse, d_out, d_lse, rows, zeros)
    else:
        run = hopper_tables.sorted_together(columns, *sizes, tiling)
        alone = hopper_tables.ByHead.fits(lists, columns, shape.batch, shape.heads, run)
        if alone and not interpret and shape.row_blocks <= TOGETHER_ROWS:
            by_head = hopper_tables.ByHead(lists, columns, run, tiling, counts)
            work = hopper_delta.Pass(out, d_lse is not None, rows, zeros)
            return _together(by_head, work, (out, d_out, lse, d_lse), _jax.multiprocessors())
        statistics = hopper_delta.statistics(
            out,
            d_out,
            lse,
            d_lse,
            rows=rows,
            zeros=zeros,
            interpret=interpret,
        )
        statistics = *statistics, *[None] * (zeros is None)
    by_column = hopper_tables.lists_by_column(lists, columns, interpret)
    table = hopper_tables.work_table(by_column, *sizes, tiling, interpret)
    counters = -per_item(lists.kv_count, shape.batch, shape.heads) if counts else None
    lse, delta, added_to = statistics
    return Prepared(lse, delta, table, by_column.kv_index.reshape(-1), added_to, counters)


def _together(by_head: Any, work: Any, given: Any, sms: int) -> Prepared:
    """One launch; the first CTAs have the lists."""
    first = by_head.all_heads
    ctas = min(work.units, max(sms * work.per_sm - first, sms))
    operands = hopper_delta.operands(*given)
    reads = len(by_head.operands), len(operands)
    writes = len(by_head.out_type), len(work.out_type)

    def body(*refs, union, ready):
        lists_in, pass_in, lists_out, pass_out = _split(refs, *reads, *writes)
        (of_lists, of_pass) = union
        cta = lax.axis_index("cta")

        @pl.when(cta < first)
        def _():
            smem = dict(zip(by_head.smem, of_lists, strict=True))
            by_head.run(cta, (*lists_in, *lists_out), smem)

        @pl.when(cta >= first)
        def _():
            smem = dict(zip(work.smem, of_pass, strict=True))
            work.run(cta - first, ctas, (*pass_in, *pass_out), smem, ready)

    made = plgpu.kernel(
        body,
        out_type=(*by_head.out_type, *work.out_type),
        scratch_types=dict(
            union=plgpu.RefUnion([*by_head.smem.values()], [*work.smem.values()]),
            ready=work.barriers,
        ),
        grid=(first + ctas,),
        grid_names=("cta",),
        kernel_name="xsake_prepare",
        # Lists are counted over all lanes, which takes a number for each warp.
        compiler_params=dataclasses.replace(
            hopper_delta.COMPILER_PARAMS, reduction_scratch_bytes=THREADS // WARP * 4
        ),
    )(*by_head.operands, *operands)
    (row_blocks, table, *counters), (lse, delta, *zeros) = _split(made, *writes)
    table = table.reshape(-1, hopper_tables.WIDTH)
    return Prepared(lse, delta, table, row_blocks, *(zeros or [None]), *(counters or [None]))


def _split(values: Any, *sizes: int) -> list[Any]:
    """Values in parts of so many."""
    values = iter(values)
    return [[next(values) for _ in range(size)] for size in sizes]


def _statistics_by_xla(out, lse, d_out, d_lse, rows, zeros):
    """lse in base 2, delta, and zeros or None: a pass for delta and one for the zeros."""
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(axis=-1)
    # Fused with the transposes around it, the sum is no row reduction, and many times slower.
    delta = jax.lax.optimization_barrier(delta).swapaxes(1, 2)
    if d_lse is not None:
        delta = delta - d_lse
    empty = lse == -jnp.inf
    lse = jnp.where(empty, jnp.inf, lse * LOG2E)
    delta = jnp.where(empty, 0.0, delta)
    batch, queries, heads, _ = out.shape
    past = ((0, 0), (0, 0), (0, rows - queries))
    lse, delta = jnp.pad(lse, past, constant_values=jnp.inf), jnp.pad(delta, past)
    if zeros is None:
        return lse, delta, None
    tokens = -(-queries // hopper_delta.ALIGNED) * hopper_delta.ALIGNED
    return lse, delta, jnp.zeros((batch, tokens, heads, zeros), jnp.float32)
