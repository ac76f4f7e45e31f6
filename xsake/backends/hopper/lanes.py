"""Kernels of one warpgroup in which every thread has its own value (Hopper, sm90).

A lane is one of the 128 threads of the warpgroup here. The interpreter has no loads and stores by
lane; tests/backends/hopper/lane_emulator.py runs the kernels on a CPU.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector

from xsake.backends.hopper.layouts import THREADS, div_rem
from xsake.backends.hopper.ptx import address, asm, i32, shared_address

LANES = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)  # one value per thread
OCTET = 8  # values of 16 bits in the widest load of a thread
OCTETS = plgpu.Layout.WG_STRIDED((THREADS * OCTET,), vec_size=OCTET)
UNROLL = 16  # iterations whose loads are issued together


def launch(body, name, out_type, grid, operands, approx_math=False, **scratch):
    """The results of body(*operands, *results, **scratch), one warpgroup per cell of the grid.

    approx_math: exp2 and log2 are single instructions, without numbers below 2⁻¹²⁶.
    """
    return plgpu.kernel(
        body,
        out_type=tuple(out_type),
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=approx_math,
            unsafe_no_auto_barriers=True,  # the bodies have their own barriers for shared memory
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )(*operands)


def for_each(size, step, state):
    """state = step(16 indices, state) over 0 … size - 1; the last indices may be ≥ size."""

    def several(turn, state):
        return step([turn * UNROLL + more for more in range(UNROLL)], state)

    turns = lax.div(jnp.int32(size) + (UNROLL - 1), jnp.int32(UNROLL))
    return lax.fori_loop(0, turns, several, state)


def for_each_entry(index, head_offset, start, count, capacity, step, state):
    """state = step(rank, entry, valid, state) over the entries of the lanes' lists.

    A head's part of `index` begins at head_offset and has `capacity` entries; a lane's list begins
    at `start` in it. Past the end of a lane's list the entry is arbitrary and `valid` is false.
    """

    def several(ranks, state):
        entries = [gather(index, head_offset + jnp.minimum(start + t, capacity - 1)) for t in ranks]
        for t, entry in zip(ranks, entries, strict=True):
            state = step(t, entry, t < count, state)
        return state

    return for_each(count.max(), several, state)


def lane_index():
    """The index of every lane."""
    return plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=LANES)


def every_lane(value):
    """The same int32 in every lane."""
    return _by_lane(jnp.full((THREADS,), value, jnp.int32))


def sum_of_lanes(values, shared):
    """The sum of the values of all lanes, in every lane; shared is [128] of their dtype.

    There is a barrier after it: the caller may use `shared` again.
    """
    shared[...] = values
    plgpu.commit_smem()

    def add(lanes, total):
        return sum([shared[lane] for lane in lanes], total)

    total = for_each(THREADS, add, every_lane(0).astype(shared.dtype))
    plgpu.commit_smem()
    return total


def div_rem_lanes(x, y):
    """(x // y, x % y) of every lane's x, which is not negative.

    MLIR makes a constant of x % 1, and then fails to translate what it is cast to.
    """
    return (x, every_lane(0)) if y == 1 else div_rem(x, y)


def gather(ref, indices):
    """ref[index] of every lane's index; ref is int32 or float32 [size]."""
    dtype = jnp.dtype(ref.dtype)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), LANES),
        return_type=plgpu.ShapeDtypeStruct((THREADS,), dtype, layout=LANES),
    )
    def emit(_, ref, indices):
        return indices.foreach(
            lambda at, _: memref.load(ref, [_index(at)]),
            create_array=True,
            is_signed=True if dtype == jnp.int32 else None,
        )

    return emit(ref, indices)


