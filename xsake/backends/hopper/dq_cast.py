"""dq from float32 to the type of q beside the products of the fused backward, on Hopper (sm90).

A fourth warpgroup of every CTA turns row blocks that are complete into results, from L2, while the
others go on with later heads. `counters` holds a number for each (b, n, row block):

    - visits it still waits for         as hopper_prepare makes it from the lists
    + 1 per visit                       after an item, when both warpgroups' additions are in memory
    = 0                                 complete: the CTA that it belongs to takes it
    + LEFT                              that CTA ended before: whoever makes it complete takes it

Row block r, in the order in which heads are worked on, belongs to CTA r mod CTAs, which looks for
the next of its own while it waits for its item. At its end it waits for the rest, but not for ever.

Memory order. A compute warpgroup waits until its additions (TMA, the async proxy) are performed,
fences the proxy and adds 1 to its own number of `added` in shared memory (release, CTA). The fourth
one sees that of both (acquire), fences for the GPU and adds to the counters (relaxed). Who reads a
counter and fences sees all that was added before: the additions to one counter are a chain of
read-modify-writes. A barrier of the warpgroup hands on to its 128 threads what one of them has
seen. One number for both would not do: through items without visits a warpgroup runs ahead of the
other, which may not have added yet.

No deadlock. The only waits without end are for the CTA's own compute warpgroups, for an item and at
last for their registers. They wait for the fourth one nowhere but at its start and at the records
of later items, and it has read its own when it waits. For other CTAs a CTA waits `patience` looks
at most; then it adds LEFT. Of that and the last visit, one comes second and finds LEFT alone. It
exchanges it for TAKEN, so that nobody does so twice.
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

LEFT = 1 << 28  # more than there are visits
TAKEN = 1 << 29
WARPS = THREADS // WARP
LOADS = 2  # of 16 bytes in flight per thread, beside the products
LAST_LOADS, LAST_REGISTERS = 16, 104  # after them
SLEEP_NS = 256  # between two looks


class Cast:
    """The role of the fourth warpgroup; `kernel` has the items."""

    def __init__(self, kernel, dtype, patience):
        self.kernel = kernel
        self.shape = kernel.shape
        self.dtype = jnp.dtype(dtype)
        self.patience = patience
        self.row_blocks = self.shape.sizes.B * self.shape.sizes.N * self.shape.row_blocks

    def run(self, work, index, counters, sums, dq, added, started):
        """Reports every item's visits and takes this CTA's row blocks, or those that were left."""
        cta = lax.axis_index("cta")
        ctas = self.kernel.scheduler.ctas
        own = lax.div(self.row_blocks - 1 - cta, jnp.int32(ctas)) + 1
        own = jnp.where(cta < self.row_blocks, own, 0)
        _reset(added)
        plgpu.barrier_arrive(started)

        def row_of(place):
            return jnp.minimum(cta + place * ctas, self.row_blocks - 1)

        def counter(row):
            return counters.at[pl.ds(row, 1)]

        def take(row, loads=LOADS):
            self.convert(row, sums, dq, loads)

        def after(item, carry):
            turn, place = carry

            def await_item(place):
                return _item_or_row(added, turn + 1, counter(row_of(place)), place < own)

            def take_one(carry):
                place = carry[0]
                take(row_of(place))
                return place + 1, await_item(place + 1)

            place = lax.while_loop(
                lambda carry: carry[1] == 0, take_one, (place, await_item(place))
            )[0]
            head = item.b * self.shape.sizes.N + item.n
            first = head * self.shape.row_blocks
            there = counters.at[pl.ds(first, self.shape.row_blocks)]
            found_left = _report(there, index.at[pl.ds(item.start, 1)], item.count)

            @pl.when(found_left > 0)
            def _():
                @pl.loop(0, item.count)
                def _(visit):
                    row = first + index[item.start + visit]
                    pl.when(_claim(counter(row)) > 0)(lambda: take(row))

            return turn + 1, place

        place = self.kernel.scheduler.for_each_tile(work, after, (0, 0))[1]
        # The compute warpgroups have given theirs back; now nothing hides what is left to do.
        plgpu.set_max_registers(LAST_REGISTERS, action="increase")

        def take_last(place, patience):
            row = row_of(place)
            complete = _is_complete(counter(row), patience)

            def leave():
                _leave(counter(row))
                return _claim(counter(row))

            ready = lax.cond(complete > 0, lambda: complete, leave)
            pl.when(ready > 0)(lambda: take(row, LAST_LOADS))
            return jnp.where(complete > 0, patience, 0)

        lax.fori_loop(place, own, take_last, jnp.int32(self.patience))

    def convert(self, row, sums, dq, loads):
        """scale * sums of a row block -> dq; a thread has so many loads of 16 bytes in flight."""
        head, i = div_rem(row, self.shape.row_blocks)
        b, n = div_rem(head, self.shape.sizes.N)
        first = i * self.shape.block[0]
        left = jnp.minimum(sums.shape[1] - first, self.shape.block[0])  # rows
        lanes = self.shape.sizes.H * 4 // 16  # of a warp for a row
        together = WARP // lanes  # rows of a warp's load
        stride = self.shape.sizes.N * self.shape.sizes.H * 4  # bytes from row to row of sums
        of_warp, of_all = loads * together, WARPS * loads * together  # rows at a time
        kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[self.dtype.name]
        scale = "0f" + struct.pack(">f", self.kernel.scale).hex().upper()
        x = [[f"x{load}_{i}" for i in range(4)] for load in range(loads)]
        lines = [
            ".reg .pred in; .reg .b32 t, row; .reg .b64 a, o;",
            f".reg .b32 y<2>; .reg .f32 {', '.join(name for names in x for name in names)};",
            f"mov.u32 t, %tid.x; shr.u32 row, t, 5; and.b32 row, row, {WARPS - 1};",
            f"mul.lo.u32 row, row, {of_warp}; and.b32 t, t, {WARP - 1};",
            f"shr.u32 y0, t, {lanes.bit_length() - 1}; add.u32 row, row, y0;",
            f"and.b32 t, t, {lanes - 1};",
            f"mad.wide.u32 a, row, {stride}, $0; mad.wide.u32 a, t, 16, a;",
            f"mad.wide.u32 o, row, {stride // 2}, $1; mad.wide.u32 o, t, 8, o;",
            "sub.s32 row, $2, row;",  # from here to the end
            'NEXT: .pragma "nounroll"; setp.gt.s32 in, row, 0; @!in bra OUT;',
        ]
        # There are whole eights of rows. A warp that has more at a time looks at each of them.
        within = ["setp.gt.s32 in, row, {};", "@in "] if of_warp > 8 else ["", ""]
        for load, names in enumerate(x):
            to = f"{{{', '.join(names)}}}, [a+{load * together * stride}]"
            lines.append(within[0].format(load * together))
            lines.append(f"{within[1]}ld.relaxed.gpu.global.v4.f32 {to};")
        for load, names in enumerate(x):
            lines += [f"mul.f32 {name}, {name}, {scale};" for name in names]
            lines += [
                f"cvt.rn.{kind}.f32 y0, {names[1]}, {names[0]};",
                f"cvt.rn.{kind}.f32 y1, {names[3]}, {names[2]};",
                within[0].format(load * together),
                f"{within[1]}st.global.v2.b32 [o+{load * together * stride // 2}], {{y0, y1}};",
            ]
        lines += [
            f"sub.s32 row, row, {of_all}; add.u64 a, a, {of_all * stride};",
            f"add.u64 o, o, {of_all * stride // 2}; bra NEXT;",
            "OUT:",
        ]

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR))
        def emit(_, sums, dq, left):
            asm(lines, "l,l,r", [address(sums), address(dq), left.registers[()]])

        rows = pl.ds(first, self.shape.block[0])
        emit(sums.at[b, rows, n], dq.at[b, rows, n], left)


def report_added(added):
    """A compute warpgroup's additions of an item are in memory: it has waited for them.

    `added` is its own number.
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


