"""The oracle against jax.nn (forward), finite differences (gradients) and hand-written masks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import (
    allowed,
    attention,
    attention_grads,
    gradient_terms,
    random_inputs,
    relative_error,
)

# jax.nn's softmax is float32 whatever it is given: 1e-6 is about ten of its roundings (6e-8).
FLOAT32 = 1e-6
# Central differences of step 1e-5 err by step**2 and by 2e-16 / step: both about 1e-10.
DIFFERENCES = 1e-8

SHAPES = {  # B, T, S, N, K, H, Hv
    "plain": (2, 7, 7, 2, 2, 4, 4),
    "grouped": (2, 5, 9, 6, 2, 3, 5),
}


def rounded(inputs):
    """The same numbers in float32, so that both sides start from equal inputs."""
    return {name: np.float32(x) for name, x in inputs.items()}


@pytest.mark.parametrize("shape", ["plain", "grouped"])
@pytest.mark.parametrize(
    ("is_causal", "bias_shape"),
    [(True, None), (False, (0, 1, 0, 0)), (True, (0, 0, 0, 0))],
)
def test_forward_equals_jax_nn(shape, is_causal, bias_shape):
    B, T, S, N, K, H, _ = SHAPES[shape]
    rng = np.random.default_rng(0)
    x = rounded(random_inputs(rng, B, T, S, N, K, H))
    bias = None
    if bias_shape is not None:
        sizes = [1 if one else n for one, n in zip(bias_shape, (B, N, T, S), strict=True)]
        bias = np.float32(rng.standard_normal(sizes))
    mask = rng.random((B, N, T, S)) < 0.7
    mask[..., 0] = True  # jax.nn has no meaning for an empty row
    spec = ("array", mask)
    if is_causal:
        spec = ("and", spec, ("causal",))
    out, lse = attention(
        x["q"], x["k"], x["v"], allowed=allowed(spec, B, N, T, S), bias=bias, scale=0.3
    )
    jax_nn = jax.jit(
        functools.partial(
            jax.nn.dot_product_attention, scale=0.3, is_causal=is_causal, return_residual=True
        )
    )
    theirs, their_lse = jax_nn(
        *(x[name] for name in "qkv"),
        bias=bias,
        mask=mask,
    )
    assert relative_error(theirs, out) < FLOAT32
    assert relative_error(their_lse, lse) < FLOAT32


def test_window_and_lengths_equal_jax_nn():
    B, T, S, N, K, H = 2, 11, 13, 2, 1, 4
    x = rounded(random_inputs(np.random.default_rng(1), B, T, S, N, K, H))
    q_lengths, kv_lengths = np.array([11, 6]), np.array([5, 13])
    spec = ("and", ("sliding_window", 4, 2), ("lengths", q_lengths, kv_lengths))
    out, _ = attention(x["q"], x["k"], x["v"], allowed=allowed(spec, B, N, T, S))
    theirs = jax.nn.dot_product_attention(
        *(jnp.asarray(x[name]) for name in "qkv"),
        query_seq_lengths=jnp.asarray(q_lengths, jnp.int32),
        key_value_seq_lengths=jnp.asarray(kv_lengths, jnp.int32),
        local_window_size=(4, 2),
    )
    live = allowed(spec, B, N, T, S).any((1, 3))  # [B, T]: jax.nn averages where nothing is seen
    assert 0 < live.sum() < live.size
    assert relative_error(np.asarray(theirs)[live], out[live]) < FLOAT32


def test_softmax_by_hand():
    """One query, two keys with logits ln 1 and ln 3, one sink with logit ln 4."""
    q, k = np.ones((1, 1, 1, 1)), np.log([1.0, 3.0]).reshape(1, 2, 1, 1)
    v = np.array([8.0, 16.0]).reshape(1, 2, 1, 1)
    out, lse = attention(q, k, v, allowed=np.True_, sinks=np.log([4.0]))
    assert out.item() == pytest.approx(1 / 8 * 8 + 3 / 8 * 16)
    assert lse.item() == pytest.approx(np.log(4.0))


FEATURES = {
    "plain": {},
    "soft cap": {"soft_cap": 1.5},
    "scale": {"scale": -0.7},
    "bias": {"bias": (2, 6, 5, 9)},
    "bias per head": {"bias": (1, 6, 1, 1)},
    "bias per key, two axes": {"bias": (1, 9)},
    "bias per query": {"bias": (2, 1, 5, 1)},
    "sinks": {"sinks": (6,)},
    "four sinks": {"sinks": (6, 4)},
    "all": {"bias": (1, 6, 5, 9), "sinks": (6, 2), "soft_cap": 2.0, "scale": 0.4},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_gradients_equal_differences(features):
    """Every entry of every gradient, by moving every number of every input by 1e-5."""
    B, T, S, N, K, H, Hv = SHAPES["grouped"]
    rng = np.random.default_rng(2)
    x = random_inputs(rng, B, T, S, N, K, H, Hv)
    d_out, d_lse = x.pop("d_out"), x.pop("d_lse")
    fixed = dict(features)
    for name in ("bias", "sinks"):
        if name in fixed:
            x[name] = rng.standard_normal(fixed.pop(name))
    see = rng.random((B, N, T, S)) < 0.6
    see[0, 1, 2] = see[1, :, 3] = False  # one empty row, and one empty for every head

    def loss(inputs):
        out, lse = attention(**inputs, allowed=see, **fixed)
        return (out * d_out).sum() + np.where(np.isfinite(lse), lse * d_lse, 0.0).sum()

    grads = attention_grads(**x, allowed=see, d_out=d_out, d_lse=d_lse, **fixed)
    assert set(grads) == {f"d{name}" for name in x}
    for name in x:
        expected = differences(loss, x, name)
        assert relative_error(grads[f"d{name}"], expected) < DIFFERENCES, name
    assert not grads["dq"][1, 3].any()


def differences(loss, inputs, name, step=1e-5):
    moved = {**inputs, name: inputs[name].copy()}
    flat, grad = moved[name].reshape(-1), np.empty(inputs[name].size)
    for i, value in enumerate(inputs[name].reshape(-1)):
        flat[i] = value + step
        up = loss(moved)
        flat[i] = value - step
        grad[i] = (up - loss(moved)) / (2 * step)
        flat[i] = value
    return grad.reshape(inputs[name].shape)


def test_an_empty_row_is_zero_and_minus_infinity():
    x = random_inputs(np.random.default_rng(3), 1, 3, 4, 2, 1, 4)
    see = np.ones((1, 2, 3, 4), bool)
    see[0, 1, 2] = False
    sinks = np.zeros(2)
    out, lse = attention(x["q"], x["k"], x["v"], allowed=see, sinks=sinks)
    assert not out[0, 2, 1].any()
    assert lse[0, 2, 1] == -np.inf
    assert np.isfinite(lse).sum() == lse.size - 1
    x["d_lse"][0, 2, 1] = np.nan
    grads = attention_grads(**x, allowed=see, sinks=sinks)
    assert all(np.isfinite(g).all() for g in grads.values())


def test_terms_bound_gradients():
    """|sum of terms| <= sum of |terms|, and a query that sees one key shows why they matter."""
    x = random_inputs(np.random.default_rng(4), 1, 4, 4, 2, 2, 4)
    x["d_lse"] = None
    see = np.eye(4, dtype=bool)[None, None]
    grads, terms = attention_grads(**x, allowed=see), gradient_terms(**x, allowed=see)
    assert np.abs(grads["dq"]).max() < 1e-12 < 0.1 < terms["dq"]
    for spec in [("causal",), ("everything",)]:
        see = allowed(spec, 1, 2, 4, 4)
        grads, terms = attention_grads(**x, allowed=see), gradient_terms(**x, allowed=see)
        assert all(np.abs(grads[name]).max() <= terms[name] for name in grads)


def test_relative_error_cannot_be_fooled():
    zero, one = np.zeros(3), np.ones(3)
    assert relative_error(one, one) == 0
    assert relative_error(one * 1.5, one) == 0.5
    assert relative_error(zero, zero) == 0
    assert relative_error(one, zero) == np.inf
    assert relative_error(one, zero, floor=10.0) == 0.1
    assert relative_error(np.array([np.nan, 1]), np.ones(2)) == np.inf
    assert relative_error(np.array([0, 1]), np.array([-np.inf, 1])) == np.inf
    assert relative_error(np.array([-np.inf, 1]), np.array([-np.inf, 1])) == 0
    assert relative_error(np.array([-np.inf, 1]), np.ones(2)) == np.inf
    assert relative_error(np.ones(2), np.ones((2, 1))) == np.inf


HAND = {
    ("causal",): ["1000", "1100", "1110"],
    ("sliding_window", 1, 0): ["1000", "1100", "0110"],
    ("sliding_window", None, 1): ["1100", "1110", "1111"],
    ("sliding_window", 0, None): ["1111", "0111", "0011"],
    ("chunked", 2): ["1100", "1100", "0011"],
    ("first", 2): ["1100", "1100", "1100"],
    ("prefix", 1): ["1000", "1000", "1000"],
    ("strided", 2): ["1010", "0101", "1010"],
    ("dilated", (1, 1), 2): ["1010", "0101", "1010"],
    ("dilated", (0, 1), 3): ["1001", "0100", "0010"],
    ("global_tokens", 1): ["1111", "1000", "1000"],
    ("longformer", (0, 1), 1): ["1111", "1110", "1011"],
    ("lengths", (2,), (3,)): ["1110", "1110", "0000"],
    ("documents", (0, 1, -1), (1, 0, -1, 0)): ["0101", "1000", "0000"],
    ("positions", ("causal",), (3, 0, 1), (2, 3, 0, 1)): ["1111", "0010", "0011"],
    ("not", ("causal",)): ["0111", "0011", "0001"],
    ("or", ("first", 1), ("sliding_window", 0, 0)): ["1000", "1100", "1010"],
    ("everything",): ["1111", "1111", "1111"],
}


@pytest.mark.parametrize("spec", HAND, ids=str)
def test_rules_by_hand(spec):
    expected = np.array([[c == "1" for c in row] for row in HAND[spec]])
    assert (allowed(spec, 1, 1, 3, 4)[0, 0] == expected).all()


def test_random_hash_by_hand():
    """One cell worked out in Python integers, without arrays."""
    x = (7 * 0x9E3779B9) ^ (3 * 0x85EBCA6B) ^ (2 * 0xC2B2AE35) ^ (5 * 0x27D4EB2F)
    x &= 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    x ^= x >> 16
    for density, kept in [(x / 2**32, False), ((x + 1) / 2**32, True)]:
        see = allowed(("random", density, 7, 8), 1, 4, 24, 48)
        assert (see[0, 3, 16:24, 40:48] == kept).all()
