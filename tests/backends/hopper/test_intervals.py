"""Intervals instead of the rule in partial blocks of the Hopper kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests import oracle
from tests.conditions import needs_gpu, needs_interpreter
from tests.specs import to_rule
from xsake import BlockMask, Options, _jax, masks
from xsake.backends import Call, hopper, kernel_rule
from xsake.backends.options import BackwardTiling, ForwardTiling

RULES = {
    "causal": masks.sliding_window(300, None) & masks.causal(),
    "lengths": masks.lengths(query=jnp.array([400])) & masks.causal(),
    "documents": masks.documents(jnp.arange(500) // 130) & masks.causal(),
    "documents or first": masks.documents(jnp.arange(500) // 130) | masks.first(4),
    "sinks and window": masks.causal() & (masks.first(4) | masks.sliding_window(100)),
    "chunked": masks.chunked(48) & masks.causal(),
    "not": ~masks.first(20),
    "array": masks.array(np.ones((500, 500), bool)) & masks.causal(),
    "array, chunked": masks.array(np.ones((500, 500), bool)) & masks.chunked(100),
}


@pytest.mark.parametrize("join", ["and", "or"])
@needs_interpreter
def test_documents_agree_when_interpreted(join, monkeypatch):
    """By intervals in the first batch row, by the rule in the second, whose ids are not sorted.

    With causality one interval for each query, or, with the first keys, two.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import forward_kernel as hopper_forward

    monkeypatch.setattr(_jax, "multiprocessors", lambda: 2)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 120, 1, 64)), jnp.bfloat16) for _ in range(3))
    ids = np.stack([np.arange(120) // 50, np.arange(120) % 3])
    ids[:, 115:] = -1
    of_ids = masks.documents(ids)
    rule = of_ids & masks.causal() if join == "and" else of_ids | masks.first(7)
    mask = BlockMask.from_rule(rule, (120, 120), block=(128, 64))
    assert mask.intervals.shape[2] == (2 if join == "and" else 4)
    assert (np.asarray(mask.intervals)[:, 0, 0, 0] < 0).tolist() == [False, True]
    out, lse = hopper_forward.forward(
        q,
        k,
        v,
        mask.lists,
        block=mask.block,
        rule=kernel_rule.by_query(mask),
        scale=0.125,
        interpret=plgpu.InterpretGPUParams(),
    )
    other = ("causal",) if join == "and" else ("first", 7)
    want, want_lse = oracle.attention(
        *(np.asarray(x, np.float64) for x in (q, k, v)),
        allowed=oracle.allowed((join, ("documents", ids, ids), other), 2, 1, 120, 120),
        scale=0.125,
    )
    assert oracle.relative_error(out, want) <= 1e-2
    assert oracle.relative_error(jnp.moveaxis(lse, 1, 2), want_lse, floor=1.0) <= 1e-4


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("causal", "a window around each query"),
        ("lengths", "an interval of keys for each query"),
        ("documents", "an interval of keys for each query; the rule in batch rows that are not"),
        ("documents or first", "two intervals of keys for each query; the rule in batch rows"),
        ("sinks and window", "two intervals of keys for each query"),
        ("chunked", "an interval of keys for each query"),
        ("not", "the rule, for every token pair"),
        ("array", "a token mask and a window around each query"),
        ("array, chunked", "the rule, for every token pair"),
    ],
)
def test_explain_says_what_partial_blocks_evaluate(name, form, monkeypatch):
    """On a machine that claims to be an H200."""
    monkeypatch.setattr(_jax, "why_no_hopper", lambda needs: None)
    q = jax.ShapeDtypeStruct((1, 500, 1, 64), jnp.bfloat16)
    explanation = xsake.explain(q, q, q, mask=RULES[name])
    assert explanation.chosen == "hopper"
    assert explanation.partial_blocks.startswith(form)
    assert form in str(explanation)