def scatter(ref, indices, values):
    """ref[index] = value in every lane whose index is not negative; int32 or float32 [size]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LANES, LANES))
    def emit(_, ref, indices, values):
        at, value = map(_own, (indices, values))
        valid = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sge, at, i32(0)))
        with ir.InsertionPoint(valid.regions[0].blocks[0]):
            memref.store(value, ref, [_index(at)])
            scf.yield_([])

    emit(ref, indices, values)


def gather_eight(ref, indices):
    """ref[8 index + i] of every lane's index in float32, a tuple for i = 0 … 7.

    ref is bfloat16 or float16 [size] in global memory, which begins at a multiple of 16 bytes.
    """
    wide = plgpu.ShapeDtypeStruct((THREADS,), jnp.float32, layout=LANES)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LANES), return_type=(wide,) * OCTET)
    def emit(_, ref, indices):
        single = ir.VectorType.get((1,), ir.F32Type.get())
        loaded = llvm.load(_octet(ref), _octet_address(ref, _own(indices)), alignment=16)
        values = arith.extf(ir.VectorType.get((OCTET,), ir.F32Type.get()), loaded)
        each = (vector.extract(values, [], [i]) for i in range(OCTET))
        return tuple(_array(vector.broadcast(single, x), LANES) for x in each)

    return emit(ref, indices)


def copy_eight(source, indices, target, places):
    """target[8 place + i] = source[8 index + i] for i = 0 … 7, in lanes whose place is ≥ 0.

    Both are of one dtype of 16 bits, in global memory, and begin at multiples of 16 bytes.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LANES, plgpu.RefType(), LANES))
    def emit(_, source, indices, target, places):
        at, slot = map(_own, (indices, places))
        valid = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sge, slot, i32(0)))
        with ir.InsertionPoint(valid.regions[0].blocks[0]):
            loaded = llvm.load(_octet(source), _octet_address(source, at), alignment=16)
            llvm.store(loaded, _octet_address(target, slot), alignment=16)
            scf.yield_([])

    emit(source, indices, target, places)


def add_one(ref, indices):
    """ref[index] += 1 for every lane whose index is not negative; ref is int32 in shared memory."""
    lines = [
        ".reg .pred p; .reg .b32 a; mad.lo.s32 a, $1, 4, $0;",
        "setp.ge.s32 p, $1, 0; @p red.shared.add.u32 [a], 1;",
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LANES))
    def emit(_, ref, indices):
        at = _own(indices)
        asm(lines, "r,r", [shared_address(ref), at])

    emit(ref, indices)


def copy_octets(ref, first, stride, count, to, valid=None):
    """to[r, lane] = octet number first[lane] + r · stride of ref, for r < count; asynchronous.

    Octet i is ref[8 i : 8 i + 8], 16 bytes of global memory; values have 16 bits. `to` is in shared
    memory, [count · 128 · 8]. From r = valid[lane] on, nothing is read, and zeros are written. All
    octets of a call are in flight together; a lane may read its own after `await_copies`, those of
    others after a barrier that follows.
    """
    lanes = [first] if valid is None else [first, valid]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *[LANES] * len(lanes)))
    def emit(_, ref, to, *lanes):
        lines = [
            ".reg .b64 a; .reg .b32 t, bytes; .reg .pred p; mov.u32 t, %tid.x;",
            f"and.b32 t, t, {THREADS - 1}; mad.lo.u32 t, t, 16, $1; mad.wide.u32 a, $2, 16, $0;",
        ]
        for row in range(count):
            copy = f"[t+{row * THREADS * 16}], [a+{row * stride * 16}], 16"
            if valid is not None:
                lines.append(f"setp.gt.s32 p, $3, {row}; selp.b32 bytes, 16, 0, p;")
                copy += ", bytes"
            lines.append(f"cp.async.cg.shared.global {copy};")
        constraints = "l,r" + ",r" * len(lanes)
        asm(lines, constraints, [address(ref), shared_address(to), *map(_own, lanes)])

    emit(ref, to, *lanes)


def await_copies():
    """Waits for the lane's copies."""

    @plgpu.inline_mgpu()
    def emit(_):
        asm(["cp.async.wait_all;"], "~{memory}")

    emit()


def scatter_octets(ref, indices, octets):
    """ref[8 i : 8 i + 8] = a lane's octet, for its index i; 16-bit values in global memory."""
    lines = [
        ".reg .b64 a; mad.wide.u32 a, $1, 16, $0;",
        "st.global.v4.b32 [a], {$2, $3, $4, $5};",
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LANES, OCTETS))
    def emit(_, ref, indices, octets):
        (register,) = octets.registers.flat
        words = mgpu.utils.bitcast(
            register, ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
        )
        words = [vector.extract(words, [], [i]) for i in range(4)]
        asm(lines, "l,r,r,r,r,r", [address(ref), _own(indices), *words])

    emit(ref, indices, octets)


