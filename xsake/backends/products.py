"""Products and logits in plain JAX, in a precision that is fast and accurate on each device."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from xsake import _jax


def operand(x: Array) -> Array:
    """x as products take it: CPUs have no fast half-precision product, so they get float32."""
    return x.astype(jnp.float32) if _jax.platform() == "cpu" and x.dtype.itemsize < 4 else x


def product(spec: str, a: Array, b: Array, dtype: Any) -> Array:
    """A batched product, summed in `dtype`; a GPU does not round float32 to TF32."""
    exact = lax.Precision.HIGHEST if a.dtype.itemsize >= 4 else None
    return jnp.einsum(spec, a, b.astype(a.dtype), preferred_element_type=dtype, precision=exact)


def sum_last(x: Array) -> Array:
    """Sums over the last axis, a short one."""
    if _jax.platform() != "cpu":
        return x.sum(-1)
    return x @ jnp.ones(x.shape[-1], x.dtype)  # XLA's own reduction is far slower on CPUs


def scaled(x: Array, scale: float, dtype: Any) -> tuple[Array, float]:
    """(scale · x, 1) if x has the accumulator's `dtype`, so that no bits are lost; else both."""
    return (x * scale, 1.0) if x.dtype == dtype else (x, scale)


def logits(q: Array, k: Array, scale: float, soft_cap: float | None, dtype: Any) -> Array:
    """scale · q kᵀ, soft-capped."""
    s = product("...qh,...kh->...qk", q, k, dtype) * scale
    return s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)