# p of one thread to all of them, who thereby see what it has seen.
SHARED = (
    f"barrier.cta.red.or.pred p, {barriers.CAST}, {THREADS}, p;",
    "selp.b32 $0, 1, 0, p;",
)


def _item_or_row(added, want, counter, more):
    """Waits: 1 when both of `added` have reached `want`, 0 when `more` and the counter is 0."""
    lines = [
        *ONE,
        ".reg .pred p, q, m; .reg .b32 x, y;",
        "setp.ne.u32 p, tid, tid; setp.ne.s32 m, $4, 0; @!one bra OUT;",
        "AGAIN: ld.acquire.cta.shared.u32 x, [$1]; ld.acquire.cta.shared.u32 y, [$1+4];",
        "min.s32 x, x, y; setp.ge.s32 p, x, $2; @p bra OUT;",
        "@!m bra SLEEP;",
        "ld.relaxed.gpu.global.u32 x, [$3]; setp.eq.s32 q, x, 0; @q bra SEEN;",
        f"SLEEP: nanosleep.u32 {SLEEP_NS}; bra AGAIN;",
        "SEEN: fence.acq_rel.gpu;",  # one for all looks: each would empty the SM's L1
        "OUT:",
        *SHARED,
    ]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, plgpu.RefType(), SCALAR), return_type=INT32
    )
    def emit(_, added, want, counter, more):
        operands = [shared_address(added), want.registers[()], address(counter), more.registers[()]]
        return as_scalar(asm(lines, "=r,r,r,l,r", operands))

    return emit(added, want, counter, more.astype(jnp.int32))


