"""Casts dq from float32 to q's dtype inside the fused backward, on Hopper (sm90).

A fourth warpgroup of every CTA casts row blocks whose dq is complete, out of L2, while the other
warpgroups compute later heads. `counters` holds one integer for each (b, n, row block):

    minus the number of visits     at first, as prepare.py computes it from the lists
    + 1 per visit                  after a work tile, once both warpgroups' additions are in memory
    = 0                            complete: the CTA that owns the row block casts it
    + ABANDONED                    the owner gave up: the CTA that adds the last visit casts it

Row block r, in the order in which heads are computed, is owned by CTA r mod CTAs. A CTA polls the
counter of its next row block while it waits for its own compute warpgroups. When its work tiles are
done, it polls the counters of its remaining row blocks a bounded number of times.

Memory order. A compute warpgroup waits until its additions (TMA, the async proxy) are performed,
fences the proxy, and adds 1 to its own integer of `added` in shared memory (release, CTA). The cast
warpgroup reads both integers (acquire), fences for the GPU, and adds to the counters (relaxed). A
thread that reads a counter and then fences observes all additions before it, because the additions
to one counter are a chain of read-modify-writes (a release sequence). A barrier of the cast
warpgroup makes what one thread has observed visible to all 128. Each compute warpgroup needs an
integer of its own: over work tiles without visits, one warpgroup can run ahead of the other. A
shared integer could not distinguish two additions by one warpgroup from one addition by each.

No deadlock. The cast warpgroup has two unbounded waits, both for the compute warpgroups of its own
CTA: until they finish a work tile, and at the end until they release their registers. The compute
warpgroups wait for the cast warpgroup only at its start, and for free slots of records; the cast
warpgroup releases a record's slot before it waits. It polls the counters that other CTAs add to at
most `max_polls` times, then adds ABANDONED. After that addition and that of the last visit, in
either order, the counter is exactly ABANDONED. A compare-and-swap to TAKEN lets one CTA cast.
"""

import struct

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper import barriers
from xsake.backends.hopper.layouts import COMPUTE_WGS, THREADS, WARP, div_rem
from xsake.backends.hopper.ptx import (
    INT32,
    ONE,
    SCALAR,
    address,
    as_scalar,
    asm,
    shared_address,
)

ABANDONED = 1 << 28  # more than there are visits
TAKEN = 1 << 29
WARPS = THREADS // WARP
LOADS = 2  # of 16 bytes in flight per thread, while the compute warpgroups run
# Loads in flight and registers, once the compute warpgroups have ended.
LAST_LOADS, LAST_REGISTERS = 16, 104
SLEEP_NS = 256  # between two polls


