"""A bias inside one tile of a kernel, and stores of its gradient (Hopper, sm90).

    bias [B|1, N|1, T, S]   every thread loads elements of a tile from global memory; shared memory
                            has no space for them in the backward
    bias [B|1, N|1, 1, S]   one value per key

Elements of 16 bits are loaded in an arrangement that needs few loads, and exchanged when they are
added. In kernels over row blocks a thread needs pairs of keys in every group of 8, and loads 8 keys
in a row; four threads exchange pairs. Or, if the forward's tiling says so, threads copy 8 keys in a
row to shared memory, and `ldmatrix` reads pairs. In kernels over kv blocks a tile is transposed:
its rows are keys. A thread then loads pairs of keys where it needs pairs of queries, and
`movmatrix` transposes 8 × 8 elements at a time.
A bias [B|1, N|1, T, 1] moves the logsumexp of a row and nothing else: no kernel reads it.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from xsake.backends.hopper.interval_tile import GROUP, OWN, scalar
from xsake.backends.hopper.layouts import COLUMN, ROW, ROWS, TILE, WARP
from xsake.backends.hopper.ptx import SCALAR, address, asm, i32, shared_address

WARP_ROWS = 16  # rows of a tile that a warp holds, as two halves of 8
QUAD = GROUP // OWN  # threads that hold 8 keys of a row
CHUNK = 16  # bytes that a thread copies to shared memory at a time


class BiasTile:
    """A bias as a kernel reads it; `axis` is that of its work tiles."""

    def __init__(self, bias, axis, interpret, *, in_shared=False):
        self.exists = bias is not None
        self.axis, self.interpret = axis, interpret
        self.per_key = self.exists and bias.shape[2] == 1
        self.itemsize = bias.dtype.itemsize if self.exists else 0
        self.dtype = bias.dtype if self.exists else None
        of_pairs = self.exists and not self.per_key and self.itemsize == 2 and axis == 0
        self.in_shared = in_shared and of_pairs and not interpret

    @property
    def loads_early(self) -> bool:
        """Whether the registers hold a tile while the products run, before it is needed."""
        return self.exists and (self.per_key or self.itemsize == 2)

    def split(self, refs):
        """(the bias in global memory or None, the refs that follow)."""
        return (refs[0], refs[1:]) if self.exists else (None, refs)

    def scratch(self, warpgroups, columns):
        """Shared memory for a tile [64, columns] of each compute warpgroup, if tiles pass there."""
        if not self.in_shared:
            return {}
        return {"bias_smem": plgpu.SMEM((warpgroups, ROWS * columns), self.dtype)}

    def copy(self, ref, shared, work_tile, first_row, first_column, columns):
        """Begins to copy the tile [64, columns] that begins there, for `add`.

        shared: the warpgroup's own part of what `scratch` names. It has one tile: what was copied
        before has been added.
        """
        _copy_to_shared(_of_head(ref, work_tile), shared, first_row, first_column, columns)

    def load(self, ref, work_tile, first_row, first_column, columns):
        """What `add` needs of the tile [64, columns] that begins there; None without a bias."""
        if not self.exists:
            return None
        gmem = _of_head(ref, work_tile)
        if self.per_key:
            if self.axis == 0:
                keys, layout = pl.ds(first_column, columns), COLUMN
            else:
                keys, layout = pl.ds(first_row, ROWS), ROW
            return plgpu.load(gmem.at[0, keys], layout=layout, optimized=False)
        if self.interpret:
            rows, columns = pl.ds(first_row, ROWS), pl.ds(first_column, columns)
            return gmem[rows, columns] if self.axis == 0 else gmem[columns, rows].T
        if self.axis == 0 and self.itemsize == 2:
            return _load_wide(gmem, first_row, first_column, columns)
        return _load_pairs(gmem, first_row, first_column, columns, self.axis)

    def add(self, x, loaded):
        """x + the bias, in float32. loaded: the result of `load`, or the ref that `copy` filled."""
        if self.per_key:
            loaded = lax.broadcast_in_dim(loaded, x.shape, [1 - self.axis])
        elif self.in_shared:
            loaded = _from_shared(loaded, x.shape[1])
        elif self.itemsize == 2 and not self.interpret:
            loaded = _exchange(loaded) if self.axis == 0 else _transpose_each(loaded)
        return x + loaded.astype(jnp.float32)


def bias_operands(bias, shape):
    """The bias padded to whole blocks: a tile may read past the end; what it finds is masked."""
    if bias is None:
        return ()
    rows = shape.padded_rows if bias.shape[2] > 1 else 1
    more = (0, rows - bias.shape[2]), (0, shape.padded_keys - bias.shape[3])
    return (bias if more == ((0, 0), (0, 0)) else jnp.pad(bias, ((0, 0), (0, 0), *more)),)


def store_tile(x, ref, work_tile, first_row, first_column, *, adds, interpret):
    """A tile of the gradient [B|1, N|1, T', S'] to global memory, from a kernel over row blocks.

    adds: x is added in float32, in any order among the heads and batch rows that share the bias.
    """
    gmem = _of_head(ref, work_tile)
    if interpret:
        gmem[pl.ds(first_row, ROWS), pl.ds(first_column, x.shape[1])] = x.astype(ref.dtype)
        return
    itemsize, stride = ref.dtype.itemsize, ref.shape[-1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, TILE))
    def emit(_, ref, first_row, first_column, x):
        base = _first_address(ref, first_row, first_column, stride, itemsize)
        for at in np.ndindex(x.registers.shape):
            offset = (at[4] * GROUP * stride + at[1] * GROUP) * itemsize
            pair = x.registers[at]
            if itemsize == 4:
                operation = "red.global.add.v2.f32" if adds else "st.global.v2.f32"
                values = [vector.extract(pair, [], [lane]) for lane in range(OWN)]
                asm([f"{operation} [$0+{offset}], {{$1, $2}};"], "l,f,f", [base, *values])
            else:
                word = mgpu.utils.bitcast(pair, ir.IntegerType.get_signless(32))
                asm([f"st.global.b32 [$0+{offset}], $1;"], "l,r", [base, word])

    emit(gmem, first_row, first_column, x.astype(ref.dtype))


def add_rows(x, ref, interpret):
    """ref += x, one value per row of a tile; ref is float32 [64], and no other warpgroup adds."""
    if interpret:
        ref[...] += x
        return
    lines = [
        ".reg .pred own; .reg .b32 tid; mov.u32 tid, %tid.x; and.b32 tid, tid, 3;",
        "setp.eq.u32 own, tid, 0; @own red.global.add.f32 [$0], $1;",
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW))
    def emit(_, ref, x):
        warp, lane = warp_and_lane()
        row = arith.addi(arith.muli(warp, i32(WARP_ROWS)), arith.divui(lane, i32(QUAD)))
        for half, register in enumerate(x.registers.flat):
            at = arith.addi(row, i32(half * GROUP))
            asm(lines, "l,f", [moved(ref, at, 4), scalar(register)])

    emit(ref, x)


def _of_head(ref, work_tile):
    """The matrix of a work tile's batch row and head."""
    b = work_tile.b if ref.shape[0] > 1 else 0
    n = work_tile.n if ref.shape[1] > 1 else 0
    return ref.at[b, n]