def _report(counters, index, count):
    """+ 1 for each of an item's visits, by a thread each; 1 if one of them completed a LEFT."""
    lines = [
        ".reg .pred p, q; .reg .b32 v, row; .reg .b64 a;",
        "mov.u32 v, %tid.x; and.b32 v, v, 127; setp.ne.u32 p, v, v;",
        "fence.proxy.async.global; fence.acq_rel.gpu;",
        "NEXT: setp.ge.s32 q, v, $3; @q bra OUT;",
        "mad.wide.u32 a, v, 4, $2; ld.global.u32 row, [a]; mad.wide.u32 a, row, 4, $1;",
        "atom.relaxed.gpu.global.add.u32 row, [a], 1;",
        f"setp.eq.or.s32 p, row, {LEFT - 1}, p; add.u32 v, v, {THREADS}; bra NEXT;",
        "OUT:",
        *SHARED,
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR), return_type=INT32)
    def emit(_, counters, index, count):
        operands = [address(counters), address(index), count.registers[()]]
        return as_scalar(asm(lines, "=r,l,l,r", operands))

    return emit(counters, index, count)


def _is_complete(counter, patience):
    """1 as soon as the counter says complete, 0 after so many looks."""
    lines = [
        *ONE,
        ".reg .pred p, q; .reg .b32 x, n; mov.u32 n, $2;",
        "setp.ne.u32 p, tid, tid; @!one bra OUT;",
        "AGAIN: ld.relaxed.gpu.global.u32 x, [$1]; setp.eq.s32 p, x, 0; @p bra SEEN;",
        "setp.eq.u32 q, n, 0; @q bra OUT;",
        f"sub.u32 n, n, 1; nanosleep.u32 {SLEEP_NS}; bra AGAIN;",
        "SEEN: fence.acq_rel.gpu;",
        "OUT:",
        *SHARED,
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=INT32)
    def emit(_, counter, patience):
        return as_scalar(asm(lines, "=r,l,r", [address(counter), patience.registers[()]]))

    return emit(counter, patience)


def _claim(counter):
    """1 for the one who exchanges LEFT, with all visits there, for TAKEN."""
    lines = [
        *ONE,
        ".reg .pred p; .reg .b32 x; setp.ne.u32 p, tid, tid; @!one bra OUT;",
        f"atom.acq_rel.gpu.global.cas.b32 x, [$1], {LEFT}, {TAKEN}; setp.eq.s32 p, x, {LEFT};",
        "OUT:",
        *SHARED,
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=INT32)
    def emit(_, counter):
        return as_scalar(asm(lines, "=r,l", [address(counter)]))

    return emit(counter)


def _leave(counter):
    """+ LEFT."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_, counter):
        lines = [*ONE, f"@one red.relaxed.gpu.global.add.u32 [$0], {LEFT};"]
        asm(lines, "l", [address(counter)])

    emit(counter)