class Cast:
    """The role of the fourth warpgroup of `kernel`."""

    def __init__(self, kernel, dtype, max_polls):
        self.kernel = kernel
        self.shape = kernel.shape
        self.dtype = jnp.dtype(dtype)
        self.max_polls = max_polls
        self.row_blocks = self.shape.sizes.B * self.shape.sizes.N * self.shape.row_blocks

    def run(self, work, index, counters, sums, dq, added, started):
        """Counts the visits of every work tile; casts owned row blocks, and abandoned ones."""
        cta = lax.axis_index("cta")
        ctas = self.kernel.scheduler.ctas
        owned = lax.div(self.row_blocks - 1 - cta, jnp.int32(ctas)) + 1
        owned = jnp.where(cta < self.row_blocks, owned, 0)
        _reset(added)
        plgpu.barrier_arrive(started)

        def row_of(number):
            """The `number`-th row block that this CTA owns."""
            return jnp.minimum(cta + number * ctas, self.row_blocks - 1)

        def counter(row):
            return counters.at[pl.ds(row, 1)]

        def cast(row, loads=LOADS):
            self.convert(row, sums, dq, loads)

        def after_tile(tile, carry):
            turn, number = carry

            def await_tile(number):
                return _tile_or_row(added, turn + 1, counter(row_of(number)), number < owned)

            def cast_one(carry):
                number = carry[0]
                cast(row_of(number))
                return number + 1, await_tile(number + 1)

            number = lax.while_loop(
                lambda carry: carry[1] == 0, cast_one, (number, await_tile(number))
            )[0]
            head = tile.b * self.shape.sizes.N + tile.n
            first = head * self.shape.row_blocks
            head_counters = counters.at[pl.ds(first, self.shape.row_blocks)]
            completed = _count_visits(head_counters, index.at[pl.ds(tile.start, 1)], tile.count)

            @pl.when(completed > 0)
            def _():
                @pl.loop(0, tile.count)
                def _(visit):
                    row = first + index[tile.start + visit]
                    pl.when(_claim(counter(row)) > 0)(lambda: cast(row))

            return turn + 1, number

        number = self.kernel.scheduler.for_each_tile(work, after_tile, (0, 0))[1]
        # The compute warpgroups have released their registers. What remains overlaps with nothing,
        # so it uses more of them.
        plgpu.set_max_registers(LAST_REGISTERS, action="increase")

        def cast_last(number, max_polls):
            row = row_of(number)
            complete = _is_complete(counter(row), max_polls)

            def abandon():
                _abandon(counter(row))
                return _claim(counter(row))

            ready = lax.cond(complete > 0, lambda: complete, abandon)
            pl.when(ready > 0)(lambda: cast(row, LAST_LOADS))
            return jnp.where(complete > 0, max_polls, 0)

        lax.fori_loop(number, owned, cast_last, jnp.int32(self.max_polls))

    def convert(self, row, sums, dq, loads):
        """scale * sums of a row block -> dq; a thread has `loads` loads of 16 bytes in flight."""
        head, i = div_rem(row, self.shape.row_blocks)
        b, n = div_rem(head, self.shape.sizes.N)
        first = i * self.shape.block[0]
        row_count = jnp.minimum(sums.shape[1] - first, self.shape.block[0])
        lanes = self.shape.sizes.H * 4 // 16  # of a warp that load one row
        rows_per_load = WARP // lanes  # of a warp
        stride = self.shape.sizes.N * self.shape.sizes.H * 4  # bytes from row to row of sums
        # Rows at a time: of a warp, of the warpgroup.
        warp_rows, all_rows = loads * rows_per_load, WARPS * loads * rows_per_load
        kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[self.dtype.name]
        scale = "0f" + struct.pack(">f", self.kernel.scale).hex().upper()
        x = [[f"x{load}_{i}" for i in range(4)] for load in range(loads)]
        lines = [
            ".reg .pred in; .reg .b32 t, row; .reg .b64 a, o;",
            f".reg .b32 y<2>; .reg .f32 {', '.join(name for names in x for name in names)};",
            f"mov.u32 t, %tid.x; shr.u32 row, t, 5; and.b32 row, row, {WARPS - 1};",
            f"mul.lo.u32 row, row, {warp_rows}; and.b32 t, t, {WARP - 1};",
            f"shr.u32 y0, t, {lanes.bit_length() - 1}; add.u32 row, row, y0;",
            f"and.b32 t, t, {lanes - 1};",
            f"mad.wide.u32 a, row, {stride}, $0; mad.wide.u32 a, t, 16, a;",
            f"mad.wide.u32 o, row, {stride // 2}, $1; mad.wide.u32 o, t, 8, o;",
            "sub.s32 row, $2, row;",  # rows that remain
            'NEXT: .pragma "nounroll"; setp.gt.s32 in, row, 0; @!in bra OUT;',
        ]
        # The number of rows is a multiple of 8. A warp with more rows at a time needs a predicate
        # for each load.
        within = ["setp.gt.s32 in, row, {};", "@in "] if warp_rows > 8 else ["", ""]
        for load, names in enumerate(x):
            to = f"{{{', '.join(names)}}}, [a+{load * rows_per_load * stride}]"
            lines.append(within[0].format(load * rows_per_load))
            lines.append(f"{within[1]}ld.relaxed.gpu.global.v4.f32 {to};")
        for load, names in enumerate(x):
            offset = load * rows_per_load * stride  # bytes of sums
            lines += [f"mul.f32 {name}, {name}, {scale};" for name in names]
            lines += [
                f"cvt.rn.{kind}.f32 y0, {names[1]}, {names[0]};",
                f"cvt.rn.{kind}.f32 y1, {names[3]}, {names[2]};",
                within[0].format(load * rows_per_load),
                f"{within[1]}st.global.v2.b32 [o+{offset // 2}], {{y0, y1}};",
            ]
        lines += [
            f"sub.s32 row, row, {all_rows}; add.u64 a, a, {all_rows * stride};",
            f"add.u64 o, o, {all_rows * stride // 2}; bra NEXT;",
            "OUT:",
        ]

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR))
        def emit(_, sums, dq, row_count):
            asm(lines, "l,l,r", [address(sums), address(dq), row_count.registers[()]])

        rows = pl.ds(first, self.shape.block[0])
        emit(sums.at[b, rows, n], dq.at[b, rows, n], row_count)


def report_added(added):
    """A compute warpgroup reports that its additions of a work tile are in memory.

    The caller has waited for the additions. `added` is the warpgroup's own integer.
    """
    _in_shared(
        added, ["@one fence.proxy.async.global;", "@one red.release.cta.shared.add.u32 [$0], 1;"]
    )


def _reset(added):
    _in_shared(added, [f"@one st.shared.u32 [$0+{4 * wg}], 0;" for wg in range(COMPUTE_WGS)])


def _in_shared(added, lines):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_, added):
        asm([*ONE, *lines], "r", [shared_address(added)])

    emit(added)


