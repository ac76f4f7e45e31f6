"""Token masks as bits, in the order in which the threads of a warpgroup hold a tile.

Of every 8 columns of a tile, a thread holds 2 neighbours; 4 threads share a row (interval_tile.py).
The bits of a thread's columns of one row, for 128 columns, are one word:

    bit 2 g + j of word c   column 8 g + 2 c + j of the 128,   c = 0 … 3,  g = 0 … 15,  j = 0, 1

so a thread reads one word for each of its two rows. A kernel over row blocks has queries in its
rows and keys in its columns, a kernel over kv blocks the reverse. The words are in memory so that
packing and loading are both coalesced:

    rows are queries   [B|1, N|1, T', 4 · chunks of 128 keys]
    rows are keys      [B|1, N|1, 4 · chunks of 128 queries, S']

T' and S' are whole blocks; bits past the end are 0. A broadcast axis of the mask is an axis of 1.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from xsake.backends.hopper.interval_tile import GROUP, OWN, bit, scalar
from xsake.backends.hopper.layouts import ROW, ROWS, TILE, div_rem, round_up
from xsake.backends.hopper.ptx import SCALAR, i32

CHUNK = 128  # columns of a word of each of 4 threads
SHARED = GROUP // OWN  # threads of a row


def pack(mask, shape, axis):
    """A bool mask [B|1, N|1, T|1, S|1] as words; axis 0: rows are queries, 1: rows are keys."""
    _, _, T, S = mask.shape
    if axis == 0:
        return _pad(_words(mask, 3), 2, shape.padded_rows if T > 1 else 1)
    return _pad(_words(mask, 2), 3, shape.padded_keys if S > 1 else 1)


def _words(mask, axis):
    """Words in place of the bools of an axis, 4 for every 128; 1 for a broadcast axis."""
    if mask.shape[axis] == 1:
        return jnp.where(mask, jnp.int32(-1), jnp.int32(0))
    mask = _pad(mask, axis, round_up(mask.shape[axis], CHUNK))
    before, after = mask.shape[:axis], mask.shape[axis + 1 :]
    parts = mask.reshape(*before, -1, CHUNK // GROUP, SHARED, OWN, *after)
    bits = np.arange(CHUNK // SHARED).reshape(CHUNK // GROUP, 1, OWN)
    weights = (np.uint32(1) << bits.astype(np.uint32)).reshape(*bits.shape, *[1] * len(after))
    words = jnp.where(parts, weights, np.uint32(0)).sum((axis + 1, axis + 3), dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32).reshape(*before, -1, *after)


def _pad(x, axis, length):
    if x.shape[axis] == length:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)


def load(ref, work_tile, first_row, first_column, axis, interpret):
    """The words of 64 rows and the 128 columns around `first_column`.

    On the card an int32 vector of 64 rows, in which each of the threads of a row has its own
    word: only `keep_columns` and `tile` may read it. Interpreted, int32 [64, 4].
    """
    b = work_tile.b if ref.shape[0] > 1 else 0
    n = work_tile.n if ref.shape[1] > 1 else 0
    words, rows = ref.shape[2:][::-1] if axis == 0 else ref.shape[2:]
    first_word = lax.div(first_column, jnp.int32(CHUNK)) * SHARED
    if interpret:
        return _interpreted(ref, b, n, rows, words, first_row, first_word, axis)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + first_row

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ROW, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.int32, layout=ROW),
    )
    def emit(_, ref, row, first_word):
        own = arith.andi(mgpu.utils.thread_idx(), i32(SHARED - 1))
        word = i32(0) if words == 1 else arith.addi(first_word.registers[()], own)
        registers = np.empty_like(row.registers)
        for at in np.ndindex(registers.shape):
            place = [i32(0) if rows == 1 else scalar(row.registers[at]), word]
            value = memref.load(ref, [_index(x) for x in (place if axis == 0 else place[::-1])])
            registers[at] = vector.broadcast(row.registers[at].type, value)
        return mgpu.FragmentedArray(_registers=registers, _layout=row.layout, _is_signed=True)

    return emit(ref.at[b, n], row, first_word)


def _interpreted(ref, b, n, rows, words, first_row, first_word, axis):
    pick_rows = slice(0, 1) if rows == 1 else pl.ds(first_row, ROWS)
    pick_words = slice(0, 1) if words == 1 else pl.ds(first_word, SHARED)
    found = ref[b, n, pick_rows, pick_words] if axis == 0 else ref[b, n, pick_words, pick_rows].T
    return jnp.broadcast_to(found, (ROWS, SHARED))


def shift_of(first_column, columns):
    """The first bit of a tile of 64 or 128 columns in its words."""
    if columns == CHUNK:
        return jnp.int32(0)
    _, inside = div_rem(first_column, CHUNK)
    return lax.div(inside, jnp.int32(SHARED))


def tile(words, shift, columns, interpret):
    """Words as bools [64, columns]."""
    if interpret:
        column = jnp.arange(columns)
        number = column // GROUP * OWN + column % OWN + shift
        own = words[:, column % GROUP // OWN]
        return (own >> number) & 1 > 0

    @plgpu.inline_mgpu(
        arg_types=(ROW, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((ROWS, columns), jnp.int32, layout=TILE),
    )
    def emit(_, words, shift):
        shift = shift.registers[()]
        rows = [arith.shrui(scalar(x), shift) for x in words.registers.flat]
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((ROWS, columns)), object)
        pair = ir.VectorType.get((OWN,), ir.IntegerType.get_signless(32))
        for at in np.ndindex(registers.shape):
            group, row = at[1], at[4]
            kept = [arith.extui(i32(0).type, bit(rows[row], group * OWN + x)) for x in range(OWN)]
            registers[at] = vector.from_elements(pair, kept)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return emit(words, shift) > 0


def _index(integer):
    return arith.index_cast(ir.IndexType.get(), integer)
