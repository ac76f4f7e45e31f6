"""Votes of the threads of a warp in the Hopper kernels (sm90)."""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

from xsake.backends.hopper.layouts import ROW


def any_in_warp(x):
    """Whether any row of this warp has x != 1.

    The value may differ between the warps of a warpgroup: no product may depend on it.
    """

    @plgpu.inline_mgpu(
        arg_types=(ROW,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=plgpu.Layout.WG_SPLAT),
    )
    def emit(_, x):
        one = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 1.0))
        changed = None
        for register in x.registers.flat:
            for lane in range(ir.VectorType(register.type).shape[0]):
                value = vector.extract(register, [], [lane])
                differs = arith.cmpf(arith.CmpFPredicate.UNE, value, one)
                changed = differs if changed is None else arith.ori(changed, differs)
        i32 = ir.IntegerType.get_signless(32)
        lanes = arith.constant(i32, ir.IntegerAttr.get(i32, -1))
        return mgpu.FragmentedArray.splat(
            nvvm.vote_sync(lanes, changed, "any"), shape=(), is_signed=False
        )

    return emit(x)