# Broadcasts p of one thread to the warpgroup. The barrier also orders memory: all threads observe
# what that thread has observed.
BROADCAST = (
    f"barrier.cta.red.or.pred p, {barriers.CAST}, {THREADS}, p;",
    "selp.b32 $0, 1, 0, p;",
)


def _tile_or_row(added, want, counter, more):
    """Waits; returns 1 when both of `added` are ≥ `want`, 0 when `more` and the counter is 0.

    That is, 1 after the next work tile, 0 when the next owned row block is complete. `more`: an
    owned row block is left.
    """
    lines = [
        *ONE,
        ".reg .pred p, q, m; .reg .b32 x, y;",
        "setp.ne.u32 p, tid, tid; setp.ne.s32 m, $4, 0; @!one bra OUT;",
        "AGAIN: ld.acquire.cta.shared.u32 x, [$1]; ld.acquire.cta.shared.u32 y, [$1+4];",
        "min.s32 x, x, y; setp.ge.s32 p, x, $2; @p bra OUT;",
        "@!m bra SLEEP;",
        "ld.relaxed.gpu.global.u32 x, [$3]; setp.eq.s32 q, x, 0; @q bra SEEN;",
        f"SLEEP: nanosleep.u32 {SLEEP_NS}; bra AGAIN;",
        "SEEN: fence.acq_rel.gpu;",  # one after polling: a fence per poll would empty L1
        "OUT:",
        *BROADCAST,
    ]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, plgpu.RefType(), SCALAR), return_type=INT32
    )
    def emit(_, added, want, counter, more):
        operands = [shared_address(added), want.registers[()], address(counter), more.registers[()]]
        return as_scalar(asm(lines, "=r,r,r,l,r", operands))

    return emit(added, want, counter, more.astype(jnp.int32))


def _count_visits(counters, index, count):
    """Adds 1 to the counter of every visited row block, one thread each.

    Returns 1 if that completed an abandoned row block.
    """
    lines = [
        ".reg .pred p, q; .reg .b32 v, row; .reg .b64 a;",
        "mov.u32 v, %tid.x; and.b32 v, v, 127; setp.ne.u32 p, v, v;",
        "fence.proxy.async.global; fence.acq_rel.gpu;",
        "NEXT: setp.ge.s32 q, v, $3; @q bra OUT;",
        "mad.wide.u32 a, v, 4, $2; ld.global.u32 row, [a]; mad.wide.u32 a, row, 4, $1;",
        "atom.relaxed.gpu.global.add.u32 row, [a], 1;",
        f"setp.eq.or.s32 p, row, {ABANDONED - 1}, p; add.u32 v, v, {THREADS}; bra NEXT;",
        "OUT:",
        *BROADCAST,
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR), return_type=INT32)
    def emit(_, counters, index, count):
        operands = [address(counters), address(index), count.registers[()]]
        return as_scalar(asm(lines, "=r,l,l,r", operands))

    return emit(counters, index, count)


def _is_complete(counter, max_polls):
    """1 as soon as the counter is 0, 0 after max_polls polls."""
    lines = [
        *ONE,
        ".reg .pred p, q; .reg .b32 x, n; mov.u32 n, $2;",
        "setp.ne.u32 p, tid, tid; @!one bra OUT;",
        "AGAIN: ld.relaxed.gpu.global.u32 x, [$1]; setp.eq.s32 p, x, 0; @p bra SEEN;",
        "setp.eq.u32 q, n, 0; @q bra OUT;",
        f"sub.u32 n, n, 1; nanosleep.u32 {SLEEP_NS}; bra AGAIN;",
        "SEEN: fence.acq_rel.gpu;",
        "OUT:",
        *BROADCAST,
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=INT32)
    def emit(_, counter, max_polls):
        return as_scalar(asm(lines, "=r,l,r", [address(counter), max_polls.registers[()]]))

    return emit(counter, max_polls)


def _claim(counter):
    """Swaps ABANDONED (then all visits are counted) for TAKEN; returns 1 on success, else 0."""
    lines = [
        *ONE,
        ".reg .pred p; .reg .b32 x; setp.ne.u32 p, tid, tid; @!one bra OUT;",
        (
            f"atom.acq_rel.gpu.global.cas.b32 x, [$1], {ABANDONED}, {TAKEN}; "
            f"setp.eq.s32 p, x, {ABANDONED};"
        ),
        "OUT:",
        *BROADCAST,
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=INT32)
    def emit(_, counter):
        return as_scalar(asm(lines, "=r,l", [address(counter)]))

    return emit(counter)


def _abandon(counter):
    """Adds ABANDONED."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_, counter):
        lines = [*ONE, f"@one red.relaxed.gpu.global.add.u32 [$0], {ABANDONED};"]
        asm(lines, "l", [address(counter)])

    emit(counter)
