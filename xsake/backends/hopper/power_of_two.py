"""Powers of two, some of them by multiplications: the unit for them is the bottleneck of a kernel.

2^x = 2^round(x) · 2^f with f in [-1/2, 1/2]: 2^f is a polynomial, and round(x) is added to the
exponent of its value.
"""

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from xsake.backends.hopper.layouts import TILE

# A polynomial clips x to these, whose powers are normal numbers.
LEAST, MOST = -126.0, 127.0
ROUNDING = 1.5 * 2.0**23  # x + ROUNDING has round(x) in its lowest bits
DEGREE = 4


def coefficients() -> np.ndarray:
    """Of the polynomial, from the constant on; its relative error is less than 4e-6."""
    # interpolation at Chebyshev's nodes is within a small factor of the best polynomial
    found = np.polynomial.Chebyshev.interpolate(np.exp2, DEGREE, domain=[-0.5, 0.5])
    return found.convert(kind=np.polynomial.Polynomial).coef


def powers_of_two(tile, eighths):
    """2^x of a float32 tile; `eighths` of 8 elements by polynomials.

    A polynomial of an x below LEAST, such as -inf, is 2^LEAST; of one above MOST, or NaN, it is
    2^MOST or more.
    """

    @plgpu.inline_mgpu(
        arg_types=(TILE,),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE),
    )
    def emit(_, tile):
        registers = np.empty_like(tile.registers)
        for number, (i, register) in enumerate(np.ndenumerate(tile.registers)):
            # spread evenly, so that both kinds of instructions are always at hand
            lines = _polynomial() if number * eighths % 8 < eighths else _INSTRUCTION
            for lane in range(ir.VectorType(register.type).shape[0]):
                x = vector.extract(register, [], [lane])
                found = llvm.inline_asm(
                    x.type, [x], "{ " + "\n".join(lines) + " }", "=f,f", has_side_effects=False
                )
                register = vector.insert(found, register, [], [lane])
            registers[i] = register
        return mgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=None)

    return emit(tile)


_INSTRUCTION = ("ex2.approx.ftz.f32 $0, $1;",)


def _polynomial() -> list[str]:
    *others, highest = (_literal(c) for c in coefficients())
    return [
        ".reg .f32 x, t, f, p; .reg .b32 i, e;",
        f"max.NaN.f32 x, $1, {_literal(LEAST)}; min.NaN.f32 x, x, {_literal(MOST)};",
        f"add.rn.f32 t, x, {_literal(ROUNDING)}; sub.rn.f32 f, t, {_literal(ROUNDING)};",
        f"sub.rn.f32 f, x, f; mov.f32 p, {highest};",
        *(f"fma.rn.f32 p, p, f, {c};" for c in reversed(others)),
        "mov.b32 e, t; shl.b32 e, e, 23; mov.b32 i, p; add.s32 i, i, e; mov.b32 $0, i;",
    ]


def _literal(number: float) -> str:
    """A float32 as PTX writes it."""
    return f"0f{int(np.float32(number).view(np.uint32)):08X}"
