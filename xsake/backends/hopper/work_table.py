"""Work tables of the Hopper kernels: one record for each work tile, in the order of computation.

    lists ── work_table ──▶ int32 [work tiles + 1, 8]        records of scheduler.WorkTile

One small kernel replaces several of XLA's: at low densities the time between launches is a
visible part of the whole. A run is a sequence of work tiles that are sorted among themselves. The
last runs, the tail, are sorted together: the work ends with the shortest work tiles of several
heads, and all multiprocessors finish at about the same time. Runs that are too long to sort by
comparison, and the interpreter, use plain JAX. `HeadTables` makes transposed lists and their work
table together, one CTA per head.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake import _jax
from xsake.backends.hopper.lanes import (
    UNROLL,
    add_one,
    div_rem_lanes,
    every_lane,
    for_each,
    for_each_entry,
    gather,
    lane_index,
    launch,
    scatter,
)
from xsake.backends.hopper.layouts import THREADS, div_rem, round_up
from xsake.backends.hopper.scheduler import COUNTER, WorkTile
from xsake.backends.hopper.transpose import MAX_ROW_BLOCKS, transpose_columns, transpose_smem
from xsake.block_mask.lists import Lists

MAX_COMPARED = 4096  # work tiles of a run that is sorted by comparing each with all others
MAX_COUNTED = 1024  # row blocks of the lists of all tail heads: every tail CTA reads them all
TILE_LANES = 4  # lanes that compare one work tile with the others, a quarter of them each
CTA_TILES = THREADS // TILE_LANES
KEYS = 1 << 14  # more than the work tiles that one CTA compares
WIDTH = 8  # integers of a record
COUNT = WorkTile._fields.index("count")
TAIL_TILES = 4  # work tiles per multiprocessor in the tail, at least
HEAD_TAIL_TILES = 2  # the same in `HeadTables` of heads with own lists: a tail CTA reads them all


def work_table(
    lists: Lists,
    B: int,
    N: int,
    K: int,
    kv_bytes: int,
    tiling: Any,
    interpret: Any = False,
    has_tail: bool = True,
    nesting: str = "bni",
) -> Array:
    """The records of all work tiles and an end record: int32 [B * N * blocks + 1, 8].

    nesting: how work tiles are numbered, by batch row, head and block, from the slowest axis to the
    fastest. "natural" keeps that order. "longest" sorts all work tiles by their number of visits,
    so that the last ones to finish are short; among equal ones it keeps the order, too. In the
    nesting "bni" there are two more: "heads" does the same inside the query heads of each kv head,
    "sections" inside groups of kv heads whose K and V (`kv_bytes` each) fit in L2 together. In all
    orders the tail is sorted, unless there is none. The end record has count -1 and the counter of
    the "counter" schedule. Of lists of c batch rows, batch row b has those of row b % c.
    """
    blocks = lists.kv_count.shape[-1]
    tiles = B * N * blocks
    end = _end_record(tiles)
    runs = _Runs.of(tiles, run_length(blocks, B, N, K, kv_bytes, tiling), has_tail)
    # A CTA compares its tiles with those of all runs that they belong to.
    compared = min(CTA_TILES + runs.length + max(runs.length, tiles - runs.tail), tiles)
    if interpret or runs.length > MAX_COMPARED or compared >= KEYS:
        return _table_by_xla(lists, B, N, runs, end, nesting)
    sizes = {"b": B, "n": N, "i": blocks}
    axes = {axis: sizes[axis] for axis in nesting}
    (table,) = launch(
        functools.partial(_rank_tiles, lists=lists, axes=axes, runs=runs, end=end),
        "xsake_work_table",
        [jax.ShapeDtypeStruct(((tiles + 1) * WIDTH,), jnp.int32)],
        dict(part=pl.cdiv(tiles, CTA_TILES)),
        [x.reshape(-1) for x in (lists.kv_start, lists.kv_count, lists.full_count)],
        shared=plgpu.SMEM((round_up(compared, UNROLL * THREADS),), jnp.int32),
        ranks=plgpu.SMEM((THREADS,), jnp.int32),
    )
    return table.reshape(tiles + 1, WIDTH)


def known_table(lists: Lists, B: int, N: int) -> np.ndarray:
    """All work tiles, longest first, of lists whose arrays are NumPy's.

    Batch rows repeat as in `work_table`. The table is a constant of the program, for schedules that
    do not write to it.
    """
    bni = np.indices((B, N, lists.kv_count.shape[-1]), np.int32).reshape(3, -1)
    records = _records(lists, B, N, bni, np)
    order = np.argsort(-records[:, COUNT], kind="stable")
    return np.concatenate([records[order], _end_record(len(records))[None]])


class _Runs(NamedTuple):
    """Which work tiles are sorted among themselves."""

    tiles: int
    length: int  # of every run before the tail
    tail: int  # the first work tile of the tail

    @classmethod
    def of(cls, tiles: int, length: int, has_tail: bool) -> "_Runs":
        """Runs of this length; the tail is whole runs, and the rest after them."""
        wanted = TAIL_TILES * _jax.multiprocessors() if has_tail else 0
        return cls(tiles, length, max(0, tiles - wanted) // length * length)

    def begin(self, tile):
        """The first work tile of a tile's run."""
        of_length = lax.div(tile, jnp.int32(self.length)) * self.length
        return jnp.where(tile < self.tail, of_length, self.tail)

    def end(self, tile):
        """The end of a tile's run."""
        return jnp.where(tile < self.tail, self.begin(tile) + self.length, self.tiles)


