"""Marks for tests that need a newer JAX, the Mosaic interpreter or a GPU."""

from __future__ import annotations

import pytest

from xsake import _jax
from xsake.backends import hopper

needs_newer_jax = pytest.mark.skipif(
    _jax.version() < hopper.limits.NEEDS_JAX, reason="the kernels need a newer JAX than this"
)
needs_interpreter = pytest.mark.skipif(
    _jax.version() < (0, 11, 2), reason="Mosaic's interpreter came with JAX 0.11.2"
)
needs_gpu = pytest.mark.skipif(
    _jax.platform() != "gpu", reason="the kernels themselves run on a GPU only"
)