def gather_octets(ref, indices):
    """ref[8 i : 8 i + 8] of every lane's index i; ref is in shared memory."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), LANES),
        return_type=plgpu.ShapeDtypeStruct((THREADS * OCTET,), ref.dtype, layout=OCTETS),
    )
    def emit(_, ref, indices):
        at = mgpu.utils.getelementptr(address(ref), [_own(indices)], _octet(ref))
        return _array(llvm.load(_octet(ref), at, alignment=16), OCTETS)

    return emit(ref, indices)


def sum_octets(ref, count):
    """Σ_r of every lane's octets r < count of ref, float32; ref is as `copy_octets` writes it."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((THREADS * OCTET,), jnp.float32, layout=OCTETS),
    )
    def emit(_, ref):
        return _array(functools.reduce(arith.addf, _float_octets(ref, count)), OCTETS)

    return emit(ref)


def squared_distances(ref, octets, count):
    """Σ (ref[r, lane] - octets[lane])² over each lane's octet, for every r < count; float32.

    ref is as `copy_octets` writes it.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), OCTETS),
        return_type=(plgpu.ShapeDtypeStruct((THREADS,), jnp.float32, layout=LANES),) * count,
    )
    def emit(_, ref, octets):
        (own,) = octets.registers.flat

        def distance(octet):
            away = arith.subf(octet, own)
            first, *others = (vector.extract(away, [], [i]) for i in range(OCTET))
            square = arith.mulf(first, first)
            total = functools.reduce(lambda total, x: llvm.intr_fma(x, x, total), others, square)
            return _array(vector.broadcast(ir.VectorType.get((1,), total.type), total), LANES)

        return tuple(map(distance, _float_octets(ref, count)))

    return emit(ref, octets)


def count_in_warp(flags):
    """(how many earlier lanes of the warp have a flag, how many lanes of it); flags are 0 or 1."""

    def count(lines):
        lines = [
            ".reg .pred p; .reg .b32 all, before; setp.ne.s32 p, $1, 0;",
            "vote.sync.ballot.b32 all, p, -1; mov.u32 before, %lanemask_lt;",
            *lines,
        ]

        @plgpu.inline_mgpu(
            arg_types=(LANES,),
            return_type=plgpu.ShapeDtypeStruct((THREADS,), jnp.int32, layout=LANES),
        )
        def emit(_, flags):
            found = asm(lines, "=r,r", [_own(flags)])
            register = vector.broadcast(ir.VectorType.get((1,), found.type), found)
            return _array(register, LANES, is_signed=True)

        return emit(flags)

    return count(["and.b32 all, all, before; popc.b32 $0, all;"]), count(["popc.b32 $0, all;"])


def exchange(values, distance):
    """The float32 values of lane ^ distance, a lane of the same warp."""

    @plgpu.inline_mgpu(
        arg_types=(LANES,),
        return_type=plgpu.ShapeDtypeStruct((THREADS,), jnp.float32, layout=LANES),
    )
    def emit(_, values):
        (register,) = values.registers.flat
        return _array(mgpu.utils.shfl_bfly(register, distance), LANES)

    return emit(values)


def _float_octets(ref, count):
    """The lane's octets r < count, as vectors of float32."""
    octet = _octet(ref)
    floats = ir.VectorType.get((OCTET,), ir.F32Type.get())
    lane = arith.remui(mgpu.utils.thread_idx(), i32(THREADS))
    for row in range(count):
        at = mgpu.utils.getelementptr(address(ref), [arith.addi(lane, i32(row * THREADS))], octet)
        yield arith.extf(floats, llvm.load(octet, at, alignment=16))


def _own(array):
    """A lane's own value of an array of the layout LANES."""
    (register,) = array.registers.flat
    return vector.extract(register, [], [0])


def _array(register, layout, is_signed=None):
    """The array of which every lane has this register."""
    registers = np.full(1, register, object)
    return mgpu.FragmentedArray(
        _registers=registers, _layout=layout.to_mgpu(), _is_signed=is_signed
    )


def _by_lane(values):
    """Casts values to the layout LANES; constants have another layout by default."""
    return plgpu.layout_cast(values, LANES)


def _index(integer):
    return arith.index_cast(ir.IndexType.get(), integer)


def _octet(ref):
    """The type of eight elements of a ref."""
    return ir.VectorType.get((OCTET,), ir.MemRefType(ref.type).element_type)


def _octet_address(ref, at):
    """The address of octet number `at` of a ref; `at` is read as unsigned."""
    wide = arith.extui(ir.IntegerType.get_signless(64), at)
    return mgpu.utils.getelementptr(address(ref), [wide], _octet(ref))