def _copy_to_shared(gmem, shared, first_row, first_column, columns):
    """Begins to copy a tile [64, columns] of 16-bit elements; every warp copies its own rows.

    Chunk c of row r, of 16 bytes, is in place c ^ (r % 8) of the row, so that 8 rows of a column
    of chunks are in different banks.
    """
    stride, chunks = gmem.shape[-1], columns * 2 // CHUNK

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR))
    def emit(_, gmem, shared, first_row, first_column):
        first_row, first_column = (x.registers[()] for x in (first_row, first_column))
        warp, lane = warp_and_lane()
        above, chunk = arith.divui(lane, i32(chunks)), arith.remui(lane, i32(chunks))
        row = arith.addi(arith.muli(warp, i32(WARP_ROWS)), above)
        i64 = ir.IntegerType.get_signless(64)
        token = arith.extsi(i64, arith.addi(first_row, row))
        column = arith.addi(first_column, arith.muli(chunk, i32(CHUNK // 2)))
        at = arith.addi(arith.muli(token, _i64(stride)), arith.extsi(i64, column))
        source = moved(gmem, at, 2)
        begin = arith.addi(shared_address(shared), arith.muli(row, i32(chunks * CHUNK)))
        place = arith.muli(arith.xori(chunk, above), i32(CHUNK))
        rows = WARP // chunks  # of one copy
        for i in range(0, WARP_ROWS, rows):
            to = arith.addi(begin, arith.xori(place, i32(i % GROUP * CHUNK)))
            copy = (
                f"cp.async.cg.shared.global [$0+{i * chunks * CHUNK}], [$1+{i * stride * 2}], 16;"
            )
            asm([copy], "r,l", [to, source])

    emit(gmem, shared, first_row, first_column)


def _from_shared(shared, columns):
    """The tile [64, columns] that `_copy_to_shared` has copied."""
    chunks = columns * 2 // CHUNK

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((ROWS, columns), shared.dtype, layout=TILE),
    )
    def emit(_, ref):
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((ROWS, columns)), object)
        pair = ir.VectorType.get((OWN,), ir.MemRefType(ref.type).element_type)
        asm(["cp.async.wait_all;", "bar.warp.sync 0xffffffff;"])
        # Every lane has the address of a row of 8 elements: of rows 0-7, of rows 8-15, and of both
        # again in the next 8 columns.
        warp, lane = warp_and_lane()
        matrix, row = arith.divui(lane, i32(GROUP)), arith.remui(lane, i32(GROUP))
        below = arith.muli(arith.remui(matrix, i32(2)), i32(GROUP))
        first = arith.addi(arith.muli(warp, i32(WARP_ROWS)), arith.addi(below, row))
        begin = arith.addi(shared_address(ref), arith.muli(first, i32(chunks * CHUNK)))
        place = arith.muli(arith.xori(arith.divui(matrix, i32(2)), row), i32(CHUNK))
        for at in np.ndindex(registers.shape):
            if at[1] % 2 or at[4]:
                continue
            words = _read_matrices(arith.addi(begin, arith.xori(place, i32(at[1] * CHUNK))))
            for (groups, half), word in zip(np.ndindex(2, 2), words, strict=True):
                to = (*_moved(at, groups)[:4], half, *at[5:])
                registers[to] = mgpu.utils.bitcast(word, pair)
        asm(["bar.warp.sync 0xffffffff;"])  # the next copy may overwrite what other lanes read
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return emit(shared)


def _load_wide(gmem, first_row, first_column, columns):
    """A tile [64, columns] of a matrix of 16-bit elements, before its `_exchange`.

    Of 32 keys, a thread has four pairs that follow each other: one load instead of four. Loads of
    pairs are limited by the rows that each touches.
    """
    stride, dtype = gmem.shape[-1], gmem.dtype

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((ROWS, columns), dtype, layout=TILE),
    )
    def emit(_, ref, first_row, first_column):
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((ROWS, columns)), object)
        base = _first_address(ref, first_row, first_column, stride, 2, own=QUAD * OWN)
        pair = ir.VectorType.get((OWN,), ir.MemRefType(ref.type).element_type)
        for at in _quads(registers):
            offset = (at[4] * GROUP * stride + at[1] * GROUP) * 2
            for x, word in enumerate(_read_words(base, offset)):
                registers[_moved(at, x)] = mgpu.utils.bitcast(word, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return emit(gmem, first_row, first_column)


def _exchange(x):
    """The tile that `_load_wide` began: in the four threads of a row, pairs are transposed."""

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=TILE)
    )
    def emit(_, x):
        registers = np.empty_like(x.registers)
        thread = mgpu.utils.thread_idx()
        int32 = ir.IntegerType.get_signless(32)
        for at in _quads(registers):
            words = [mgpu.utils.bitcast(x.registers[_moved(at, i)], int32) for i in range(QUAD)]
            for bit in (1, 2):
                upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(thread, i32(bit)), i32(0))
                for i in range(QUAD):
                    if not i & bit:
                        words[i], words[i | bit] = _swapped(words[i], words[i | bit], bit, upper)
            for i, word in enumerate(words):
                registers[_moved(at, i)] = mgpu.utils.bitcast(word, x.registers[at].type)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return emit(x)


