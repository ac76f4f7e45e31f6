"""A tile without the columns outside one or two intervals of each row, in few instructions.

A thread holds 2 neighbouring columns of every 8, of 2 rows. The columns that an interval keeps are
consecutive among those of a thread: one integer has a bit for each of them, and the compiler turns
its bits into predicates several at a time. Two comparisons for each element take about twice as
long. Two intervals are two such integers; token masks are such integers already (token_words.py).
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from xsake.backends.hopper.layouts import ROW, TILE
from xsake.backends.hopper.ptx import SCALAR, asm, i32

GROUP, OWN = 8, 2  # columns of a group, of which a thread holds this many


def keep_columns(x, limits, fill, words=(), shift=0):
    """x [64, columns] with `fill` outside columns lo … hi - 1 of each row.

    limits: lo, hi of each interval, int32 [64] each.
    words: of token masks, which have to allow a column too; bit `shift` is that of column 0.
    """
    given = (*words, jnp.int32(shift)) if words else ()

    @plgpu.inline_mgpu(
        arg_types=(TILE, *[ROW] * (len(limits) + len(words)), *[SCALAR] * bool(words)),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=TILE),
    )
    def emit(_, x, *given):
        ends, given = given[: len(limits)], given[len(limits) :]
        fill_value = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), fill))
        bits = [
            functools.reduce(
                arith.ori,
                (_kept_bits(*ends[i : i + 2], x.shape[1]) for i in range(0, len(ends), 2)),
            )
            for ends in zip(*([scalar(r) for r in end.registers.flat] for end in ends), strict=True)
        ]
        for word in given[:-1]:
            of_rows = [arith.shrui(scalar(r), given[-1].registers[()]) for r in word.registers.flat]
            bits = [arith.andi(*both) for both in zip(bits, of_rows, strict=True)]
        registers = np.empty_like(x.registers)
        for at in np.ndindex(x.registers.shape):
            group, row = at[1], at[4]
            register = x.registers[at]
            for lane in range(OWN):
                kept = bit(bits[row], group * OWN + lane)
                value = arith.select(kept, vector.extract(register, [], [lane]), fill_value)
                register = vector.insert(value, register, [], [lane])
            registers[at] = register
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)

    return emit(x, *limits, *given)


def scalar(register):
    """The one element of a register."""
    if isinstance(register.type, ir.VectorType):
        return vector.extract(register, [], [0])
    return register


def _kept_bits(lo, hi, columns):
    """A bit for each of a thread's columns of one row, set if lo <= column < hi."""
    thread = mgpu.utils.thread_idx()
    first = arith.muli(arith.andi(thread, i32(GROUP // OWN - 1)), i32(OWN))
    begin, end = (_own_columns_before(arith.subi(x, first), columns) for x in (lo, hi))
    width = arith.maxsi(arith.subi(end, begin), i32(0))
    return asm(["bmsk.clamp.b32 $0, $1, $2;"], "=r,r,r", [begin, width])


def _own_columns_before(column, columns):
    """How many of a thread's columns are before this one, counted from the thread's first."""
    column = arith.minsi(arith.maxsi(column, i32(0)), i32(columns))
    whole = arith.muli(arith.shrui(column, i32(GROUP.bit_length() - 1)), i32(OWN))
    return arith.addi(whole, arith.minsi(arith.andi(column, i32(GROUP - 1)), i32(OWN)))


def bit(bits, number):
    """Whether a bit is set."""
    one = arith.andi(bits, i32(1 << number if number < 31 else -(1 << 31)))
    return arith.cmpi(arith.CmpIPredicate.ne, one, i32(0))
