"""What the Hopper kernels share: work items, their steps, rings of tiles, the rule inside a block.

A CTA has two compute warpgroups and a third one that copies. A work item is a block of 128 or 64
tokens of one head; it visits the blocks of the other axis that its list names, in steps of so many
tokens as one product takes:

    128 tokens   warpgroup 0 has rows 0-63, warpgroup 1 has rows 64-127, both take every step
     64 tokens   both have the same rows and take every other step (`alternate`); at the end
                 warpgroup 1 hands what it summed to warpgroup 0

    visits of an item:  index[start : start + full]           no masking at all
                        index[start + full : start + count]   the rule decides, token by token

Which CTA takes which item (`deal`, of a persistent grid):

    "fixed"     the table is walked there and back, in turns of one item per CTA
    "counter"   a CTA that is ready takes the next one: its memory warpgroup draws the number from a
                counter in global memory and copies the record to shared memory, when all copies of
                the item before are on their way
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake import _jax
from xsake.backends.hopper.limits import BLOCKS, HEAD_SIZES
from xsake.backends.hopper.ptx import NUMBER, ONE, asm, number, pointer

ROWS = 64  # rows per compute warpgroup: one wgmma tile; 128 rows spill at H = 128
COMPUTE = 2  # compute warpgroups of a CTA
WARP, THREADS = 32, 128  # threads of a warp, of a warpgroup
PIECE = 64  # columns of what one warpgroup hands to the other at a time
REGISTERS = 512  # per thread of a warpgroup, shared by the warpgroups of a CTA
RECORD_BYTES = 128  # apart: copies want it
LOG2E = math.log2(math.e)

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)  # one value per row
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value per column


class Item(NamedTuple):
    """A work item: scalars read from one row of the work table."""

    b: Any  # batch row
    n: Any  # query head
    i: Any  # its block
    start: Any  # where its list begins in the flat index
    count: Any  # blocks to visit
    full: Any  # the first so many need no rule


class Work(NamedTuple):
    """Where the items of a CTA are found."""

    # int32 [items + 1, 8]: rows of Item; the last row ends the work (count = -1), and its
    # field COUNTER is the number of the first row that nobody took yet
    table: Any
    # with deal = "counter", the records of the items that are next
    record_smem: Any = None
    record_ready: Any = None
    record_free: Any = None


COUNTER = len(Item._fields)


class Ring(NamedTuple):
    """Tiles that are copied once per step, as many in flight as there are stages."""

    stages: int
    await_free: Callable[[Any], None]  # (place): returns when what is there was read
    load: Callable[[Item, Any, Any], None]  # (item, the step's tokens, place): starts the copy


class Resident(NamedTuple):
    """A tile that is copied once per item and stays for all its steps."""

    tile: Callable[[Item], Any]  # its place in global memory
    smem: Any
    ready: Any  # barrier: it is there
    free: Any  # barrier: that of the item before was read; None: it is free with the one before it


def check_sizes(block, *sizes):
    """The block sizes and head sizes that the kernels have."""
    for tokens in block:
        if tokens not in BLOCKS:
            raise ValueError(f"a block of {tokens} tokens is none of {BLOCKS}; choose one of them")
    for size in sizes:
        if size not in HEAD_SIZES:
            raise ValueError(f"a head of {size} is none of {HEAD_SIZES}; fill it up with zeros")


def split(number, by):
    """(number // by, number % by) of numbers that are not negative."""
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))


