"""backward(call, …) of a part of the keys: the parts add up to the gradients of all keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracle
from tests.conditions import needs_gpu, needs_newer_jax
from xsake import BlockMask, Options, backends, masks
from xsake.backends import Call, hopper, tpu
from xsake.backends.choice import BACKENDS

B, T, N, K = 1, 64, 4, 2


def part(q, k, v, blocks, first, block):
    """A call with the keys from `first` on, which causality compares by their places."""
    S = k.shape[1]
    rule = masks.at_positions(masks.causal(), jnp.arange(T), first + jnp.arange(S))
    mask = BlockMask.from_dense(blocks, rule, shape=(T, S), block=block)
    return Call(q, k, v, None, mask, q.shape[-1] ** -0.5, 5.0, Options())


def largest_error(name, H, dtype, block) -> float:
    """Relative, over dq, dk and dv of two halves of the keys, against the oracle."""
    x = oracle.random_inputs(np.random.default_rng(0), B, T, T, N, K, H)
    rows, columns = T // block[0], T // block[1]
    blocks = np.random.default_rng(1).random((B, N, rows, columns)) < 0.6
    see = oracle.allowed(("and", ("causal",), ("blocks", blocks, block)), B, N, T, T)
    x["d_lse"] = np.where(see.any(-1).swapaxes(1, 2), x["d_lse"], 0)
    given = {"allowed": see, "soft_cap": 5.0}
    x = {key: np.asarray(jnp.asarray(value, dtype), np.float32) for key, value in x.items()}
    out, lse = oracle.attention(x["q"], x["k"], x["v"], **given)
    expected = oracle.attention_grads(**x, **given)
    q, k, v, d_out = (jnp.asarray(x[key], dtype) for key in ("q", "k", "v", "d_out"))
    rest = [jnp.asarray(y, jnp.float32) for y in (out, lse)]
    d_lse = jnp.asarray(x["d_lse"], jnp.float32)
    dq, dk, dv = 0, [], []
    for half in (0, 1):
        at = slice(half * T // 2, (half + 1) * T // 2)
        listed = blocks[..., half * columns // 2 : (half + 1) * columns // 2]
        call = part(q, k[:, at], v[:, at], listed, half * T // 2, block)
        parts = jax.jit(lambda call=call: BACKENDS[name].backward(call, *rest, d_out, d_lse))()
        dq = dq + np.asarray(parts[0], np.float32)
        dk.append(np.asarray(parts[1], np.float32))
        dv.append(np.asarray(parts[2], np.float32))
    ours = {"dq": dq, "dk": np.concatenate(dk, 1), "dv": np.concatenate(dv, 1)}
    return max(oracle.relative_error(ours[key], expected[key]) for key in ours)


@pytest.mark.parametrize("backend", ["xla", "dense"])
def test_parts_of_the_keys_add_up_to_the_gradients(backend):
    assert largest_error(backend, 8, jnp.float32, (16, 8)) <= 1e-5


@pytest.mark.second_python
def test_parts_add_up_in_the_tpu_kernels(monkeypatch):
    monkeypatch.setattr(tpu, "interpret", True)
    assert largest_error("tpu", 8, jnp.float32, (16, 16)) <= 1e-5


@pytest.mark.gpu
@needs_gpu
def test_parts_add_up_in_the_hopper_kernels(monkeypatch):
    monkeypatch.setattr("tests.backends.test_part_of_keys.T", 512)
    assert largest_error("hopper", 80, jnp.bfloat16, (64, 64)) <= 0.02


@needs_newer_jax
def test_a_part_of_the_keys_lowers_for_cuda():
    q, k, v, out = (jax.ShapeDtypeStruct((B, T, heads, 80), jnp.bfloat16) for heads in (N, K, K, N))
    lse = jax.ShapeDtypeStruct((B, T, N), jnp.float32)

    def backward(q, k, v, out, lse):
        call = part(q, k, v, np.ones((1, 1, 1, 1), bool), T, (64, 64))
        return hopper.backward(call, out, lse, out, lse)

    lowered = jax.jit(backward).trace(q, k, v, out, lse).lower(lowering_platforms=("cuda",))
    assert "@mosaic_gpu" in lowered.as_text()
    assert [x.shape for x in jax.tree.leaves(lowered.out_info)] == [
        (B, T, heads, 80) for heads in (N, K, K)
    ]


def test_a_logsumexp_that_is_no_number_stays_one():
    """With nothing the other part is the result; two parts of nothing are nothing."""
    out = jnp.ones((3, 2))
    L = jnp.array([jnp.nan, 1.0, -jnp.inf])
    nothing = jnp.zeros((3, 2)), jnp.full(3, -jnp.inf)
    _, logsumexp = backends.merged((out, L), nothing)
    np.testing.assert_array_equal(logsumexp, L)