def run_length(blocks: int, B: int, N: int, K: int, kv_bytes: int, tiling: Any) -> int:
    """The length of a run: consecutive work tiles that are sorted among themselves."""
    tiles = B * N * blocks
    kv_head_tiles = N // K * blocks
    section = min(max(1, tiling.l2_bytes // kv_bytes) * kv_head_tiles, tiles)
    runs = {"natural": 1, "longest": tiles, "heads": kv_head_tiles, "sections": section}
    if tiling.order not in runs:
        raise ValueError(f"order is {tiling.order!r}; choose one of {sorted(runs)}")
    return runs[tiling.order]


def per_tile(x, B, N, xp: Any = jnp):
    """One value per block of each list, [B|c, N|K|1, blocks], for every work tile, in order.

    Batch row b has those of batch row b % c.
    """
    batch, list_heads, blocks = x.shape
    repeated = xp.repeat(x, N // list_heads, axis=1)
    if 1 < batch < B:
        repeated = xp.tile(repeated, (B // batch, 1, 1))
    return xp.broadcast_to(repeated, (B, N, blocks)).reshape(-1)


def _records(lists: Lists, B: int, N: int, bni: Any, xp: Any = jnp) -> Any:
    """The records of all work tiles, [B * N * blocks, 8]; their b, n and i are given."""
    lead, capacity = lists.kv_index.shape[:2], lists.kv_index.shape[-1]
    offset = xp.arange(lead[0] * lead[1], dtype=np.int32).reshape(*lead, 1) * capacity
    b, n, i = bni
    values = lists.kv_start + offset, lists.kv_count, lists.full_count
    start, count, full = (per_tile(x, B, N, xp) for x in values)
    fields = WorkTile(b, n, i, start, count, full)
    return xp.stack([*fields, *[xp.zeros_like(b)] * (WIDTH - len(fields))], axis=-1)


def _end_record(tiles: int) -> np.ndarray:
    end = np.zeros(WIDTH, np.int32)
    end[COUNT] = -1
    end[COUNTER] = min(_jax.multiprocessors(), tiles)
    return end


def _rank_tiles(start, count, full, table, *, shared, ranks, lists, axes, runs, end):
    """The kernel body: four lanes rank a work tile among all others of its run.

    axes: the sizes of "b", "n" and "i", the slowest first.
    """
    list_batch, list_heads, blocks = lists.kv_count.shape
    tiles = math.prod(axes.values())

    def locate(tile):
        """((b, n, i), the index of its list's head); batch rows and heads may share lists."""
        at = {}
        slowest, *others = axes
        for axis in reversed(others):
            tile, at[axis] = div_rem_lanes(tile, axes[axis])
        at[slowest] = tile
        b, n, i = (at[axis] for axis in "bni")
        list_head, _ = div_rem_lanes(n, axes["n"] // list_heads)
        if list_batch > 1:
            row = b if list_batch == axes["b"] else div_rem_lanes(b, list_batch)[1]
            list_head = row * list_heads + list_head
        return (b, n, i), list_head

    def list_of(tile):
        (_, _, i), list_head = locate(tile)
        return list_head * blocks + i

    first = lax.axis_index("part") * CTA_TILES
    lane = lane_index()
    number, quarter = div_rem_lanes(lane, TILE_LANES)
    tile = jnp.minimum(first + number, tiles - 1)
    (b, n, i), list_head = locate(tile)
    its_start, its_count, its_full = (gather(x, list_of(tile)) for x in (start, count, full))
    last = jnp.minimum(first + (CTA_TILES - 1), tiles - 1)
    begin, end_of_runs = runs.begin(first), runs.end(last)
    its_begin, its_end = runs.begin(tile) - begin, runs.end(tile) - begin

    def key(visits, offset):
        """The larger, the earlier: by visits, then by index; very long lists count as equal."""
        return jnp.minimum(visits, (1 << 31) // KEYS - 1) * KEYS - offset

    def share(parts, state):
        others = [part * THREADS + lane for part in parts]
        visits = [gather(count, list_of(jnp.minimum(begin + x, tiles - 1))) for x in others]
        for part, other, its_visits in zip(parts, others, visits, strict=True):
            shared[pl.ds(part * THREADS, THREADS)] = key(its_visits, other)
        return state

    compared = end_of_runs - begin
    for_each(lax.div(compared + (THREADS - 1), jnp.int32(THREADS)), share, None)
    plgpu.commit_smem()
    own = key(its_count, tile - begin)

    def compare(turns, rank):
        others = [turn * TILE_LANES + quarter for turn in turns]
        keys = [gather(shared, other) for other in others]
        for other, its_key in zip(others, keys, strict=True):
            same_run = (other >= its_begin) & (other < its_end)
            rank += jnp.where((its_key > own) & same_run, 1, 0)
        return rank

    turns = lax.div(compared + (TILE_LANES - 1), jnp.int32(TILE_LANES))
    ranks[...] = for_each(turns, compare, every_lane(0))
    plgpu.commit_smem()
    quarters = (gather(ranks, number * TILE_LANES + x) for x in range(TILE_LANES))
    rank = sum(quarters, runs.begin(tile))
    its_start += list_head * lists.kv_index.shape[-1]
    record = WorkTile(b, n, i, its_start, its_count, its_full)
    _write_records(table, record, rank, (first + number < tiles) & (quarter == 0))

    pl.when(first == 0)(functools.partial(_write_end, table, tiles, end))


def _comes_before(other, other_visits, tile, visits):
    """Whether another work tile is first: it has more visits, or as many and a smaller index."""
    return (other_visits > visits) | ((other_visits == visits) & (other < tile))


def _write_records(table, record, row, valid):
    """Writes every lane's record to its row of the table, in lanes where it is valid."""
    for field, value in enumerate((*record, *[every_lane(0)] * (WIDTH - len(record)))):
        scatter(table, jnp.where(valid, row * WIDTH + field, -1), value)


def _write_end(table, tiles, end):
    """Writes the end record."""
    lane, value = lane_index(), every_lane(0)
    for field in np.flatnonzero(end):
        value = jnp.where(lane == int(field), int(end[field]), value)
    scatter(table, jnp.where(lane < WIDTH, tiles * WIDTH + lane, -1), value)


def _table_by_xla(
    lists: Lists, B: int, N: int, runs: _Runs, end: np.ndarray, nesting: str
) -> Array:
    """The same table by a sort in plain JAX."""
    axes = B, N, lists.kv_count.shape[-1]
    bni = [lax.broadcasted_iota(jnp.int32, axes, axis).reshape(-1) for axis in range(3)]
    table = _records(lists, B, N, bni)
    nested = table.reshape(*axes, WIDTH).transpose(*map("bni".index, nesting), 3)
    table, count = nested.reshape(table.shape), nested[..., COUNT].reshape(-1)
    order = jnp.lexsort((-count, runs.begin(jnp.arange(len(table), dtype=jnp.int32))))
    return jnp.concatenate([table[order], end[None]])


class HeadTables:
    """Transposed lists and their work table, by one CTA for each head.

    Requires at most 128 columns (kv blocks), and an order that sorts work tiles within each head or
    not at all (see `fits`). Each head transposes its lists for its own records; the first one of
    those that share lists writes the entries.

    The work tiles of the last heads (the tail) are sorted together: the work ends with the
    shortest work tiles of several heads, and all multiprocessors finish at about the same time.
    Heads with lists of their own that are not sorted have no tail. There is none, too, where dq is
    cast inside the kernel (`counts`): the row blocks of all tail heads would be complete only at
    the very end.
    """

    def __init__(self, lists: Lists, columns: int, B: int, N: int, run: int, counts: bool):
        self.lists, self.columns, self.is_sorted = lists, columns, run > 1
        self.N, self.heads = N, B * N  # of one batch row, of all
        row_blocks = lists.kv_count.shape[-1]
        self.tiles = self.heads * columns
        self.end = _end_record(self.tiles)
        self.tail = 0 if counts else self._tail_heads(row_blocks)
        self.first_list, self.lists_counted = self._tail_lists(self.tail) if self.tail else (0, 0)
        self.first_tail = self.heads - self.tail
        counters = [self.heads * row_blocks] * counts
        sizes = [lists.kv_index.size, (self.tiles + 1) * WIDTH, *counters]
        self.out_type = tuple(jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes)
        self.smem = transpose_smem(row_blocks)
        if self.tail:
            self.smem["tail"] = plgpu.SMEM((self.lists_counted * columns,), jnp.int32)
        self.operands = tuple(x.reshape(-1) for x in lists[:4])

    @staticmethod
    def fits(lists: Lists, columns: int, run: int) -> bool:
        """Whether one CTA can do all that a head needs."""
        row_blocks = lists.kv_count.shape[-1]
        return run in (1, columns) and columns <= THREADS and row_blocks <= MAX_ROW_BLOCKS

    def _tail_heads(self, row_blocks: int) -> int:
        """How many heads at the end are sorted together."""
        batch, heads, _ = self.lists.kv_count.shape
        own = batch * heads == self.heads
        if own and not self.is_sorted:
            return 0
        wanted = (HEAD_TAIL_TILES if own else TAIL_TILES) * _jax.multiprocessors()
        tail = min(pl.cdiv(wanted, self.columns), self.heads)
        _, lists_counted = self._tail_lists(tail)
        return tail if tail > 1 and lists_counted * row_blocks <= MAX_COUNTED else 0

    def _tail_lists(self, tail: int) -> tuple[int, int]:
        """(the first list, how many from it on) that the last `tail` heads have."""
        heads = range(self.heads - tail, self.heads)
        found = {self._list_of(head, divmod) for head in heads}
        return min(found), max(found) - min(found) + 1

    def _list_of(self, head, divide=div_rem):
        """The index of a head's lists; batch rows and heads may share them."""
        batch, heads, _ = self.lists.kv_count.shape
        if batch == heads == 1:
            return head * 0
        if batch == 1:
            _, head = divide(head, self.N)
        return divide(head, self.N // heads)[0]

    def _writes_lists(self, head):
        """Whether this head is the first one that has its lists."""
        batch, heads, _ = self.lists.kv_count.shape
        is_first = lax.rem(head, jnp.int32(self.N // heads)) == 0
        return is_first & (head < self.N) if batch == 1 else is_first

    def run(self, head, refs, smem):
        """Writes one head's flat transposed index, its records and its row blocks' counters.

        A counter is minus the number of visits of a row block.
        """
        operands, (indices, table, *counters) = refs[:4], refs[4:]
        row_blocks, capacity = self.lists.kv_count.shape[-1], self.lists.kv_index.shape[-1]
        b, n = div_rem(head, self.N)
        list_head = self._list_of(head)

        def write(column, start, count, full):
            b_n = (every_lane(0) + x for x in (b, n))
            record = WorkTile(*b_n, column, list_head * capacity + start, count, full)

            def put(row):
                _write_records(table, record, row, column < self.columns)

            def put_in_head():
                rank = column
                if self.is_sorted:
                    rank = _rank_among(smem["shared"], self.columns, column, count)
                put(head * self.columns + rank)

            if not self.tail:
                put_in_head()
                return
            pl.when(head < self.first_tail)(put_in_head)

            @pl.when(head >= self.first_tail)
            def _():
                self._count_visits(operands, smem["tail"])

                own = (head - self.first_tail) * self.columns + column

                def add_head(tail_head, rank):
                    its_list = self._list_of(self.first_tail + tail_head) - self.first_list
                    visits = smem["tail"].at[pl.ds(its_list * self.columns, self.columns)]
                    own_here = own - tail_head * self.columns
                    return rank + _rank_among(visits, self.columns, own_here, count)

                rank = lax.fori_loop(0, self.tail, add_head, every_lane(0))
                put(self.first_tail * self.columns + rank)

        def count_rows(row, count):
            scatter(counters[0], jnp.where(row < row_blocks, head * row_blocks + row, -1), -count)

        transpose_columns(
            list_head,
            jnp.int32(0),
            operands,
            indices,
            self.lists,
            self.columns,
            write,
            units=smem["units"],
            shared=smem["shared"],
            count_rows=count_rows if counters else None,
            writes_entries=self._writes_lists(head),
        )
        pl.when(head == 0)(functools.partial(_write_end, table, self.tiles, self.end))

    def _count_visits(self, operands, visits):
        """The visits of all columns of the tail's lists, to shared memory.

        A lane reads one row block's list at a time.
        """
        start, count, _full, index = operands
        row_blocks, capacity = self.lists.kv_count.shape[-1], self.lists.kv_index.shape[-1]
        all_columns, all_rows = (self.lists_counted * x for x in (self.columns, row_blocks))
        lane = lane_index()

        @pl.loop(0, pl.cdiv(all_columns, THREADS))
        def _(part):
            at = part * THREADS + lane
            scatter(visits, jnp.where(at < all_columns, at, -1), every_lane(0))

        plgpu.commit_smem()

        @pl.loop(0, pl.cdiv(all_rows, THREADS))
        def _(part):
            row = part * THREADS + lane
            valid, row = row < all_rows, jnp.minimum(row, all_rows - 1)
            its_list = lax.div(row, jnp.int32(row_blocks))
            at = self.first_list * row_blocks + row
            its_start, its_count = (gather(x, at) for x in (start, count))
            its_count = jnp.where(valid, its_count, 0)
            head_offset = (self.first_list + its_list) * capacity

            def add(_, entry, valid, state):
                add_one(visits, jnp.where(valid, its_list * self.columns + entry, -1))
                return state

            for_each_entry(index, head_offset, its_start, its_count, capacity, add, None)

        plgpu.commit_smem()


def _rank_among(visits, columns, own, count):
    """How many of these columns come before every lane's, which has `count` visits.

    own: its number, which may be that of a column before or after these.
    """

    def compare(others, rank):
        loaded = [visits[jnp.minimum(other, columns - 1)] for other in others]
        for other, other_visits in zip(others, loaded, strict=True):
            earlier = _comes_before(other, other_visits, own, count)
            rank += jnp.where(earlier & (other < columns), 1, 0)
        return rank

    return for_each(columns, compare, every_lane(0))
