"""Which CTA computes which work tile.

A work tile is a block of 64, 128 or 192 tokens of one head. It visits the blocks of the other axis
that its list names:

    index[start : start + full]           full blocks, without masking
    index[start + full : start + count]   partial blocks: the rule decides, token by token

The work table has one record for each work tile. A grid that is not persistent has one CTA for each
record. A persistent grid has one CTA per multiprocessor, and a schedule:

    "fixed"     CTA c of P computes records c, 2P-1-c, 2P+c, 4P-1-c, …
    "counter"   the memory warpgroup fetches the index of the next record from a counter in global
                memory, once all copies of the current work tile are issued, and copies the record
                to shared memory
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake import _jax
from xsake.backends.hopper.layouts import slot_of
from xsake.backends.hopper.ptx import INT32, ONE, address, as_scalar, asm

RECORD_BYTES = 128  # from record to record in shared memory: copies need this alignment


class WorkTile(NamedTuple):
    """One record of the work table, as scalars."""

    b: Any  # batch row
    n: Any  # query head
    i: Any  # block index
    start: Any  # offset of its list in the flat index
    count: Any  # blocks to visit
    full: Any  # how many of them, the first ones, are full


# The last record ends the work (count = -1). This field of it is the counter of the "counter"
# schedule: the index of the first record that no CTA has fetched.
COUNTER = len(WorkTile._fields)


class Work(NamedTuple):
    """Where a CTA reads its work tiles."""

    table: Any  # int32 [work tiles + 1, 8]
    # With the "counter" schedule, the records of the current and the next work tiles.
    record_smem: Any = None
    record_ready: Any = None
    record_free: Any = None


class Scheduler:
    """The loop of one CTA over its work tiles; `self` holds what is static."""

    def __init__(self, tiles, *, persistent, schedule, record_slots, warpgroups, interpret):
        self.tiles = tiles
        self.persistent = persistent
        self.has_counter = persistent and schedule == "counter"
        self.ctas = min(_jax.multiprocessors(), tiles) if persistent else tiles
        self.record_slots = record_slots
        self.warpgroups = warpgroups
        self.interpret = interpret

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers for records."""
        if not self.has_counter:
            return {}
        slots = self.record_slots
        return dict(
            record_smem=plgpu.SMEM((slots, RECORD_BYTES // 4), jnp.int32),
            record_ready=plgpu.Barrier(num_barriers=slots),
            record_free=plgpu.Barrier(num_barriers=slots, num_arrivals=self.warpgroups),
        )

    def work_of(self, table, scratch):
        """(Work, the rest of a CTA's scratch)."""
        names = Work._fields[1:] if self.has_counter else ()
        rest = {name: x for name, x in scratch.items() if name not in names}
        return Work(table, *(scratch[name] for name in names)), rest

    def for_each_tile(self, work, visit, init, fetches=False):
        """carry = visit(tile, carry) for every work tile of this CTA.

        `fetches`: with the "counter" schedule, this warpgroup fetches the records for its CTA.
        """
        if not self.persistent:
            return visit(self._record(work, lax.axis_index("cta")), init)
        init = jax.tree.map(lambda x: jnp.int32(x) if isinstance(x, int) else x, init)
        if self.has_counter:
            return self._by_counter(work, visit, init, fetches)
        return self._by_pattern(work, visit, init)

    def _record(self, work, row):
        return WorkTile(*(work.table[row, field] for field in range(len(WorkTile._fields))))

    def _by_pattern(self, work, visit, init):
        """CTA c of P computes records c, 2P-1-c, 2P+c, ….

        Over a table that is sorted by length, all CTAs get about the same work; over one that is
        sorted in sections they do not. The next record is read before the current tile is computed.
        """
        cta = lax.axis_index("cta")

        def record(round_):
            column = jnp.where(round_ % 2 == 0, cta, self.ctas - 1 - cta)
            return self._record(work, jnp.minimum(round_ * self.ctas + column, self.tiles - 1))

        rounds, rest = divmod(self.tiles, self.ctas)
        column = cta if rounds % 2 == 0 else self.ctas - 1 - cta
        rounds = jnp.where(column < rest, rounds + 1, rounds)

        def body(round_, carry):
            tile, state = carry
            following = record(round_ + 1)
            return following, visit(tile, state)

        return lax.fori_loop(0, rounds, body, (record(jnp.int32(0)), init))[1]

    def _by_counter(self, work, visit, init, fetches):
        """CTA c begins with record c, and fetches the others from the counter."""
        cta = lax.axis_index("cta")

        def load(turn, row):
            """Starts the copy of a record, which is this CTA's work tile number `turn`."""
            slot = slot_of(turn, self.record_slots)
            pl.when(turn >= self.record_slots)(
                lambda: plgpu.barrier_wait(work.record_free.at[slot])
            )
            plgpu.copy_gmem_to_smem(
                work.table.at[jnp.minimum(row, self.tiles)],
                work.record_smem.at[slot, pl.ds(0, work.table.shape[1])],
                work.record_ready.at[slot],
            )

        def read(turn):
            slot = slot_of(turn, self.record_slots)
            plgpu.barrier_wait(work.record_ready.at[slot])
            fields = range(len(WorkTile._fields))
            tile = WorkTile(*(work.record_smem[slot, field] for field in fields))
            plgpu.commit_smem()  # orders these reads before the copy that overwrites the slot
            plgpu.barrier_arrive(work.record_free.at[slot])
            return tile

        def body(carry):
            turn, tile, state = carry
            state = visit(tile, state)
            if fetches:
                # All copies of this tile are issued. An earlier fetch would reserve a work tile
                # that another CTA could start sooner.
                load(turn + 1, self._fetch(work, cta, turn))
            return turn + 1, read(turn + 1), state

        if fetches:
            load(jnp.int32(0), cta)
        first = (jnp.int32(0), read(jnp.int32(0)), init)
        turns, _, state = lax.while_loop(lambda carry: carry[1].count >= 0, body, first)
        if fetches and self.interpret:  # the interpreter requires a wait for every barrier phase

            @pl.loop(jnp.maximum(turns + 1 - self.record_slots, 0), turns + 1)
            def _(turn):
                plgpu.barrier_wait(work.record_free.at[slot_of(turn, self.record_slots)])

        return state

    def _fetch(self, work, cta, turn):
        """The index of the next record; at least that of the end record if no work tile is left.

        The interpreter has no atomic additions: its CTAs take records in a fixed order.
        """
        if self.interpret:
            return (turn + 1) * self.ctas + cta
        counter = work.table.at[self.tiles, pl.ds(COUNTER, 1)]
        # The CTAs fetch tiles - ctas times for work tiles, since each begins with one, and once
        # each when none is left: `tiles` fetches, with old values ctas … ctas + tiles - 1.
        return _fetch_and_add(counter, self.ctas, self.ctas + self.tiles - 1)


def _fetch_and_add(counter, first, last):
    """Adds 1 to the counter and returns its old value; the last fetch resets it to `first`.

    The table is therefore unchanged when the kernel ends. For XLA it is an operand like any other,
    which may be constant or serve several kernels in sequence. (A mutable `jax.Ref` would make the
    update explicit, but JAX 0.11 cannot partially evaluate the forward with one under remat.)

    One thread adds, and broadcasts the value to its warp. That warp issues the warpgroup's copies;
    the other warps must not use the value.
    """
    lines = [
        *ONE,
        ".reg .pred final; .reg .b32 x;",
        "mov.u32 x, 0; @one atom.global.add.u32 x, [$1], 1;",
        f"setp.eq.u32 final, x, {last}; @final st.global.u32 [$1], {first};",
        "shfl.sync.idx.b32 $0, x, 0, 31, -1;",
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=INT32)
    def emit(_, counter):
        return as_scalar(asm(lines, "=r,l", [address(counter)]))

    return emit(counter)
