"""One value per row of a tile, from registers to memory (Hopper, sm90).

Four threads have the same two rows: the first of them writes one row, the second the other.
"""

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from xsake.backends.hopper.bias_tile import WARP_ROWS, moved, warp_and_lane
from xsake.backends.hopper.interval_tile import GROUP, OWN, scalar
from xsake.backends.hopper.layouts import ROW
from xsake.backends.hopper.ptx import asm, i32, shared_address

OWNER = (
    ".reg .pred own; .reg .b32 tid; mov.u32 tid, %tid.x; and.b32 tid, tid, 3;",
    "setp.lt.u32 own, tid, 2;",
)


def store_rows(x, ref, interpret, *, in_shared=False):
    """ref = x; ref is float32 [64] in global memory, or in shared memory."""
    if interpret:
        ref[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW))
    def emit(_, ref, x):
        row, value = own_row(x)
        if in_shared:
            address = arith.addi(shared_address(ref), arith.muli(row, i32(4)))
            asm([*OWNER, "@own st.shared.f32 [$0], $1;"], "r,f", [address, value])
        else:
            asm([*OWNER, "@own st.global.f32 [$0], $1;"], "l,f", [moved(ref, row, 4), value])

    emit(ref, x)


def own_row(x):
    """(the row that a thread writes, its value)."""
    warp, lane = warp_and_lane()
    row = arith.addi(arith.muli(warp, i32(WARP_ROWS)), arith.divui(lane, i32(GROUP // OWN)))
    half = arith.remui(lane, i32(OWN))
    is_second = arith.cmpi(arith.CmpIPredicate.ne, half, i32(0))
    first, second = map(scalar, x.registers.flat)
    return arith.addi(row, arith.muli(half, i32(GROUP))), arith.select(is_second, second, first)
