"""Lists of blocks: how kv_start, kv_count, full_count and kv_index are built and read.

Every function is pure, runs under jit and has static sizes; `capacity` is M, kv_index's length.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import _jax
from xsake.masks.integers import integers
from xsake.masks.rule import EVERYTHING, Grid, Rule, Spans, Tokens

MOST_SUMMED = 1 << 22  # additions in place of a cumulative sum: some microseconds of a GPU


class Lists(NamedTuple):
    """The arrays of a BlockMask, each with leading axes [B|1, N|K|1]."""

    kv_start: Array
    kv_count: Array
    full_count: Array
    kv_index: Array
    overflow: Array | None  # None: no list can have been cut


@jax.jit
def cut_to_capacity(lists: Lists) -> Lists:
    """Cuts every list at the end of kv_index: after an overflow nothing is read outside it."""
    space = jnp.maximum(lists.kv_index.shape[-1] - lists.kv_start, 0)
    count = jnp.minimum(lists.kv_count, space)
    return lists._replace(kv_count=count, full_count=jnp.minimum(lists.full_count, count))


def starts_of(count: Array | np.ndarray, xp: Any = jnp) -> Any:
    """Where each list begins when lists of these lengths are concatenated."""
    return xp.cumsum(count, axis=-1, dtype=jnp.int32) - count


@functools.partial(jax.jit, static_argnums=(1, 2))
@jax.named_scope("block_lists")
def lists_of_rule(rule: Rule, grid: Grid, capacity: int) -> Lists:
    """Lists of all blocks in which the rule may allow a token pair."""
    spans = rule.spans(grid)
    if spans is not None:
        return lists_from_spans(spans, grid, capacity)
    return lists_from_map(*rule.classify(grid), grid, capacity)


@functools.partial(jax.jit, static_argnums=(2, 3))
@jax.named_scope("block_lists")
def lists_of_blocks(blocks: Array, rule: Rule, grid: Grid, capacity: int) -> Lists:
    """The blocks marked True [B, N, nq, nk], without those that the rule empties."""
    live, full = rule.classify(grid)
    return lists_from_map(blocks & live, blocks & full, grid, capacity)


@functools.partial(jax.jit, static_argnums=(2,))
@jax.named_scope("block_lists")
def narrowed(lists: Lists, rule: Rule, grid: Grid) -> Lists:
    """The lists without the blocks that the rule empties, for the grid's batch and heads; M stays.

    Lists of one head serve all of them.
    """

    def widened(x: Array) -> Array:
        return jnp.broadcast_to(x, (grid.batch, grid.heads, *x.shape[2:]))

    wide = Lists._make([*map(widened, lists[:4]), lists.overflow])
    rows, columns, full, live = entries_of(wide)
    rule_live, rule_full = classes_at(rule, grid, rows, columns)
    capacity = lists.kv_index.shape[-1]
    packed = pack(rows, columns, full & rule_full, live & rule_live, grid.counts[0], capacity)
    return packed._replace(overflow=lists.overflow)


@functools.partial(jax.jit, static_argnums=(1,))
@jax.named_scope("block_lists")
def transposed(lists: Lists, n_columns: int) -> Lists:
    """The transposed lists: the row blocks that visit each kv block. M stays."""
    capacity, n_rows = lists.kv_index.shape[-1], lists.kv_count.shape[-1]
    if n_rows < 1 << 15 and n_rows * n_columns <= 16 * capacity:
        one = functools.partial(transposed_by_counting, n_columns=n_columns)
        return Lists._make([*jax.vmap(jax.vmap(one))(*lists[:4]), lists.overflow])
    rows, columns, full, live = entries_of(lists)
    packed = pack(columns, rows, full, live, n_columns, capacity)
    return packed._replace(overflow=lists.overflow)


def transposed_by_counting(
    start: Array, count: Array, full: Array, index: Array, n_columns: int
) -> tuple[Array, Array, Array, Array]:
    """One head's transposed lists, by a cumulative sum over an nq x nk array instead of a sort.

    Lists (start, count, full [nq], index [M]) of distinct blocks become those of nk columns.
    """
    rank = jnp.arange(n_columns, dtype=jnp.int32)[None]
    column = index.at[start[:, None] + rank].get(mode="clip")
    column = jnp.where(rank < count[:, None], column, n_columns)  # dropped
    # one int32 counts full blocks in its lower 16 bits and partial ones in its upper 16
    unit = jnp.where(rank < full[:, None], 1, 1 << 16)
    row = jnp.broadcast_to(jnp.arange(column.shape[0], dtype=jnp.int32)[:, None], column.shape)
    units = jnp.zeros(column.shape, jnp.int32).at[row, column].set(unit, mode="drop")
    seen = jnp.cumsum(units, axis=0)
    full_count, partial_count = seen[-1] & 0xFFFF, seen[-1] >> 16
    by_column = starts_of(full_count + partial_count)
    before = seen - units
    rank = jnp.where(units == 1, before & 0xFFFF, full_count[None] + (before >> 16))
    offset = jnp.where(units > 0, by_column[None] + rank, index.shape[0])  # dropped
    rows = jnp.zeros_like(index).at[offset].set(row, mode="drop")
    return by_column, full_count + partial_count, full_count, rows


@functools.partial(jax.jit, static_argnums=(1, 2))
def block_map(lists: Lists, nq: int, nk: int) -> Array:
    """Every block's class, int8 [B|1, N|K|1, nq, nk]: 0 empty, 1 partial, 2 full."""

    def one(rows: Array, columns: Array, full: Array, live: Array) -> Array:
        at = jnp.where(live, rows * nk + columns, nq * nk)
        flat = jnp.zeros(nq * nk, jnp.int8).at[at].max(jnp.int8(1) + full, mode="drop")
        return flat.reshape(nq, nk)

    return jax.vmap(jax.vmap(one))(*entries_of(lists))


