"""exp on a CPU, where XLA's own takes nearly as long as a product of blocks.

    x · log2 e = n + f,  |f| ≤ ½         exp(x) = 2^n · (1 + f · c(f))

n comes from rounding: a float32 near 1.5 · 2²³ has no bits left below 1, so its lowest bits are n
plus what was added to it. Moved up to where a float32 keeps its exponent, they are 2^n.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake import _jax

_BIAS = 127  # of a float32's exponent: 2^-127 comes out as 0
_MANTISSA = 23  # its bits below the exponent
_ROUNDER = np.float32(1.5 * 2**_MANTISSA + _BIAS)
_LOG2_E = np.float32(np.log2(np.e))


def _coefficients(degree: int) -> list[np.float32]:
    """c of 2^f = 1 + f · c(f) on [-½, ½], highest power first."""
    f = np.polynomial.chebyshev.chebpts1(64) / 2
    fitted = np.polynomial.Polynomial.fit(f, np.expm1(f * np.log(2)) / f, degree)
    return [np.float32(c) for c in fitted.convert().coef[::-1]]


_HIGHEST, *_LOWER = _coefficients(4)


def exp(x: Array) -> Array:
    """Of x up to about 0, such as differences to a maximum; 0 where it is below 2^-126.5.

    In float32 on a CPU its error, beside a largest value of 1, is that of rounding x.
    """
    if _jax.platform() != "cpu" or x.dtype != jnp.float32:
        return jnp.exp(x)
    power = jnp.maximum(x * _LOG2_E, -_BIAS)  # a NaN stays one
    rounded = lax.bitcast_convert_type(power + _ROUNDER, jnp.int32)
    f = power - (rounded - _ROUNDER.view(np.int32)).astype(jnp.float32)
    c = jnp.full_like(f, _HIGHEST)
    for coefficient in _LOWER:
        c = c * f + coefficient
    two_to_the_n = lax.bitcast_convert_type(
        lax.shift_left(rounded, np.int32(_MANTISSA)), jnp.float32
    )
    # XLA, to which this is cheap arithmetic, would do it again for everyone who reads it
    return lax.optimization_barrier((1 + f * c) * two_to_the_n)
