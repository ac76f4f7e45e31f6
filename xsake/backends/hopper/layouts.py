"""Sizes, register layouts and shared-memory tiles that the Hopper kernels share."""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake import _first_calls

_first_calls.speed_up_first_calls()  # here, because every module with a kernel imports this one

ROWS = 64  # rows of a compute warpgroup: one wgmma tile; 128 rows spill registers at H = 128
COMPUTE_WGS = 2  # compute warpgroups of a CTA
WARP, THREADS = 32, 128  # threads of a warp, of a warpgroup
PANEL = 64  # columns per staging buffer, per handover (handover.py), per copy that adds dq
ALIGNED = 8  # rows of a swizzled tile: Mosaic copies from and to multiples of 8 tokens only
SHARED_BYTES = 226 << 10  # of a CTA, for arrays; its barriers have the other KiB
SHARED_ALIGNMENT = 1 << 10  # of every array there
LOG2E = math.log2(math.e)

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)  # one value per row
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value per column


def tiles(*dims, dtype):
    """Shared memory for products and copies: tiles of 8 rows of 128 bytes, swizzled."""
    return plgpu.SMEM(dims, dtype, transforms=swizzled(dtype))


def swizzled(dtype):
    """How the elements of `tiles` lie in memory."""
    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((ALIGNED, columns)), plgpu.SwizzleTransform(128)


def shared_bytes(scratch):
    """The bytes of the arrays of a kernel's scratch."""
    arrays = [x for x in scratch.values() if not isinstance(x, plgpu.Barrier)]
    sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)
    return sum(round_up(size, SHARED_ALIGNMENT) for size in sizes)


def slot_of(t, stages):
    """The slot of a ring that holds tile number t, counted since the kernel began."""
    return lax.rem(jnp.int32(t), jnp.int32(stages))


def div_rem(x, y):
    """(x // y, x % y) of an int32 x that is not negative."""
    return lax.div(x, jnp.int32(y)), lax.rem(x, jnp.int32(y))


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple that holds `length`."""
    return -(-length // multiple) * multiple


def pad_tokens(x, length):
    """[B, T, ...] with zeros up to `length` tokens; the same array when that is T already."""
    if x.shape[1] == length:
        return x
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