@functools.partial(jax.jit, static_argnums=(2,))
def token_map(lists: Lists | None, rule: Rule | None, grid: Grid) -> Array:
    """Every token pair, bool [B|1, N|1, T, S], for the grid's batch and heads.

    Without lists, the rule alone decides.
    """
    (T, S), (bq, bk) = grid.shape, grid.block
    index = jnp.ogrid[: grid.batch, : grid.heads, :T, :S]
    if lists is None:
        allowed = (EVERYTHING if rule is None else rule).allows(Tokens.at(*index))
        lead = np.broadcast_shapes(allowed.shape, (1, 1, T, S))[:2]
        return jnp.broadcast_to(allowed, (*lead, T, S))
    classes = block_map(lists, *grid.counts)
    if (own := classes.shape[1]) not in (1, grid.heads):
        classes = jnp.repeat(classes, grid.heads // own, axis=1)
    tokens = jnp.repeat(jnp.repeat(classes, bq, axis=2), bk, axis=3)[:, :, :T, :S]
    if rule is None:
        return tokens > 0
    return (tokens == 2) | (tokens == 1) & rule.allows(Tokens.at(*index))


@functools.partial(jax.jit, static_argnums=(2,))
def density_against(kv_count: Array, rule: Rule, grid: Grid) -> Array:
    """Blocks listed ÷ blocks of the grid that a rule allows."""
    if (spans := rule.spans(grid)) is not None:
        live = spans.live_counts(grid.counts[1]).sum()
        allowed: Any = np.float32(live * grid.batch * grid.heads)
    else:
        size = (grid.batch, grid.heads, *grid.counts)
        allowed = jnp.broadcast_to(rule.classify(grid)[0], size).sum(dtype=jnp.float32)
    return kv_count.astype(jnp.float32).sum() / allowed


@functools.partial(jax.jit, static_argnums=(1, 2))
def repacked(lists: Lists, grid: Grid, capacity: int) -> Lists:
    """Lists in any order, shared by rows or not, as lists of their own, row after row."""
    classes = classes_in_any_order(lists, grid.counts[1])
    packed = lists_from_map(classes > 0, classes == 2, grid, capacity)
    return packed._replace(overflow=lists.overflow)


def classes_in_any_order(lists: Lists, nk: int) -> Array:
    """`block_map` of lists in any order, shared by rows or not."""
    rank = jnp.arange(nk, dtype=jnp.int32)

    def one(start: Array, count: Array, full: Array, index: Array) -> Array:
        offset = start[:, None] + rank[None]
        column = index.at[offset].get(mode="fill", fill_value=nk)
        listed = (rank[None] < count[:, None]) & (offset >= 0) & (column >= 0)
        row = jnp.arange(start.shape[0], dtype=jnp.int32)[:, None]
        kind = jnp.where(rank[None] < full[:, None], 2, 1).astype(jnp.int8)
        # a block that a row lists twice is visited once
        empty = jnp.zeros((start.shape[0], nk), jnp.int8)
        return empty.at[row, jnp.where(listed, column, nk)].max(kind, mode="drop")

    return jax.vmap(jax.vmap(one))(*lists[:4])


def both(one: Lists, two: Lists, grid: Grid) -> Lists:
    """The blocks that two masks of the grid's batch and heads list, full where both are full."""

    def classes(lists: Lists) -> Array:
        found = block_map(lists, *grid.counts)
        return jnp.repeat(found, grid.heads // found.shape[1], axis=1)

    live = jnp.minimum(classes(one), classes(two))
    capacity = min(one.kv_index.shape[-1], two.kv_index.shape[-1])
    flags = [x.overflow for x in (one, two) if x.overflow is not None]
    packed = lists_from_map(live > 0, live == 2, grid, capacity)
    overflow = functools.reduce(jnp.logical_or, flags) if flags else None
    return packed._replace(overflow=overflow)


def lists_from_spans(spans: Spans, grid: Grid, capacity: int, xp: Any = jnp) -> Lists:
    """Lists of a rule whose live blocks are contiguous in every row: O(M), no nq x nk array.

    xp: jax.numpy, or NumPy for spans of NumPy arrays.
    """
    nk = grid.counts[1]
    lo, hi, full_lo, full_hi = (xp.clip(x, 0, nk).astype(jnp.int32) for x in spans)
    hi = xp.maximum(hi, lo)
    full_hi = xp.minimum(full_hi, min(grid.shape[1] // grid.block[1], nk))  # past S: partial
    full_lo, full_hi = xp.maximum(full_lo, lo), xp.minimum(full_hi, hi)
    none = full_hi <= full_lo
    full_lo, full_hi = xp.where(none, lo, full_lo), xp.where(none, lo, full_hi)
    count, full = hi - lo, full_hi - full_lo
    start = starts_of(count, xp)

    rows = rows_of_entries(start, capacity, xp)
    rank = xp.arange(capacity, dtype=jnp.int32) - start[rows]
    # the rank among the partial blocks: first those left of the full ones, then those right
    behind = rank - full[rows]
    left = full_lo[rows] - lo[rows]
    partial = xp.where(behind < left, lo[rows] + behind, full_hi[rows] + behind - left)
    index = xp.where(behind < 0, full_lo[rows] + rank, partial)
    index = xp.clip(index, 0, nk - 1)  # the tail is never read, but stays a valid block number
    overflow = start[-1] + count[-1] > capacity
    lead = (x[None, None] for x in (start, count, full, index))
    return Lists._make([*lead, overflow])


def lists_from_map(live: Array, full: Array, grid: Grid, capacity: int) -> Lists:
    """Lists from every block's class, [B|1, N|1, nq, nk]; sums of those before give the offsets."""
    nq, nk = grid.counts
    lead = np.broadcast_shapes(live.shape, full.shape)[:2]
    live, full = (jnp.broadcast_to(x, (*lead, nq, nk)) for x in (live, full))
    whole = jnp.arange(nk) < grid.shape[1] // grid.block[1]  # a block past S is partial
    full = full & live & whole[None, None, None]
    full_count, partial_count, before = _counted(full, live & ~full)
    count = full_count + partial_count
    start = _sum_before(count)
    rank = jnp.where(full, before[0], full_count[..., None] + before[1])
    offset = jnp.where(live, start[..., None] + rank, capacity)  # dropped

    def one(offset: Array) -> Array:
        blocks = jnp.broadcast_to(jnp.arange(nk, dtype=jnp.int32), (nq, nk))
        return (
            jnp.zeros(capacity, jnp.int32).at[offset].set(blocks, mode="drop", unique_indices=False)
        )

    index = jax.vmap(jax.vmap(one))(offset)
    overflow = jnp.any(start[..., -1] + count[..., -1] > capacity)
    return Lists(start, count, full_count, index, overflow)


def lists_of_classes(classes: Array | np.ndarray, grid: Grid) -> Lists:
    """Lists from classes, [B|1, N|1, nq, nk]: 0 empty, 1 partial, 2 full.

    Those of a NumPy array are constants, also under jit.
    """
    if not isinstance(classes, np.ndarray):
        nq, nk = grid.counts
        return lists_from_map(classes > 0, classes == 2, grid, nq * nk)
    *arrays, _ = known_lists(classes, grid)
    return Lists._make([*map(jnp.asarray, arrays), None])


def known_lists(classes: np.ndarray, grid: Grid) -> Lists:
    """`lists_of_classes` with arrays of NumPy."""
    nk = grid.counts[1]
    whole = np.arange(nk) < grid.shape[1] // grid.block[1]  # a block past S is partial
    classes = np.where(whole, classes, np.minimum(classes, 1))
    count, full_count = ((classes >= kind).sum(-1, dtype=np.int32) for kind in (1, 2))
    columns = np.argsort(2 - classes, axis=-1, kind="stable")  # full, partial, empty
    listed = np.arange(nk) < count[..., None]
    # One more entry, a 0: XLA computes 0, 1, 2, … by a kernel instead of storing a constant.
    index = np.zeros((*classes.shape[:2], count.sum(-1).max() + 1), np.int32)
    for head in np.ndindex(classes.shape[:2]):
        entries = columns[head][listed[head]]
        index[head][: len(entries)] = entries
    return Lists._make([starts_of(count, np), count, full_count, index, None])


def _counted(full: Array, partial: Array) -> tuple[Array, Array, tuple[Array, Array]]:
    """How many of each kind are in every row, and how many of each are before every block.

    A row of fewer than 2¹⁵ blocks takes one sum: full blocks count in the lower 16 bits, partial
    ones in the upper 16.
    """
    full, partial = full.astype(jnp.int32), partial.astype(jnp.int32)
    if full.shape[-1] < 1 << 15:
        unit = full + (partial << 16)
        before = _sum_before(unit)
        last = before[..., -1] + unit[..., -1]
        return last & 0xFFFF, last >> 16, (before & 0xFFFF, before >> 16)
    before_full, before_partial = map(_sum_before, (full, partial))
    return (
        before_full[..., -1] + full[..., -1],
        before_partial[..., -1] + partial[..., -1],
        (before_full, before_partial),
    )


def _sum_before(x: Array) -> Array:
    """The sum of the elements before each one, on the last axis.

    A cumulative sum is several launches on a GPU, and slow ones if it is short. There, each sum is
    computed by itself, in one launch.
    """
    size = x.shape[-1]
    if _jax.platform() != "gpu" or x.size * size > MOST_SUMMED:
        return starts_of(x)
    index = jnp.arange(size)
    return jnp.where(index[:, None] > index, x[..., None, :], 0).sum(-1, dtype=jnp.int32)


def rows_of_entries(start: Array | np.ndarray, entries: int, xp: Any = jnp) -> Any:
    """The row block that each of the first `entries` elements of kv_index belongs to."""
    element = xp.arange(entries, dtype=jnp.int32)
    # Unrolled, the search is one kernel; a loop costs a GPU a launch for each of its steps.
    how = {} if xp is np else {"method": "scan_unrolled"}
    return xp.searchsorted(start, element, side="right", **how).astype(jnp.int32) - 1


@jax.jit
def entries_of(lists: Lists) -> tuple[Array, Array, Array, Array]:
    """(row, column, is_full, is_listed) of every element of kv_index, [B|1, N|K|1, M] each."""

    def one(
        start: Array, count: Array, full: Array, index: Array
    ) -> tuple[Array, Array, Array, Array]:
        rows = rows_of_entries(start, index.shape[0])
        rank = jnp.arange(index.shape[0], dtype=jnp.int32) - start[rows]
        return rows, index, rank < full[rows], rank < count[rows]

    return jax.vmap(jax.vmap(one))(*lists[:4])


def pack(
    major: Array, minor: Array, full: Array, live: Array, n_major: int, capacity: int
) -> Lists:
    """Lists from single entries: a stable sort by row, full blocks first."""

    def one(major: Array, minor: Array, full: Array, live: Array) -> tuple[Array, ...]:
        key = jnp.where(live, 2 * major + ~full, 2 * n_major)
        order = jnp.argsort(key, stable=True)
        zeros = jnp.zeros(n_major, jnp.int32)
        count, full_count = zeros.at[major].add(live), zeros.at[major].add(live & full)
        return starts_of(count), count, full_count, minor[order][:capacity]

    packed = jax.vmap(jax.vmap(one))(major, minor, full, live)
    return Lists._make([*packed, jnp.zeros((), bool)])


def classes_at(rule: Rule, grid: Grid, rows: Array, columns: Array) -> tuple[Array, Array]:
    """(live, full) of single blocks; no nq x nk array where the rule has spans."""
    spans = rule.spans(grid)
    if spans is not None:
        live_lo, live_hi, full_lo, full_hi = (jnp.asarray(x)[rows] for x in spans)
        live, full = ((columns >= live_lo) & (columns < live_hi)), (columns >= full_lo)
        return live, full & (columns < full_hi)
    size = (*rows.shape[:2], *grid.counts)
    b, n = (jnp.arange(d).reshape(-1, *[1] * (2 - axis)) for axis, d in enumerate(rows.shape[:2]))
    return tuple(jnp.broadcast_to(x, size)[b, n, rows, columns] for x in rule.classify(grid))  # type: ignore[return-value]


def flex_blocks(
    counts: Any, indices: Any, nk: int, kind: str, lead: tuple[int, ...] | None = None
) -> Array:
    """FlexAttention's counts [B, H, Tb] and padded lists [B, H, Tb, _] as bool [B, H, Tb, nk].

    kind: "" or "full_", for messages. lead: the [B, H, Tb] that the arrays must have.
    """
    names = f"{kind}kv_num_blocks", f"{kind}kv_indices"
    count, index = (integers(name, x) for name, x in zip(names, (counts, indices), strict=True))
    if index.ndim != 4 or count.shape != index.shape[:3] or lead not in (None, count.shape):
        wanted = "[B, H, Tb]" if lead is None else list(lead)
        raise ValueError(
            f"{names[0]} must be {wanted} and {names[1]} the same with one more axis, "
            f"got {list(count.shape)} and {list(index.shape)}"
        )
    named = jnp.arange(index.shape[-1])[None, None, None] < count[..., None]
    if not any(isinstance(x, jax.core.Tracer) for x in (count, index)):
        listed = np.asarray(index)[np.asarray(named)]
        for name, values, most in (
            (names[0], np.asarray(count), index.shape[-1]),
            (names[1], listed, nk - 1),
        ):
            if values.size and not 0 <= values.min() <= values.max() <= most:
                wrong = values[(values < 0) | (values > most)].flat[0]
                raise ValueError(f"{name} must be from 0 to {most}, got {wrong}")
    numbers = jnp.arange(nk).reshape(1, 1, 1, 1, nk)
    return ((index[..., None] == numbers) & named[..., None]).any(-2)
