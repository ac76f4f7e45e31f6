"""What the Hopper kernels read beside q, k and v: lists by column, and tables of work.

Each is made on the device by one small kernel where XLA takes several: at low densities the time
between their launches is a visible part of the whole.

    lists by row ── lists_by_column ──▶ lists by column       the backward visits row blocks
    lists ── work_table ──▶ int32 [items + 1, 8]              one row per work item, in their order

The kernels are written by lanes: every thread of one warpgroup has its own row, column or item. The
interpreter has no loads and stores by lane; it takes the same from plain JAX, and so do lists that
are too long for shared memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf, vector

from xsake import _jax
from xsake.backends.hopper.items import COUNTER, THREADS, Item, per_item, split
from xsake.backends.hopper.ptx import asm, shared
from xsake.block_mask.lists import Lists, transposed

MOST_ROWS = 384  # rows of blocks whose columns fit into shared memory, 128 at a time
MOST_COMPARED = 4096  # items that are sorted together by comparing each with all others
MOST_COUNTED = 1024  # rows of blocks of the last heads, which the CTA of each of them runs through
AT_ONCE = 16  # loads that are asked for together
WIDTH = 8  # integers of a row of a work table
LATE = 2  # items of every SM with which the work ends, sorted together

LANES = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)  # one value per thread


# -------------------------------------------------------------------------------- lists by column


def lists_by_column(lists: Lists, columns: int, interpret: Any = False) -> Lists:
    """The same blocks by kv block: the row blocks that visit it, full ones first. Keeps M.

    A CTA has 128 columns of one head. It marks in shared memory, row by row,

        units[i, j] = 1 if row i lists column j as full, 2^16 if as partial, else 0

    whose sums down to row i are the places in both parts of the column's list.
    """
    batch, heads, rows = lists.kv_count.shape
    if interpret or rows > MOST_ROWS:
        return transposed(lists, columns)
    shapes = [(batch, heads, columns)] * 3 + [lists.kv_index.shape]

    def body(*refs, **smem):
        operands, (*named, indices) = refs[:4], refs[4:]

        def write(column, start, count, full):
            head = lax.axis_index("head")
            place = jnp.where(column < columns, head * columns + column, -1)
            for x, value in zip(named, (start, count, full), strict=True):
                _scatter(x, place, value)

        head, part = lax.axis_index("head"), lax.axis_index("part")
        _turn(head, part, operands, indices, lists, columns, write, **smem)

    made = _launch(
        body,
        "xsake_lists_by_column",
        [jax.ShapeDtypeStruct((int(np.prod(shape)),), jnp.int32) for shape in shapes],
        dict(head=batch * heads, part=pl.cdiv(columns, THREADS)),
        [x.reshape(-1) for x in lists[:4]],
        **turn_smem(rows),
    )
    turned = (x.reshape(shape) for x, shape in zip(made, shapes, strict=True))
    return Lists._make([*turned, lists.overflow])


def turn_smem(rows: int) -> dict[str, Any]:
    """Shared memory of a CTA that turns lists."""
    return dict(
        units=plgpu.SMEM((pl.cdiv(rows, AT_ONCE) * AT_ONCE * THREADS,), jnp.int32),
        shared=plgpu.SMEM((THREADS,), jnp.int32),
    )


def _turn(head, part, operands, indices, lists, columns, write, *, units, shared, count_rows=None):
    """Columns 128 · part and those behind it of one head, a lane each.

    write(column, start, count, full) gets every lane's list, whose entries go to `indices`; and
    count_rows(row, count) the visits of every row, 128 at a time, if it is there.
    """
    start, count, full, index = operands
    rows, capacity = lists.kv_count.shape[-1], lists.kv_index.shape[-1]
    first = part * THREADS
    lane = _lanes()
    list_of_head = head * capacity

    def units_of(row):
        return units.at[pl.ds(row * THREADS, THREADS)]

    def clear(rows, state):
        for row in rows:
            units_of(row)[...] = _every_lane(0)
        return state

    _for_each(rows, clear, None)
    plgpu.commit_smem()
    before = _every_lane(0)  # entries of columns left of these
    live = _every_lane(0)
    for row in (lane + part for part in range(0, rows, THREADS)):
        of_row = head * rows + jnp.minimum(row, rows - 1)
        its_start, its_count, its_full = (_gather(x, of_row) for x in (start, count, full))
        its_count = jnp.where(row < rows, its_count, 0)
        live += its_count
        if count_rows is not None:
            count_rows(row, its_count)

        def mark(rank, name, there, before, row=row, full=its_full):
            column = name - first
            here = there & (column >= 0) & (column < THREADS)
            unit = jnp.where(rank < full, 1, 1 << 16)
            _scatter(units, jnp.where(here, row * THREADS + column, -1), unit)
            return before + jnp.where(there & (column < 0), 1, 0)

        before = _for_each_entry(index, list_of_head, its_start, its_count, capacity, mark, before)
    plgpu.commit_smem()

    def for_each_row(step):
        """state = step(row, its units, state); the last rows may be past the end, and are empty."""

        def several(rows, state):
            loaded = [plgpu.load(units_of(row), layout=LANES) for row in rows]
            for row, unit in zip(rows, loaded, strict=True):
                state = step(row, unit, state)
            return state

        return _for_each(rows, several, _every_lane(0))

    both = for_each_row(lambda row, unit, sums: sums + unit)
    full_count = both & 0xFFFF
    column_count = full_count + (both >> 16)
    shared[...] = column_count
    plgpu.commit_smem()

    def add_left(others, place):
        loaded = [shared[other] for other in others]
        for other, entries in zip(others, loaded, strict=True):
            place += jnp.where(other < lane, entries, 0)
        return place

    column_start = _for_each(THREADS, add_left, _every_lane(0) + before.sum())

    def place_row(row, unit, above):
        rank = jnp.where(unit == 1, above & 0xFFFF, full_count + (above >> 16))
        place = jnp.where(unit > 0, list_of_head + column_start + rank, -1)
        _scatter(indices, place, _every_lane(0) + row)
        return above + unit

    for_each_row(place_row)
    write(first + lane, column_start, column_count, full_count)

    # What no list reaches is never read, but stays a legal number.
    @pl.when(first + THREADS >= columns)
    def _():
        used = live.sum()

        @pl.loop(lax.div(used, THREADS), pl.cdiv(capacity, THREADS))
        def _(part):
            place = part * THREADS + lane
            unused = (place >= used) & (place < capacity)
            _scatter(indices, jnp.where(unused, list_of_head + place, -1), _every_lane(0))


# ------------------------------------------------------------------------------------ work tables


def work_table(
    lists: Lists,
    batch: int,
    heads: int,
    kv_heads: int,
    kv_bytes: int,
    tiling: Any,
    interpret: Any = False,
) -> Array:
    """One row per work item, in the order they are taken: int32 [B*N*Tb + 1, 8].

    "natural" leaves them as they are. "longest" sorts all items by their number of visits, so the
    last ones to finish are short. "heads" does the same inside the query heads of each kv head,
    "sections" inside groups of those whose K and V (`kv_bytes` per kv head) fit in L2 together. A
    row is an Item; the last row ends the work (see Work), with the number of the first item that is
    not given out already.
    """
    items = batch * heads * lists.kv_count.shape[-1]
    end = _last_row(items, tiling)
    blocks = lists.kv_count.shape[-1]
    run = sorted_together(blocks, batch, heads, kv_heads, kv_bytes, tiling)
    if interpret or run > MOST_COMPARED:
        return _sorted_table(lists, batch, heads, run, end)
    (table,) = _launch(
        functools.partial(_place, lists=lists, batch=batch, heads=heads, run=run, end=end),
        "xsake_work_table",
        [jax.ShapeDtypeStruct(((items + 1) * WIDTH,), jnp.int32)],
        dict(part=pl.cdiv(items, THREADS)),
        [x.reshape(-1) for x in (lists.kv_start, lists.kv_count, lists.full_count)],
        # the visits of the lanes' items and of what their first and last run have besides
        shared=plgpu.SMEM((pl.cdiv(min(THREADS + 2 * run, items), THREADS) * THREADS,), jnp.int32),
    )
    return table.reshape(items + 1, WIDTH)


def _last_row(items: int, tiling: Any) -> np.ndarray:
    end = np.zeros(WIDTH, np.int32)
    end[Item._fields.index("count")] = -1
    end[COUNTER] = min(_jax.multiprocessors(), items)
    return end


def sorted_together(
    blocks: int, batch: int, heads: int, kv_heads: int, kv_bytes: int, tiling: Any
) -> int:
    """Items of a run: those that work_table sorts together."""
    items = batch * heads * blocks
    of_kv_head = heads // kv_heads * blocks
    together = min(max(1, tiling.l2_bytes // kv_bytes) * of_kv_head, items)
    runs = {"natural": 1, "longest": items, "heads": of_kv_head, "sections": together}
    if tiling.order not in runs:
        raise ValueError(f"order is {tiling.order!r}; choose one of {sorted(runs)}")
    return runs[tiling.order]


def _place(start, count, full, table, *, shared, lists, batch, heads, run, end):
    """Every lane finds the place of its item by comparing it with all others of its run."""
    list_batch, list_heads, blocks = lists.kv_count.shape
    items = batch * heads * blocks

    def where(item):
        """(b, n, i), and which list of a head that is; batch rows and runs of heads may share."""
        head, i = split(item, blocks)
        b, n = split(head, heads)
        own = lax.div(n, jnp.int32(heads // list_heads))
        return (b, n, i), own if list_batch == 1 else b * list_heads + own

    def list_of(item):
        (_, _, i), of_head = where(item)
        return of_head * blocks + i

    first = lax.axis_index("part") * THREADS
    lane = _lanes()
    item = jnp.minimum(first + lane, items - 1)
    (b, n, i), of_head = where(item)
    its_start, its_count, its_full = (_gather(x, list_of(item)) for x in (start, count, full))
    rank = item
    if run > 1:
        last = jnp.minimum(first + (THREADS - 1), items - 1)
        begin = lax.div(first, jnp.int32(run)) * run
        end_of_runs = jnp.minimum((lax.div(last, jnp.int32(run)) + 1) * run, items)
        its_run = lax.div(item, jnp.int32(run))

        @pl.loop(0, lax.div(end_of_runs - begin + (THREADS - 1), jnp.int32(THREADS)))
        def _(part):
            other = jnp.minimum(begin + part * THREADS + lane, items - 1)
            shared[pl.ds(part * THREADS, THREADS)] = _gather(count, list_of(other))

        plgpu.commit_smem()

        def compare(numbers, rank):
            others = [begin + number for number in numbers]
            counts = [shared[number] for number in numbers]
            for other, other_count in zip(others, counts, strict=True):
                earlier = _comes_before(other, other_count, item, its_count)
                same = (lax.div(other, jnp.int32(run)) == its_run) & (other < end_of_runs)
                rank += jnp.where(earlier & same, 1, 0)
            return rank

        rank = _for_each(end_of_runs - begin, compare, its_run * run)
    its_start += of_head * lists.kv_index.shape[-1]
    its_row = Item(b, n, i, its_start, its_count, its_full)
    _write(table, its_row, rank, first + lane < items)

    pl.when(first == 0)(functools.partial(_end, table, items, end))


def _comes_before(other, other_visits, item, visits):
    """Whether another item is taken first: it has more visits, or as many and a smaller number."""
    return (other_visits > visits) | ((other_visits == visits) & (other < item))


def _write(table, item, row, there):
    """Every lane's item to its row of the table, where it is one."""
    for field, value in enumerate((*item, *[_every_lane(0)] * (WIDTH - len(item)))):
        _scatter(table, jnp.where(there, row * WIDTH + field, -1), value)


