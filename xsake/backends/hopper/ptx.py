"""PTX inside the Hopper kernels (sm90), where Pallas has no words for it."""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

# Named barriers; 0 to 4 belong to Mosaic (the CTA and its warpgroups).
COMPUTE_BARRIER, CAST_BARRIER = 5, 6

SCALAR = plgpu.Layout.WG_SPLAT
NUMBER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
# One thread of the warpgroup is `one`.
ONE = (
    ".reg .pred one; .reg .b32 tid; mov.u32 tid, %tid.x; and.b32 tid, tid, 127;",
    "setp.eq.u32 one, tid, 0;",
)


def asm(lines, constraints="", operands=()):
    """The lines in a scope of their own, with an int32 as result if the constraints name one."""
    result = ir.IntegerType.get_signless(32) if "=" in constraints else None
    return llvm.inline_asm(
        result or ir.Type.parse("!llvm.void"),
        list(operands),
        "{ " + "\n".join(lines) + " }",
        constraints,
        has_side_effects=True,
    )


def number(value):
    """An int32 that asm() returned, as Pallas takes it."""
    return mgpu.FragmentedArray.splat(value, shape=(), is_signed=True)


def pointer(ref):
    """Where a ref begins."""
    return mgpu.utils.memref_ptr(ref)


def shared(ref):
    """The same of a ref in shared memory, in 32 bits."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))
