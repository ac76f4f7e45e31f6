"""Limits of the Hopper kernels. They are defined only here."""

from __future__ import annotations

NEEDS_JAX = (0, 11)
HEAD_SIZES = (64, 128, 256)  # of q and k, and of v; hopper/__init__.py pads other sizes
BLOCKS = (64, 128)  # tokens of a block, on each side
TALL = 192  # rows of a work tile of three compute warpgroups, forward only
TALL_HEAD_SIZE = 64  # the largest with those: registers are shared by more threads
FUSED_SIZE = 128  # the largest head size of the fused backward
OBSERVED_HEAD_SIZE = 128  # the largest with statistics: with 256, shared memory is full


def padded_head_size(size: int) -> int:
    """The smallest head size of the kernels that holds `size`."""
    return next(x for x in HEAD_SIZES if x >= size)
