"""The indexer's loss and its gradient against formulas in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nsa import oracle
from tests.oracle import relative_error
from xsake import nsa

T, N, K, H, Hi, BLOCK = 37, 6, 2, 8, 4, 8
IDS = np.array([0] * 10 + [1] * 24 + [-1] * 3)


@functools.partial(jax.jit, static_argnames="dense")
def loss_and_gradients(x, indices, ids, dense):
    def loss(x):
        return nsa.indexer_loss(
            *(x["q"], x["k"], x["iq"], x["ik"]),
            None if dense else indices,
            block_size=BLOCK,
            segment_ids=ids,
        )

    return jax.value_and_grad(loss)(x)


@pytest.mark.parametrize("dense", [False, True], ids=["selected", "dense"])
def test_loss_and_gradients(dense):
    rng = np.random.default_rng(0)
    shapes = {"q": (T, N, H), "k": (T, K, H), "iq": (T, K, Hi), "ik": (T, 1, Hi)}
    x = {name: np.float32(rng.standard_normal(s)).astype(float) for name, s in shapes.items()}
    indices = rng.integers(-1, 5, (T, K, 3))
    seen = oracle.selected_mask(indices, None, IDS, BLOCK)
    if dense:
        seen = oracle.window_mask(IDS, K, T)
    _, lse, p = oracle.attention(x["q"], x["k"], x["k"], seen, H**-0.5)
    keys = np.repeat(x["ik"], K, axis=1)
    _, _, u = oracle.attention(x["iq"], keys, keys, seen, Hi**-0.5)
    counted = np.isfinite(lse).sum()
    total, d_iq, d_ik = 0.0, np.zeros_like(x["iq"]), np.zeros_like(x["ik"])
    for t in range(T):
        for n in range(N):
            kappa = n // (N // K)
            at = np.flatnonzero(seen[t, kappa])
            teacher, student = p[t, n, at], u[t, kappa, at]
            total += (teacher * np.log(teacher / student)).sum() / counted
            dz = (student - teacher) * Hi**-0.5 / counted
            d_iq[t, kappa] += dz @ keys[at, kappa]
            d_ik[at, 0] += np.outer(dz, x["iq"][t, kappa])
    arrays = {name: jnp.asarray(value, jnp.float32)[None] for name, value in x.items()}
    ints = (jnp.asarray(i, jnp.int32)[None] for i in (indices, IDS))
    loss, grads = loss_and_gradients(arrays, *ints, dense=dense)
    assert abs(float(loss) - total) <= 2e-6 * max(1, total)
    assert relative_error(grads["iq"][0], d_iq) <= 1e-5
    assert relative_error(grads["ik"][0], d_ik) <= 1e-5
    assert not grads["q"].any()
    assert not grads["k"].any()
