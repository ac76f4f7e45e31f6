"""native_sparse_attention against the float64 oracle: all branches, gates, pooling, scores."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.nsa import oracle
from tests.nsa.test_selected import GRADIENT_LIMIT, OUTPUT_LIMIT
from tests.oracle import relative_error
from xsake import nsa

T, BLOCK, POOLED, STRIDE, WINDOW, SELECTED = 75, 8, 8, 4, 9, 4
PACKED = np.array([3] * 21 + [0] * 1 + [-1] * 2 + [4] * 35 + [1] * 16)
ONE = np.zeros(T, int)
SIZES = {
    "block_size": BLOCK,
    "num_selected": SELECTED,
    "compression_block": POOLED,
    "compression_stride": STRIDE,
}
GATES = ("g_cmp", "g_slc", "g_swa")


def inputs(seed=0, B=1, T=T, N=4, K=2, H=8, Hv=12, dtype="float32"):
    """Rounded to dtype, as float64."""
    rng = np.random.default_rng(seed)
    shapes = {"query": (B, T, N, H), "key": (B, T, K, H), "value": (B, T, K, Hv)}
    shapes |= dict.fromkeys(GATES, (B, T, N)) | {"d_out": (B, T, N, Hv)}
    found = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return {name: np.asarray(jnp.asarray(x, dtype), np.float64) for name, x in found.items()}


@functools.partial(jax.jit, static_argnames=("settings",))
def results(given, weights, ids, d_out, settings):
    """The output, and the gradients of everything in `given` and of the pooling's weights."""
    call = SIZES | dict(settings)

    def attend(given, weights):
        pooling = "mean" if weights is None else nsa.weighted_pooling(weights)
        return xsake.native_sparse_attention(**given, **call, compression=pooling, segment_ids=ids)

    out, pull_back = jax.vjp(attend, given, weights)
    return out, *pull_back(d_out)


def expected(given, ids, d_out, branches=GATES, weights=None):
    """Output and gradients by the oracle, for one batch row; and how clear the choice was."""
    q, k, v = given["query"], given["key"], given["value"]
    K, scale, group = k.shape[1], q.shape[2] ** -0.5, q.shape[1] // k.shape[1]
    pool = functools.partial(oracle.pool, ids=ids, block=POOLED, stride=STRIDE, weights=weights)
    pooled = pool(k), pool(v)
    see_pooled = oracle.compressed_mask(ids, K, POOLED, STRIDE)
    _, _, p = oracle.attention(q, *pooled, see_pooled, scale)
    score = oracle.nsa_score(p, ids, BLOCK, POOLED, STRIDE, group)
    indices, gap = oracle.choose(score, ids, K, BLOCK, SELECTED, 1, 2)
    reads = {
        "g_cmp": (*pooled, see_pooled),
        "g_slc": (k, v, oracle.selected_mask(indices, None, ids, BLOCK)),
        "g_swa": (k, v, oracle.window_mask(ids, K, WINDOW)),
    }
    out, grads = 0.0, {name: np.zeros_like(x) for name, x in given.items()}
    d_weights = 0.0
    for name in branches:
        keys, values, seen = reads[name]
        branch, _, _ = oracle.attention(q, keys, values, seen, scale)
        gate = given.get(name, np.ones(q.shape[:2]))[..., None]
        out = out + gate * branch
        if name in grads:
            grads[name] = (d_out * branch).sum(-1)
        dq, dk, dv = oracle.attention_grads(q, keys, values, seen, scale, gate * d_out)
        if name == "g_cmp":
            dk, from_keys = oracle.unpool(dk, k, ids, POOLED, STRIDE, weights)
            dv, from_values = oracle.unpool(dv, v, ids, POOLED, STRIDE, weights)
            d_weights = from_keys + from_values
        for target, more in (("query", dq), ("key", dk), ("value", dv)):
            grads[target] += more
    return out, grads, d_weights, gap


def row(given, b=0):
    return {name: x[b] for name, x in given.items()}


def agree(actual, wanted, limit, name):
    error = relative_error(np.asarray(actual, np.float64), wanted, floor=1e-30)
    assert error <= limit, f"{name}: {error}"


def check(given, ids, *, settings=(), branches=GATES, weights=None, dtype="float32"):
    """All results against the oracle, for inputs of one batch row."""
    given = dict(given)
    d_out = given.pop("d_out")
    arrays = {name: jnp.asarray(x, dtype) for name, x in given.items()}
    w = None if weights is None else jnp.asarray(weights, jnp.float32)
    ints = None if ids is ONE else jnp.asarray(ids, jnp.int32)[None]
    out, grads, d_weights = results(arrays, w, ints, jnp.asarray(d_out, dtype), tuple(settings))
    wanted, wanted_grads, wanted_d, gap = expected(row(given), ids, d_out[0], branches, weights)
    assert gap > 1e-5, "choose a seed without near ties"
    agree(out[0], wanted, OUTPUT_LIMIT[dtype], "out")
    for name, x in wanted_grads.items():
        agree(grads[name][0], x, GRADIENT_LIMIT[dtype], name)
    if w is not None:
        agree(d_weights, wanted_d, GRADIENT_LIMIT["float32"], "weights")


ALL = {"window_size": WINDOW}.items()


@pytest.mark.parametrize("ids", [ONE, PACKED], ids=["one sequence", "packed"])
def test_three_gated_branches(ids):
    check(inputs(), ids, settings=ALL)


def test_learned_pooling_and_its_gradient():
    weights = np.random.default_rng(5).random(POOLED)
    weights = np.asarray(np.float32(weights), np.float64)
    check(inputs(), PACKED, settings=ALL, weights=weights)


def test_bfloat16():
    check(inputs(dtype="bfloat16"), ONE, settings=ALL, dtype="bfloat16")


def test_a_gate_that_is_none_switches_its_branch_off():
    given = {name: x for name, x in inputs().items() if name not in ("g_cmp", "g_swa")}
    check(given, ONE, settings=ALL, branches=("g_slc",))


def test_without_gates_the_branches_are_added():
    given = {name: x for name, x in inputs().items() if name not in GATES}
    check(given, ONE, branches=("g_cmp", "g_slc"))
