"""Named barriers of a CTA (PTX `barrier.cta`, 0 to 15), and the use of each.

    all kernels    0            Mosaic: all threads of the CTA
                   1 + w        Mosaic: the threads of warpgroup w
    forward        4, 5         TURN + w: compute warpgroup w may issue its products
                   6 …          the slots of K's ring, then those of V's ring
    with three     5, 6, 7      the same
    compute wgs    8 …          the same
    backward       5            COMPUTE: both compute warpgroups
                   6            CAST: the warpgroup that casts dq

Mosaic has barriers 0 to 3 in a kernel of three warpgroups, such as most forwards, and 0 to 4 in one
of four, such as the backward that casts dq. The interpreter runs no inline PTX: it uses mbarriers.
"""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from xsake.backends.hopper.layouts import COMPUTE_WGS, THREADS
from xsake.backends.hopper.ptx import asm

COUNT = 16  # named barriers of a CTA
TURN = 4
COMPUTE, CAST = 5, 6


def arrive(barrier, warpgroups):
    """Arrives at a barrier that `warpgroups` warpgroups share, without waiting."""
    _named_barrier("arrive", barrier, warpgroups)


def sync(barrier, warpgroups):
    """Arrives at a barrier that `warpgroups` warpgroups share, and waits for the others."""
    _named_barrier("sync", barrier, warpgroups)


def sync_warpgroup(interpret):
    """Waits for the other threads of the warpgroup.

    Not `plgpu.commit_smem`: its fence also waits for this thread's stores to global memory.
    """
    if interpret:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def emit(_):
        mgpu.utils.warpgroup_barrier()

    emit()


def sync_compute():
    """Waits for the other compute warpgroup.

    What both wrote to shared memory before is visible to the products after.
    """
    lines = [
        "fence.proxy.async.shared::cta;",
        f"barrier.cta.sync {COMPUTE}, {COMPUTE_WGS * THREADS};",
    ]

    @plgpu.inline_mgpu()
    def emit(_):
        asm(lines)

    emit()


class FreeSlots:
    """Signals that a slot of a ring was read: from the compute warpgroups to the memory warpgroup.

    On the card these are named barriers, in the interpreter mbarriers.
    """

    def __init__(self, mbarriers, first, consumers, interpret):
        self.mbarriers, self.interpret = mbarriers, interpret
        self.first = first  # the named barrier of slot 0
        self.warpgroups = consumers + 1

    def arrive(self, slot):
        """A compute warpgroup has read the slot."""
        if self.interpret:
            plgpu.barrier_arrive(self.mbarriers.at[slot])
        else:
            arrive(self.first + slot, self.warpgroups)

    def wait(self, slot):
        """The memory warpgroup waits until the slot was read."""
        if self.interpret:
            plgpu.barrier_wait(self.mbarriers.at[slot])
        else:
            sync(self.first + slot, self.warpgroups)


def _named_barrier(action, barrier, warpgroups):
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def emit(_, barrier):
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [barrier.registers[()]],
            f"bar.{action} $0, {warpgroups * THREADS};",
            "r",
            has_side_effects=True,
        )

    emit(jnp.int32(barrier))
