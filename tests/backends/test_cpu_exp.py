"""exp on a CPU: its error is that of rounding the argument; masked logits give 0, NaN stays NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake import _jax
from xsake.backends.cpu_exp import exp

STEP = np.finfo(np.float32).eps


@pytest.mark.skipif(_jax.platform() != "cpu", reason="other platforms use XLA's exp")
def test_error_is_that_of_rounding_the_argument():
    x = -np.linspace(0, 87, 1_000_003, dtype=np.float32)
    want = np.exp(x.astype(np.float64))
    got = np.asarray(jax.jit(exp)(x), np.float64)
    assert (np.abs(got - want) <= want * STEP * (2 + np.abs(x))).all()
    assert np.abs(got - want).max() <= 2 * STEP


@pytest.mark.parametrize("x", [-np.inf, -1e30, -89.0])
def test_far_below_the_maximum_is_exactly_zero(x):
    assert jax.jit(exp)(jnp.float32(x)) == 0


def test_exp_of_zero_is_exactly_one():
    assert jax.jit(exp)(jnp.float32(0)) == 1


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0xFFFFFFFF])
def test_every_nan_stays_nan(bits):
    x = jax.lax.bitcast_convert_type(jnp.uint32(bits), jnp.float32)
    assert jnp.isnan(jax.jit(exp)(x))


def test_other_dtypes_use_the_exp_of_xla():
    x = jnp.linspace(-3, 0, 7, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(exp(x), jnp.exp(x))
