"""What test_probes.py and test_transformations.py share."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests import oracle
from tests.draws import BACKENDS, FAST_COMPILATION
from xsake import BlockMask

# `dense` has the formulas of `reference`, and more to get wrong.
every_backend = pytest.mark.parametrize(
    "backend",
    [pytest.param(x, marks=[pytest.mark.slow] * (x == "reference")) for x in BACKENDS],
)
# `dense` too knows nothing of blocks, lists and loops; test_conformance.py and test_properties.py
# compare it with the oracle.
by_blocks = pytest.mark.parametrize(
    "backend", [pytest.param(x, marks=[pytest.mark.slow] * (x != "xla")) for x in BACKENDS]
)
by_own_gradient = pytest.mark.parametrize("backend", ["xla", "dense"])
OUTPUT, GRADIENT = 2e-6, 1e-5  # float32, as a share of the largest number of the reference


def random_arrays(*sizes, seed=0):
    """q, k, v, d_out, d_lse in float32; sizes are B, T, S, N, K, H[, Hv]."""
    floats = oracle.random_inputs(np.random.default_rng(seed), *sizes)
    return tuple(jnp.asarray(np.float32(x)) for x in floats.values())


@functools.partial(
    jax.jit,
    static_argnames=("backend", "is_causal", "logits_soft_cap", "options"),
    compiler_options=FAST_COMPILATION,
)
def run(backend, q, k, v, d_out, d_lse, **call):
    """out, lse, dq, dk, dv."""

    def attend(q, k, v):
        return xsake.dot_product_attention(
            q, k, v, implementation=backend, return_residual=True, **call
        )

    (out, lse), pull_back = jax.vjp(attend, q, k, v)
    return (out, lse, *pull_back((d_out, d_lse)))


def fast(fn):
    return jax.jit(fn, compiler_options=FAST_COMPILATION)


def assert_same_bits(one, two):
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), one, two, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), name


def assert_near(one, two):
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), one, two, strict=True):
        limit = OUTPUT if name in {"out", "lse"} else GRADIENT
        assert oracle.relative_error(x, y) <= limit, name


def from_oracle(spec, q, k, v, d_out, d_lse, **call):
    B, T, N, _ = q.shape
    see = oracle.allowed(spec, B, N, T, k.shape[1])
    d_lse = np.where(see.any(-1).swapaxes(1, 2), d_lse, 0)
    grads = oracle.attention_grads(q, k, v, allowed=see, d_out=d_out, d_lse=d_lse, **call)
    forward = oracle.attention(q, k, v, allowed=see, **call)
    return (*forward, *(grads[name] for name in ("dq", "dk", "dv")))


def masked_attention(backend, block=16, rule=None):
    """A function of (q, k, v, bits), so that the mask's contents are traced."""

    def attend(q, k, v, bits):
        mask = BlockMask.from_dense(bits, rule, shape=(q.shape[-3], k.shape[-3]), block=block)
        return xsake.dot_product_attention(q, k, v, mask=mask, implementation=backend)

    return attend


def random_bits(*shape, seed=3):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.6)
