"""Transposed block lists on Hopper (sm90): for every kv block, the row blocks that visit it.

    lists by row block ── transpose_lists ──▶ lists by kv block        the backward reads these

One small kernel replaces several of XLA's: at low densities the time between launches is a
visible part of the backward. Lists that are too long for shared memory, and the interpreter, use
plain JAX.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.lanes import (
    LANES,
    UNROLL,
    every_lane,
    for_each,
    for_each_entry,
    gather,
    lane_index,
    launch,
    scatter,
)
from xsake.backends.hopper.layouts import THREADS
from xsake.block_mask.lists import Lists, transposed

MAX_ROW_BLOCKS = 384  # the most for which `units` of 128 columns fits in shared memory


def transpose_lists(lists: Lists, kv_blocks: int, interpret: Any = False) -> Lists:
    """The same blocks by kv block: the row blocks that visit it, full ones first.

    The capacity of the lists stays the same. A CTA has 128 columns (kv blocks) of one head, a lane
    each. See `transpose_columns`.
    """
    batch, heads, row_blocks = lists.kv_count.shape
    if interpret or row_blocks > MAX_ROW_BLOCKS:
        return transposed(lists, kv_blocks)
    shapes = [(batch, heads, kv_blocks)] * 3 + [lists.kv_index.shape]

    def body(*refs, **smem):
        operands, (*named, indices) = refs[:4], refs[4:]

        def write(column, start, count, full):
            head = lax.axis_index("head")
            at = jnp.where(column < kv_blocks, head * kv_blocks + column, -1)
            for x, value in zip(named, (start, count, full), strict=True):
                scatter(x, at, value)

        head, part = lax.axis_index("head"), lax.axis_index("part")
        transpose_columns(head, part, operands, indices, lists, kv_blocks, write, **smem)

    results = launch(
        body,
        "xsake_lists_by_column",
        [jax.ShapeDtypeStruct((int(np.prod(shape)),), jnp.int32) for shape in shapes],
        dict(head=batch * heads, part=pl.cdiv(kv_blocks, THREADS)),
        [x.reshape(-1) for x in lists[:4]],
        **transpose_smem(row_blocks),
    )
    arrays = (x.reshape(shape) for x, shape in zip(results, shapes, strict=True))
    return Lists._make([*arrays, lists.overflow])


def transpose_smem(row_blocks: int) -> dict[str, Any]:
    """The shared memory of a CTA that transposes lists."""
    return dict(
        units=plgpu.SMEM((pl.cdiv(row_blocks, UNROLL) * UNROLL * THREADS,), jnp.int32),
        shared=plgpu.SMEM((THREADS,), jnp.int32),
    )


def transpose_columns(
    head,
    part,
    operands,
    indices,
    lists,
    kv_blocks,
    write,
    *,
    units,
    shared,
    count_rows=None,
    writes_entries=True,
):
    """Transposes columns 128 · part … 128 · part + 127 of one head, a lane each.

    In shared memory,

        units[i, j] = 1 if row block i lists column j as full, 2^16 if as partial, else 0

    The sum of units[:i, j] is the rank of row block i in column j's list: among the full entries in
    its low 16 bits, among the partial ones in its high bits. The entries go to `indices`;
    write(column, start, count, full) gets every lane's list. count_rows(row, count), if given, gets
    the visits of every row block, 128 at a time. writes_entries: otherwise another CTA writes the
    same entries.
    """
    row_blocks, capacity = lists.kv_count.shape[-1], lists.kv_index.shape[-1]
    first = part * THREADS
    lane = lane_index()
    head_offset = head * capacity
    before, live = _mark(lane, first, head, head_offset, operands, lists, units, count_rows)

    def for_each_row(step):
        """state = step(row, its units, state); rows past the last one are empty."""

        def several(rows, state):
            loaded = [plgpu.load(_units_of(units, row), layout=LANES) for row in rows]
            for row, unit in zip(rows, loaded, strict=True):
                state = step(row, unit, state)
            return state

        return for_each(row_blocks, several, every_lane(0))

    both = for_each_row(lambda row, unit, sums: sums + unit)
    full_count = both & 0xFFFF
    column_count = full_count + (both >> 16)
    shared[...] = column_count
    plgpu.commit_smem()

    def add_left(others, start):
        loaded = [shared[other] for other in others]
        for other, entries in zip(others, loaded, strict=True):
            start += jnp.where(other < lane, entries, 0)
        return start

    column_start = for_each(THREADS, add_left, every_lane(0) + before.sum())

    def write_row(row, unit, above):
        rank = jnp.where(unit == 1, above & 0xFFFF, full_count + (above >> 16))
        at = jnp.where(unit > 0, head_offset + column_start + rank, -1)
        scatter(indices, at, every_lane(0) + row)
        return above + unit

    @pl.when(writes_entries)
    def _():
        for_each_row(write_row)

    write(first + lane, column_start, column_count, full_count)

    # Entries past the lists are never read, but must be valid indices.
    @pl.when(writes_entries & (first + THREADS >= kv_blocks))
    def _():
        used = live.sum()

        @pl.loop(lax.div(used, THREADS), pl.cdiv(capacity, THREADS))
        def _(part):
            at = part * THREADS + lane
            unused = (at >= used) & (at < capacity)
            scatter(indices, jnp.where(unused, head_offset + at, -1), every_lane(0))


def _units_of(units, row):
    return units.at[pl.ds(row * THREADS, THREADS)]


def _mark(lane, first, head, head_offset, operands, lists, units, count_rows):
    """Fills units for the columns from `first`.

    Returns each lane's share of two counts, which the caller sums over lanes: the entries of
    columns before `first`, and all entries.
    """
    start, count, full, index = operands
    row_blocks, capacity = lists.kv_count.shape[-1], lists.kv_index.shape[-1]

    def clear(rows, state):
        for row in rows:
            _units_of(units, row)[...] = every_lane(0)
        return state

    for_each(row_blocks, clear, None)
    plgpu.commit_smem()
    before = every_lane(0)
    live = every_lane(0)
    for row in (lane + part for part in range(0, row_blocks, THREADS)):
        at = head * row_blocks + jnp.minimum(row, row_blocks - 1)
        its_start, its_count, its_full = (gather(x, at) for x in (start, count, full))
        its_count = jnp.where(row < row_blocks, its_count, 0)
        live += its_count
        if count_rows is not None:
            count_rows(row, its_count)

        def mark(rank, entry, valid, before, row=row, full=its_full):
            column = entry - first
            here = valid & (column >= 0) & (column < THREADS)
            unit = jnp.where(rank < full, 1, 1 << 16)
            scatter(units, jnp.where(here, row * THREADS + column, -1), unit)
            return before + jnp.where(valid & (column < 0), 1, 0)

        before = for_each_entry(index, head_offset, its_start, its_count, capacity, mark, before)
    plgpu.commit_smem()
    return before, live