IDS = np.repeat([[0, 1, 4]], (35, 20, 35), axis=1)
TWO = {
    "documents or first": ("or", ("documents", IDS, IDS), ("first", 7)),
    "first and window": ("and", ("causal",), ("or", ("first", 5), ("sliding_window", 20, 20))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO)
@needs_interpreter
def test_gradients_by_two_intervals_agree_when_interpreted(name, monkeypatch):
    """Of queries, by intervals of keys; of keys and values, by intervals of queries."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import backward_kernel, forward_kernel

    monkeypatch.setattr(_jax, "multiprocessors", lambda: 2)
    for module, entry in ((forward_kernel, "forward"), (backward_kernel, "backward")):
        run = functools.partial(getattr(module, entry), interpret=plgpu.InterpretGPUParams())
        monkeypatch.setattr(module, entry, run)
    T, rng = 90, np.random.default_rng(0)
    x = oracle.random_inputs(rng, 1, T, T, 1, 1, 64)
    x = {key: np.asarray(jnp.asarray(value, jnp.bfloat16), np.float64) for key, value in x.items()}
    mask = BlockMask.from_rule(to_rule(TWO[name]), (T, T), block=(64, 64))
    tilings = {"hopper_forward": ForwardTiling(), "hopper_backward": BackwardTiling()}
    options = Options(deterministic=True, **tilings)

    def attend(q, k, v):
        return hopper.forward(Call(q, k, v, None, mask, 0.125, None, options))

    jax.clear_caches()  # so that the kernels are traced again, through the functions above
    given = [jnp.asarray(x[key], jnp.bfloat16) for key in ("q", "k", "v")]
    (out, _), pull_back = jax.vjp(attend, *given)
    d_lse = jnp.asarray(x["d_lse"], jnp.float32)
    found = pull_back((jnp.asarray(x["d_out"], out.dtype), d_lse))
    jax.clear_caches()
    allowed = oracle.allowed(TWO[name], 1, 1, T, T)
    want = oracle.attention_grads(**x, allowed=allowed, scale=0.125)
    for key, gradient in zip(("dq", "dk", "dv"), found, strict=True):
        assert oracle.relative_error(gradient, want[key]) <= 1e-2, key


# rules whose first kv block is seen by no query of the first document's end on
ENDS = {"documents": ("causal",), "two intervals": ("or", ("first", 5), ("sliding_window", 90, 0))}


def problem_of_ends(size, heads=(1, 1), rule="documents", soft_cap=None, has_bias=False):
    """(mask, arrays in float64, settings of the oracle) of two batch rows with 248 tokens.

    In the first, kv block 0 is seen by queries of the first half of row block 1 at most; in the
    second, whose ids are not sorted, there are no intervals. A bias has one value per key.
    """
    T, (N, K) = 248, heads
    ids = np.stack([np.arange(T) >= 150, np.arange(T) % 3])
    spec = ("and", ("documents", ids, ids), ("and", ("causal",), ENDS[rule]))
    mask = BlockMask.from_rule(to_rule(spec), (T, T))
    assert mask.intervals.shape[2] == (4 if rule == "two intervals" else 2)
    assert (np.asarray(mask.intervals)[:, 0, 0, 0] < 0).tolist() == [False, True]
    rng = np.random.default_rng(0)
    x = oracle.random_inputs(rng, 2, T, T, N, K, size)
    x = {key: np.asarray(jnp.asarray(value, jnp.bfloat16), np.float64) for key, value in x.items()}
    settings = {"allowed": oracle.allowed(spec, 2, N, T, T), "scale": 0.125, "soft_cap": soft_cap}
    if has_bias:
        settings["bias"] = rng.standard_normal((2, N, 1, T)).astype(np.float32)
    return mask, x, settings


def check_ends(size, tiling, interpret, **features):
    """The last 64 queries of kv block 0 in the first batch row have NaN, and are left out.

    In the second batch row every step is computed.
    """
    mask, x, settings = problem_of_ends(size, **features)
    forward = {name: x[name] for name in "qkv"} | settings
    out, lse = oracle.attention(**forward)
    want = oracle.attention_grads(**x, **settings)
    given = {key: value.copy() for key, value in {**x, "out": out, "lse": lse}.items()}
    for key in ("q", "d_out"):
        given[key][0, 192:] = np.nan
    found = run_backward(mask, given, settings, tiling, interpret)
    # The other queries and keys of the first batch row do see NaN.
    for name, gradient in found.items():
        for row, end in ((0, 192 if name == "dq" else 128), (1, None)):
            mine, its = (by_token(y, name)[row, :end] for y in (gradient, want[name]))
            assert np.isfinite(mine).all(), (name, row)
            assert oracle.relative_error(mine, its) <= 1e-2, (name, row)


def run_backward(mask, given, settings, tiling, interpret):
    """{"dq", "dk", "dv", and "dbias" if there is one} of the kernels."""
    from xsake.backends.hopper import backward_kernel

    q, k, v, out, d_out = (
        jnp.asarray(given[key], jnp.bfloat16) for key in ("q", "k", "v", "out", "d_out")
    )
    lse, d_lse = (jnp.asarray(np.moveaxis(given[x], 2, 1), jnp.float32) for x in ("lse", "d_lse"))
    bias = settings.get("bias")
    found = backward_kernel.backward(
        q,
        k,
        v,
        out,
        lse,
        d_out,
        d_lse,
        mask.lists,
        rule=kernel_rule.by_key(mask),
        row_rule=kernel_rule.by_query(mask),
        scale=settings["scale"],
        soft_cap=settings["soft_cap"],
        bias=None if bias is None else jnp.asarray(bias),
        wants_bias=bias is not None,
        tiling=tiling,
        interpret=interpret,
    )
    names = ("dq", "dk", "dv", "dbias")
    return {name: x for name, x in zip(names, found, strict=True) if x is not None}


def by_token(gradient, name):
    """float32 [B, tokens, …]; that of a bias per key is [B, N, 1, S]."""
    gradient = np.asarray(gradient, np.float32)
    return np.moveaxis(gradient, 3, 1) if name == "dbias" else gradient


@pytest.mark.parametrize("row_step", [64, 128])
@needs_interpreter
def test_queries_after_the_last_document_of_a_kv_block_are_not_read(row_step, monkeypatch):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(_jax, "multiprocessors", lambda: 2)
    check_ends(64, BackwardTiling(fused=False, row_step=row_step), plgpu.InterpretGPUParams())


FEATURES = [
    {"heads": (4, 2)},
    {"rule": "two intervals"},
    {"soft_cap": 5.0},
    {"has_bias": True},
    {"heads": (4, 2), "rule": "two intervals", "soft_cap": 5.0, "has_bias": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("features", FEATURES, ids=str)
@needs_interpreter
def test_they_are_not_read_beside_other_features_when_interpreted(features, monkeypatch):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(_jax, "multiprocessors", lambda: 2)
    tiling = BackwardTiling(fused=False, row_step=128)
    check_ends(64, tiling, plgpu.InterpretGPUParams(), **features)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("how", [{"cast": "pass"}, {"cast": "kernel"}, {"fused": False}], ids=str)
@pytest.mark.parametrize("persistent", [True, False])
def test_they_are_not_read_on_a_gpu(size, how, persistent):
    check_ends(size, BackwardTiling(**{"fused": True} | how, persistent=persistent), False)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_they_are_not_read_beside_other_features(features, fused, size):
    check_ends(size, BackwardTiling(fused=fused), False, **features)