def _end(table, items, end):
    """The last row of a table."""
    lane, value = _lanes(), _every_lane(0)
    for field in np.flatnonzero(end):
        value = jnp.where(lane == int(field), int(end[field]), value)
    _scatter(table, jnp.where(lane < WIDTH, items * WIDTH + lane, -1), value)


def _sorted_table(lists: Lists, batch: int, heads: int, run: int, end: np.ndarray) -> Array:
    """The same by sorting."""
    each = functools.partial(per_item, batch=batch, heads=heads)
    blocks = lists.kv_count.shape[-1]
    lead, capacity = lists.kv_index.shape[:2], lists.kv_index.shape[-1]
    offset = jnp.arange(lead[0] * lead[1], dtype=jnp.int32).reshape(*lead, 1) * capacity
    b, n, i = (
        lax.broadcasted_iota(jnp.int32, (batch, heads, blocks), axis).reshape(-1)
        for axis in range(3)
    )
    count = each(lists.kv_count)
    item = Item(b, n, i, each(lists.kv_start + offset), count, each(lists.full_count))
    table = jnp.stack([*item, *[jnp.zeros_like(b)] * (WIDTH - len(item))], axis=-1)
    if run > 1:
        table = table[jnp.lexsort((-count, jnp.arange(b.size) // run))]
    return jnp.concatenate([table, end[None]])


# -------------------------------------------------------------------------- both, a head at a time


class ByHead:
    """Lists by column and the table of their work, by one CTA for each head.

    Where it `fits`: every head has its own lists, no more columns than lanes, and its columns are
    sorted for themselves (a run) or not at all.

    If they are, those of the last heads are sorted together: the work ends with the shortest items
    of several heads, and all SMs at about the same time. Not where dq is cast inside the kernel
    (`counts`): the row blocks of all these heads would be complete only at the end.
    """

    def __init__(self, lists: Lists, columns: int, run: int, tiling: Any, counts: bool):
        self.lists, self.columns, self.is_sorted = lists, columns, run > 1
        batch, self.heads, rows = lists.kv_count.shape
        self.all_heads = batch * self.heads
        self.items = self.all_heads * columns
        self.end = _last_row(self.items, tiling)
        self.late = 0 if counts else self.late_heads(rows, tiling)
        self.first_late = self.all_heads - self.late
        sizes = [lists.kv_index.size, (self.items + 1) * WIDTH, *[self.all_heads * rows] * counts]
        self.out_type = tuple(jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes)
        self.smem = turn_smem(rows)
        if self.late:
            self.smem["late"] = plgpu.SMEM((self.late * columns,), jnp.int32)
        self.operands = tuple(x.reshape(-1) for x in lists[:4])

    @staticmethod
    def fits(lists: Lists, columns: int, batch: int, heads: int, run: int) -> bool:
        """Whether one CTA has all that it needs of a head."""
        rows = lists.kv_count.shape[-1]
        own = lists.kv_count.shape[:2] == (batch, heads)
        return own and run in (1, columns) and columns <= THREADS and rows <= MOST_ROWS

    def late_heads(self, rows: int, tiling: Any) -> int:
        """How many heads at the end are sorted together."""
        late = min(pl.cdiv(LATE * _jax.multiprocessors(), self.columns), self.all_heads)
        return late if self.is_sorted and late > 1 and late * rows <= MOST_COUNTED else 0

    def count_late(self, operands, visits):
        """The visits of the last heads' columns, to shared memory; a lane has a row at a time."""
        start, count, _full, index = operands
        rows, capacity = self.lists.kv_count.shape[-1], self.lists.kv_index.shape[-1]
        all_columns, all_rows = (self.late * x for x in (self.columns, rows))
        lane = _lanes()

        @pl.loop(0, pl.cdiv(all_columns, THREADS))
        def _(part):
            place = part * THREADS + lane
            _scatter(visits, jnp.where(place < all_columns, place, -1), _every_lane(0))

        plgpu.commit_smem()

        @pl.loop(0, pl.cdiv(all_rows, THREADS))
        def _(part):
            row = part * THREADS + lane
            there, row = row < all_rows, jnp.minimum(row, all_rows - 1)
            late_head = lax.div(row, jnp.int32(rows))
            of_row = self.first_late * rows + row
            its_start, its_count = (_gather(x, of_row) for x in (start, count))
            its_count = jnp.where(there, its_count, 0)
            of_head = (self.first_late + late_head) * capacity

            def add(_, name, there, state):
                _add_one(visits, jnp.where(there, late_head * self.columns + name, -1))
                return state

            _for_each_entry(index, of_head, its_start, its_count, capacity, add, None)

        plgpu.commit_smem()

    def run(self, head, refs, smem):
        """The flat index by column, the table and, if asked for, - the visits of every row."""
        operands, (indices, table, *counters) = refs[:4], refs[4:]
        rows, capacity = self.lists.kv_count.shape[-1], self.lists.kv_index.shape[-1]
        b, n = split(head, self.heads)

        def rank_of(visits_of, columns, own, count):
            """A lane's rank among so many columns; it is number `own` of them."""

            def compare(others, rank):
                loaded = [visits_of[jnp.minimum(other, columns - 1)] for other in others]
                for other, visits in zip(others, loaded, strict=True):
                    earlier = _comes_before(other, visits, own, count)
                    rank += jnp.where(earlier & (other < columns), 1, 0)
                return rank

            return _for_each(columns, compare, _every_lane(0))

        def write(column, start, count, full):
            of_head = (_every_lane(0) + x for x in (b, n))
            item = Item(*of_head, column, head * capacity + start, count, full)

            def put(row):
                _write(table, item, row, column < self.columns)

            def put_in_its_head():
                rank = column
                if self.is_sorted:
                    rank = rank_of(smem["shared"], self.columns, column, count)
                put(head * self.columns + rank)

            if not self.late:
                put_in_its_head()
                return
            pl.when(head < self.first_late)(put_in_its_head)

            @pl.when(head >= self.first_late)
            def _():
                self.count_late(operands, smem["late"])
                own = (head - self.first_late) * self.columns + column
                rank = rank_of(smem["late"], self.late * self.columns, own, count)
                put(self.first_late * self.columns + rank)

        def count_rows(row, count):
            _scatter(counters[0], jnp.where(row < rows, head * rows + row, -1), -count)

        _turn(
            head, jnp.int32(0), operands, indices, self.lists, self.columns, write,
            units=smem["units"], shared=smem["shared"],
            count_rows=count_rows if counters else None,
        )  # fmt: skip
        pl.when(head == 0)(functools.partial(_end, table, self.items, self.end))


# ------------------------------------------------------------------------------------------ lanes


def _launch(body, name, out_type, grid, operands, **scratch):
    """The results of body(*operands, *results, **scratch), one warpgroup per place of the grid."""
    return plgpu.kernel(
        body,
        out_type=tuple(out_type),
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,  # the bodies say where shared memory changes hands
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )(*operands)


def _for_each(size, step, state):
    """state = step(numbers, state) over 0 … size - 1, several at once; the last may be past it."""

    def several(turn, state):
        return step([turn * AT_ONCE + more for more in range(AT_ONCE)], state)

    turns = lax.div(jnp.int32(size) + (AT_ONCE - 1), jnp.int32(AT_ONCE))
    return lax.fori_loop(0, turns, several, state)


def _for_each_entry(index, of_head, start, count, capacity, step, state):
    """state = step(rank, name, there, state) over the entries of the lanes' lists.

    A head's part of `index` begins at of_head and has room for `capacity`; a lane's list begins
    `start` behind that. A rank past a lane's count has some name, and is not `there`.
    """

    def several(ranks, state):
        names = [_gather(index, of_head + jnp.minimum(start + t, capacity - 1)) for t in ranks]
        for t, name in zip(ranks, names, strict=True):
            state = step(t, name, t < count, state)
        return state

    return _for_each(count.max(), several, state)


def _lanes():
    """The number of every lane."""
    return plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=LANES)


def _every_lane(value):
    return _by_lane(jnp.full((THREADS,), value, jnp.int32))


def _by_lane(values):
    """The same values; those that turn out to be constant have no layout otherwise."""
    return plgpu.layout_cast(values, LANES)


def _gather(ref, places):
    """ref[place] of every lane's place; ref is int32 [size]."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), LANES),
        return_type=plgpu.ShapeDtypeStruct((THREADS,), jnp.int32, layout=LANES),
    )
    def emit(_, ref, places):
        return places.foreach(
            lambda place, _: memref.load(ref, [_index(place)]), create_array=True, is_signed=True
        )

    return emit(ref, _by_lane(places))


def _scatter(ref, places, values):
    """ref[place] = value of every lane whose place is not negative; ref is int32 [size]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LANES, LANES))
    def emit(_, ref, places, values):
        (place,), (value,) = (
            [vector.extract(x, [], [0]) for x in array.registers.flat] for array in (places, values)
        )
        zero = arith.constant(place.type, ir.IntegerAttr.get(place.type, 0))
        there = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sge, place, zero))
        with ir.InsertionPoint(there.regions[0].blocks[0]):
            memref.store(value, ref, [_index(place)])
            scf.yield_([])

    emit(ref, _by_lane(places), _by_lane(values))


def _add_one(ref, places):
    """ref[place] += 1 for every lane whose place is not negative; ref is int32 in shared memory."""
    lines = [
        ".reg .pred p; .reg .b32 a; mad.lo.s32 a, $1, 4, $0;",
        "setp.ge.s32 p, $1, 0; @p red.shared.add.u32 [a], 1;",
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LANES))
    def emit(_, ref, places):
        (place,) = (vector.extract(x, [], [0]) for x in places.registers.flat)
        asm(lines, "r,r", [shared(ref), place])

    emit(ref, _by_lane(places))


def _index(integer):
    return arith.index_cast(ir.IndexType.get(), integer)
