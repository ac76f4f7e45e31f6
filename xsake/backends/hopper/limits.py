"""What the Hopper kernels support. This module imports nothing, so that any layer may ask."""

NEEDS_JAX = (0, 11)
HEAD_SIZES = (64, 128, 256)
BLOCKS = (64, 128)
