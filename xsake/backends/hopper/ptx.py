"""Inline PTX for the Hopper kernels (sm90), where Pallas has no operation of its own."""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

SCALAR = plgpu.Layout.WG_SPLAT
INT32 = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
# Declares the predicate `one`, which is true in one thread of the warpgroup.
ONE = (
    ".reg .pred one; .reg .b32 tid; mov.u32 tid, %tid.x; and.b32 tid, tid, 127;",
    "setp.eq.u32 one, tid, 0;",
)


def asm(lines, constraints="", operands=()):
    """Emits the lines in a scope of their own; returns an int32 if the constraints name one."""
    result = ir.IntegerType.get_signless(32) if "=" in constraints else None
    return llvm.inline_asm(
        result or ir.Type.parse("!llvm.void"),
        list(operands),
        "{ " + "\n".join(lines) + " }",
        constraints,
        has_side_effects=True,
    )


def i32(number):
    """An int32 constant."""
    kind = ir.IntegerType.get_signless(32)
    return arith.constant(kind, ir.IntegerAttr.get(kind, number))


def as_scalar(value):
    """The int32 that asm() returned, as a Pallas scalar."""
    return mgpu.FragmentedArray.splat(value, shape=(), is_signed=True)


def address(ref):
    """The address of a ref's first element."""
    return mgpu.utils.memref_ptr(ref)


def shared_address(ref):
    """The 32-bit address of the first element of a ref in shared memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def opaque(scalar):
    """The same int32 scalar; the compiler cannot move this computation out of a loop."""

    @plgpu.inline_mgpu(arg_types=(SCALAR,), return_type=INT32)
    def emit(_, scalar):
        return as_scalar(asm(["mov.b32 $0, $1;"], "=r,r", [scalar.registers[()]]))

    return emit(jnp.int32(scalar))