def _swapped(low, high, bit, upper):
    """Two words; a thread's high one and the low one of its partner, `upper`, change places."""
    sent = arith.select(upper, low, high)
    got = asm([f"shfl.sync.bfly.b32 $0, $1, {bit}, 31, -1;"], "=r,r", [sent])
    return arith.select(upper, got, low), arith.select(upper, high, got)


def _quads(registers):
    """The first index of every four registers, which hold 32 keys of a row for four threads."""
    return (at for at in np.ndindex(registers.shape) if at[1] % QUAD == 0)


def _moved(at, groups):
    """The index of the register so many groups of 8 keys further."""
    return (at[0], at[1] + groups, *at[2:])


def _load_pairs(gmem, first_row, first_column, columns, axis):
    """A tile [64, columns] of a matrix, in its dtype.

    axis 1: of the transposed matrix; elements of 16 bits are yet to be transposed, 8 × 8 at a time.
    """
    itemsize, stride, dtype = gmem.dtype.itemsize, gmem.shape[-1], gmem.dtype
    one_by_one = axis == 1 and itemsize == 4

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((ROWS, columns), dtype, layout=TILE),
    )
    def emit(_, ref, first_row, first_column):
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((ROWS, columns)), object)
        base = _first_address(ref, first_row, first_column, stride, itemsize, axis)
        pair = ir.VectorType.get((OWN,), ir.MemRefType(ref.type).element_type)
        for at in np.ndindex(registers.shape):
            group, half = at[1] * GROUP, at[4] * GROUP
            row, column = (half, group) if axis == 0 else (group, half)
            offset = (row * stride + column) * itemsize
            if one_by_one:
                values = [_read(base, offset + x * stride * itemsize, "f") for x in range(OWN)]
                registers[at] = vector.from_elements(pair, values)
            else:
                word = _read(base, offset, "r" if itemsize == 2 else "l")
                registers[at] = mgpu.utils.bitcast(word, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return emit(gmem, first_row, first_column)


def _transpose_each(x):
    """Every 8 × 8 elements of a tile transposed; they are of 16 bits."""

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=TILE)
    )
    def emit(_, x):
        registers = np.empty_like(x.registers)
        for at in np.ndindex(registers.shape):
            word = mgpu.utils.bitcast(x.registers[at], ir.IntegerType.get_signless(32))
            word = asm(["movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"], "=r,r", [word])
            registers[at] = mgpu.utils.bitcast(word, x.registers[at].type)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return emit(x)