def per_item(x, batch, heads):
    """What lists have for every block, [B|1, N|K|1, blocks], for every item: [B * N * blocks]."""
    _, list_heads, blocks = x.shape
    repeated = jnp.repeat(x, heads // list_heads, axis=1)
    return jnp.broadcast_to(repeated, (batch, heads, blocks)).reshape(-1)


def tiles(*dims, dtype):
    """Shared memory for products and copies: tiles of 8 rows of 128 bytes, swizzled."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(dims, dtype, transforms=transforms)


class BlockKernel:
    """A kernel over work items; `self` holds what is static."""

    warpgroups = COMPUTE + 1  # and one more where a kernel has another role
    records = 2  # of items that lie in shared memory: of this one and of the next

    def __init__(
        self, shape, rule, tiling, *, item_block, visit_block, items, step, persistent, interpret
    ):
        self.shape = shape
        self.allows = rule.allows
        self.num_rows = len(rule.rows)
        self.num_columns = len(rule.columns)
        self.interpret = bool(interpret)
        if visit_block % step:
            raise ValueError(f"a step of {step} tokens does not divide a block of {visit_block}")
        self.item_block = item_block
        self.visit_block = visit_block
        self.step = step
        self.splits = visit_block // step  # steps per visit
        self.alternate = item_block == ROWS
        self.consumers = 1 if self.alternate else COMPUTE  # warpgroups that take a step
        self.items = items
        self.persistent = persistent
        self.counts = persistent and tiling.schedule == "counter"
        self.ctas = min(_jax.multiprocessors(), items) if persistent else items
        # Without a rule the only partial blocks are those that reach past the last key.
        self.has_partial = rule.allows is not None or shape.keys % shape.block[1] != 0

    def launch(self, name, body, operands, out_type, scratch, interpret):
        """The results of body(*operands, *results, **scratch), run by every CTA."""
        if self.counts:
            scratch = scratch | dict(
                record_smem=plgpu.SMEM((self.records, RECORD_BYTES // 4), jnp.int32),
                record_ready=plgpu.Barrier(num_barriers=self.records),
                record_free=plgpu.Barrier(num_barriers=self.records, num_arrivals=self.warpgroups),
            )
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch,
            grid=(self.ctas,),
            grid_names=("cta",),
            num_threads=self.warpgroups,
            thread_name="wg",
            kernel_name=name,
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                reduction_scratch_bytes=0,  # rows are reduced inside a warp
                unsafe_no_auto_barriers=not interpret,  # no thread reads what it wrote
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            ),
            **({"interpret": interpret} if interpret else {}),
        )(*operands)

    def work_of(self, table, scratch):
        """(Work, the rest of a CTA's scratch)."""
        names = Work._fields[1:] if self.counts else ()
        rest = {name: x for name, x in scratch.items() if name not in names}
        return Work(table, *(scratch[name] for name in names)), rest

    def run_roles(self, tiling, compute, memory, beside=None):
        """compute(wg) on the first two warpgroups, memory() on the third, beside() on a fourth.

        With a fourth one, the first two have what is left of the registers.
        """
        wg = lax.axis_index("wg")
        registers = tiling.compute_registers
        if beside is not None:
            rest = REGISTERS - tiling.memory_registers - tiling.cast_registers
            registers = min(registers, rest // COMPUTE // 8 * 8)

        @pl.when(wg < COMPUTE)
        def _():
            plgpu.set_max_registers(registers, action="increase")
            compute(wg)

        @pl.when(wg == COMPUTE)
        def _():
            plgpu.set_max_registers(tiling.memory_registers, action="decrease")
            memory()

        if beside is not None:

            @pl.when(wg > COMPUTE)
            def _():
                plgpu.set_max_registers(tiling.cast_registers, action="decrease")
                beside()

    # Work items

    def for_each_item(self, work, visit, init, feeds=False):
        """carry = visit(item, carry) for every item of this CTA.

        `feeds`: this is the warpgroup that fetches the records of a counter's deal.
        """
        if not self.persistent:
            return visit(self.record(work, lax.axis_index("cta")), init)
        init = jax.tree.map(lambda x: jnp.int32(x) if isinstance(x, int) else x, init)
        if self.counts:
            return self.for_each_counted(work, visit, init, feeds)
        return self.for_each_dealt(work, visit, init)

    def record(self, work, row):
        return Item(*(work.table[row, field] for field in range(len(Item._fields))))

    def for_each_dealt(self, work, visit, init):
        """A CTA walks the table there and back: c, 2P-1-c, 2P+c, ... of P CTAs.

        Over a table sorted by length this deals every CTA about the same work; over one that is
        sorted in sections it does not. The next record is read while an item is computed.
        """
        cta = lax.axis_index("cta")

        def record(turn):
            place = jnp.where(turn % 2 == 0, cta, self.ctas - 1 - cta)
            return self.record(work, jnp.minimum(turn * self.ctas + place, self.items - 1))

        rounds, rest = divmod(self.items, self.ctas)
        place = cta if rounds % 2 == 0 else self.ctas - 1 - cta
        turns = jnp.where(place < rest, rounds + 1, rounds)

        def body(turn, carry):
            item, state = carry
            following = record(turn + 1)
            return following, visit(item, state)

        return lax.fori_loop(0, turns, body, (record(jnp.int32(0)), init))[1]

    def for_each_counted(self, work, visit, init, feeds):
        """A CTA's first item has its own number; the next is drawn when one has all its copies."""
        cta = lax.axis_index("cta")

        def fetch(turn, row):
            """Starts the copy of a row of the table, which will be this CTA's item number turn."""
            place = self.slot(turn, self.records)
            pl.when(turn >= self.records)(lambda: plgpu.barrier_wait(work.record_free.at[place]))
            plgpu.copy_gmem_to_smem(
                work.table.at[jnp.minimum(row, self.items)],
                work.record_smem.at[place, pl.ds(0, work.table.shape[1])],
                work.record_ready.at[place],
            )

        def read(turn):
            place = self.slot(turn, self.records)
            plgpu.barrier_wait(work.record_ready.at[place])
            item = Item(*(work.record_smem[place, field] for field in range(len(Item._fields))))
            plgpu.commit_smem()  # the copy that overwrites it comes after
            plgpu.barrier_arrive(work.record_free.at[place])
            return item

        def body(carry):
            turn, item, state = carry
            state = visit(item, state)
            if feeds:  # the item's last copies are on their way; an earlier draw holds work back
                fetch(turn + 1, self.drawn(work, cta, turn))
            return turn + 1, read(turn + 1), state

        if feeds:
            fetch(jnp.int32(0), cta)
        first = (jnp.int32(0), read(jnp.int32(0)), init)
        turns, _, state = lax.while_loop(lambda carry: carry[1].count >= 0, body, first)
        if feeds and self.interpret:  # it wants every completed phase observed

            @pl.loop(jnp.maximum(turns + 1 - self.records, 0), turns + 1)
            def _(turn):
                plgpu.barrier_wait(work.record_free.at[self.slot(turn, self.records)])

        return state

    def drawn(self, work, cta, turn):
        """The next number of the counter, at or past the last item when there is none.

        The interpreter has no atomic additions: there, CTAs take turns.
        """
        if self.interpret:
            return (turn + 1) * self.ctas + cta
        counter = work.table.at[self.items, pl.ds(COUNTER, 1)]
        # Every item but the first ones is drawn once, and every CTA draws once more, in vain.
        return _counted(counter, self.ctas, self.ctas + self.items - 1)

    def first_row(self, item, wg):
        """Token index of this warpgroup's first row of an item."""
        first = item.i * self.item_block
        return first if self.alternate else first + wg * ROWS

    def tile_of(self, item, gmem, head):
        """An item's own tokens of a head of gmem [B, tokens, heads, size]."""
        tokens = pl.ds(item.i * self.item_block, self.item_block)
        return gmem.at[item.b, tokens, head]

    def kv_head(self, item):
        return lax.div(item.n, jnp.int32(self.shape.heads // self.shape.kv_heads))

    def stream(self, work, index, first, second, residents, late=False):
        """The memory role: both rings' tiles of every step, as soon as there is room for them.

        What stays for a whole item is copied behind the first tile of the first ring, for which
        there may be room earlier; `late`, behind those of both. Until then it comes as far as L2.
        """

        def load_item(item, carry):
            done, items_before = carry  # steps and items loaded so far
            steps = item.count * self.splits

            def load_its_own():
                for tile, smem, ready, free in residents:
                    if free is not None:
                        pl.when(items_before > 0)(functools.partial(plgpu.barrier_wait, free))
                    plgpu.copy_gmem_to_smem(tile(item), smem, ready)

            def prefetch_its_own():
                for tile, *_ in residents:
                    plgpu.async_prefetch(tile(item))

            if self.persistent and not self.interpret:
                pl.when(steps > 0)(prefetch_its_own)

            @pl.loop(0, steps)
            def _(t):
                tokens = pl.ds(self.first_token(index, item, t), self.step)

                def fill(ring):
                    place = self.slot(done + t, ring.stages)
                    pl.when(done + t >= ring.stages)(lambda: ring.await_free(place))
                    ring.load(item, tokens, place)

                fill(first)
                if late:
                    fill(second)
                pl.when(t == 0)(load_its_own)
                if not late:
                    fill(second)

            return done + steps, items_before + (steps > 0).astype(jnp.int32)

        done, items = self.for_each_item(work, load_item, (0, 0), feeds=True)
        if self.interpret:  # it wants every completed phase observed
            for ring in (first, second):

                @pl.loop(jnp.maximum(done - ring.stages, 0), done)
                def _(t, ring=ring):
                    ring.await_free(self.slot(t, ring.stages))

            for free in (x.free for x in residents if x.free is not None):
                pl.when(items > 0)(functools.partial(plgpu.barrier_wait, free))

    # Steps

    def first_token(self, index, item, t):
        """Token index where step t of an item begins, on the axis it visits."""
        if self.splits == 1:
            return index[item.start + t] * self.visit_block
        visit, part = lax.div(t, jnp.int32(self.splits)), lax.rem(t, jnp.int32(self.splits))
        return index[item.start + visit] * self.visit_block + part * self.step

    def slot(self, t, stages):
        """The place in a ring of step t since the kernel began."""
        return lax.rem(jnp.int32(t), jnp.int32(stages))

    @property
    def stride(self) -> int:
        """From one step of a warpgroup to its next."""
        return COMPUTE if self.alternate else 1

    def own_steps(self, wg, item, done):
        """(first, full, count): this warpgroup's first step of an item and how many it takes.

        Alternating goes by the number of steps since the kernel began (`done` when the item does),
        so that a place in a ring, of an even number of stages, is always the same warpgroup's.
        """
        full, count = item.full * self.splits, item.count * self.splits
        if not self.has_partial:
            full = count
        if not self.alternate:
            return 0, full, count
        first = lax.rem(done + wg, jnp.int32(COMPUTE))
        return first, *(lax.div(x - first + 1, jnp.int32(COMPUTE)) for x in (full, count))

    # The rule

    def token_values(self, refs, item, first, length, layout):
        """Values per token that the rule reads, from global memory."""
        return [
            plgpu.load(
                x.at[item.b if x.shape[0] > 1 else 0, pl.ds(first, length)],
                layout=layout,
                optimized=False,
            )
            for x in refs
        ]

    def allowed(self, item, first_query, first_key, dims, row_values, column_values, width=None):
        """What the rule allows in a tile. dims: the axis of queries, the axis of keys.

        It is as wide as a step unless `width` says otherwise.
        """
        shape = (ROWS, width or self.step)
        q_index, k_index = (
            plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=TILE) + first
            for dim, first in zip(dims, (first_query, first_key), strict=True)
        )
        allowed = None
        if self.allows is not None:
            allowed = self.allows(
                item.b,
                item.n,
                q_index,
                k_index,
                [lax.broadcast_in_dim(x, shape, [dims[0]]) for x in row_values],
                [lax.broadcast_in_dim(x, shape, [dims[1]]) for x in column_values],
            )
        if self.shape.keys % self.shape.block[1]:
            inside = k_index < self.shape.keys
            allowed = inside if allowed is None else allowed & inside
        return allowed


class Handover:
    """Tiles that warpgroup 1 hands to warpgroup 0 through shared memory, 64 columns at a time."""

    def __init__(self, piece_smem, ready, taken):
        self.piece_smem, self.ready, self.taken = piece_smem, ready, taken

    @staticmethod
    def barriers() -> dict[str, Any]:
        return {"piece_ready": plgpu.Barrier(), "piece_taken": plgpu.Barrier()}

    def give(self, tile, beside=()):
        """Every piece of a tile; `beside` is (place, value) pairs that go with the first one."""
        for column in range(0, tile.shape[-1], PIECE):
            for place, value in beside if column == 0 else ():
                place[...] = value
            self.piece_smem[...] = tile[:, column : column + PIECE]
            plgpu.barrier_arrive(self.ready)
            plgpu.barrier_wait(self.taken)

    def take(self, beside=()):
        """The next piece [64, 64], and what lies in the places (of one value per row) beside it."""
        plgpu.barrier_wait(self.ready)
        piece = plgpu.load(self.piece_smem, layout=TILE)
        values = [plgpu.load(place, layout=ROW, optimized=False) for place in beside]
        plgpu.barrier_arrive(self.taken)
        return piece, values


def _counted(counter, first, last):
    """The number in global memory, which becomes one more; who draws `last` sets it to `first`.

    So the table is what it was when the kernel ends: for XLA it is an operand like any other, which
    may be constant or serve several kernels, one after the other. (A mutable reference would say
    what happens, but JAX 0.11 cannot take the forward apart under remat then.)

    One thread adds, and its warp hears of it. That warp starts the warpgroup's copies; nobody else
    may use the number.
    """
    lines = [
        *ONE,
        ".reg .pred final; .reg .b32 x;",
        "mov.u32 x, 0; @one atom.global.add.u32 x, [$1], 1;",
        f"setp.eq.u32 final, x, {last}; @final st.global.u32 [$1], {first};",
        "shfl.sync.idx.b32 $0, x, 0, 31, -1;",
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=NUMBER)
    def emit(_, counter):
        return number(asm(lines, "=r,l", [pointer(counter)]))

    return emit(counter)
