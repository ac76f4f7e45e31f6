"""Integers of rules: which ones fit, and arithmetic on positions that does not wrap.

Ids and positions are int32. Values that do not fit are refused where they can be read. A traced
int64 array, which JAX has with `jax_enable_x64` only, stays int64: nothing is cut, and kernels,
which have 32 bits, refuse it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

INT_MIN, INT_MAX = np.iinfo(np.int32).min, np.iinfo(np.int32).max
# What to do about a traced argument that has to be known when a call is compiled.
MAKE_STATIC = "under jax.jit name it in static_argnames, or bind it with functools.partial"


def size_of(name: str, value: Any, least: int, most: int | None = INT_MAX) -> int:
    """A whole number from `least` to `most`, or an error that names it."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be a plain integer, got a traced array; {MAKE_STATIC}")
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if is_whole and least <= value and (most is None or value <= most):
        return int(value)
    limit = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise ValueError(f"{name} must be an integer {limit}, got {value!r}")


def integers(name: str, values: Any) -> Array:
    """An integer array of any shape, int32 wherever the values can be read."""
    is_traced = isinstance(values, jax.core.Tracer)
    given = values if isinstance(values, jax.Array) else np.asarray(values)
    if not jnp.issubdtype(given.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers, got {given.dtype}")
    if jnp.can_cast(given.dtype, jnp.int32):
        return jnp.asarray(given).astype(jnp.int32)
    if is_traced:
        if given.dtype == jnp.int64:
            return jnp.asarray(given)
        raise TypeError(
            f"{name} is a traced {given.dtype} array, so nothing can check that its values fit "
            "into int32; cast it with .astype(jnp.int32)"
        )
    return jnp.asarray(fitting(name, np.asarray(given)).astype(np.int32))


def fitting(name: str, values: np.ndarray, dtype: Any = np.int32) -> np.ndarray:
    """The integers, unless one of them does not fit into `dtype`."""
    ends = np.iinfo(dtype)
    outside = values[(values < ends.min) | (values > ends.max)]
    if outside.size:
        raise ValueError(
            f"{name} must fit into {ends.dtype}, from {ends.min} to {ends.max}, "
            f"got {outside.flat[0]}; count from another first number"
        )
    return values


def uncut(name: str, values: Any) -> Array:
    """Any array as JAX has it, unless JAX would cut its integers to 32 bits."""
    if not isinstance(values, jax.Array):
        values = np.asarray(values)
        if np.issubdtype(values.dtype, np.integer):
            fitting(name, values, jax.dtypes.canonicalize_dtype(values.dtype))
    return jnp.asarray(values)


def int_array(name: str, values: Any, ndim: int) -> Array:
    """An integer array of `ndim` axes, a missing leading axis added."""
    out = integers(name, values)
    if out.ndim == ndim - 1:
        out = out[None]
    if out.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes, got shape {out.shape}")
    return out


def minus(positions: Array, size: int) -> Array:
    """positions - size, or the smallest integer where that would wrap round; size ≥ 0."""
    if size == 0:
        return positions
    lowest = int(jnp.iinfo(positions.dtype).min)
    return jnp.maximum(positions, lowest + size) - size