def _first_address(ref, first_row, first_column, stride, itemsize, axis=0, own=OWN):
    """The address of a thread's first element of a tile, as an int64.

    axis 1: the tile's rows are the matrix's columns. own: elements of a thread that follow it.
    """
    first_row, first_column = (x.registers[()] for x in (first_row, first_column))
    warp, lane = warp_and_lane()
    row, pair = arith.divui(lane, i32(QUAD)), arith.remui(lane, i32(QUAD))
    pair = arith.muli(pair, i32(own))
    above = arith.muli(warp, i32(WARP_ROWS))
    if axis == 0:
        row = arith.addi(first_row, arith.addi(above, row))
        column = arith.addi(first_column, pair)
    elif itemsize == 2:  # pairs of keys, for movmatrix
        row = arith.addi(first_column, row)
        column = arith.addi(first_row, arith.addi(above, pair))
    else:
        row, column = arith.addi(first_column, pair), arith.addi(first_row, arith.addi(above, row))
    i64 = ir.IntegerType.get_signless(64)
    wide = arith.muli(arith.extsi(i64, row), _i64(stride))
    return moved(ref, arith.addi(wide, arith.extsi(i64, column)), itemsize)


def moved(ref, elements, itemsize):
    """The address of an element of a ref, as an int64."""
    i64 = ir.IntegerType.get_signless(64)
    if elements.type != i64:
        elements = arith.extsi(i64, elements)
    return arith.addi(llvm.ptrtoint(i64, address(ref)), arith.muli(elements, _i64(itemsize)))


def warp_and_lane():
    """A thread's warp in its warpgroup, and its lane in the warp."""
    thread = mgpu.utils.thread_idx()
    warps = ROWS // WARP_ROWS
    return (
        arith.remui(arith.divui(thread, i32(WARP)), i32(warps)),
        arith.remui(thread, i32(WARP)),
    )


def _read(base, offset, kind):
    """Loads an int32 ("r"), an int64 ("l") or a float32 ("f") that no thread writes."""
    types = {
        "r": (ir.IntegerType.get_signless(32), "b32"),
        "l": (ir.IntegerType.get_signless(64), "b64"),
        "f": (ir.F32Type.get(), "f32"),
    }
    result, suffix = types[kind]
    return llvm.inline_asm(
        result,
        [base],
        f"ld.global.nc.{suffix} $0, [$1+{offset}];",
        f"={kind},l",
        has_side_effects=True,
    )


def _read_words(base, offset):
    """Loads four int32 that follow each other, which no thread writes."""
    int32 = ir.IntegerType.get_signless(32)
    words = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
        [base],
        f"ld.global.nc.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];",
        "=r,=r,=r,=r,l",
        has_side_effects=True,
    )
    return [llvm.extractvalue(int32, words, [i]) for i in range(QUAD)]


def _read_matrices(address):
    """Loads four int32, of four 8 × 8 matrices of 16-bit elements in shared memory."""
    int32 = ir.IntegerType.get_signless(32)
    words = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
        [address],
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r",
        has_side_effects=True,
    )
    return [llvm.extractvalue(int32, words, [i]) for i in range(QUAD)]


def _i64(number):
    kind = ir.IntegerType.get_signless(64)
    return arith.constant(kind, ir.IntegerAttr.get(kind, number))
