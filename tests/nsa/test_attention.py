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
from xsake import masks, nsa
from xsake.masks.intervals import intervals_of
from xsake.nsa.compress import slots_of
from xsake.nsa.sequences import sequences_of

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
    return {name: x.astype(jnp.dtype(dtype)).astype(np.float64) for name, x in found.items()}


def results(given, weights, ids, d_out, settings):
    """The output, and the gradients of everything in `given` and of the pooling's weights."""
    found = compiled(given, weights, ids, d_out, tuple(settings))
    return jax.tree.map(np.asarray, found)


@functools.partial(jax.jit, static_argnames=("settings",))
def compiled(given, weights, ids, d_out, settings):
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
    arrays = {name: x.astype(jnp.dtype(dtype)) for name, x in given.items()}
    w = None if weights is None else np.float32(weights)
    ints = None if ids is ONE else ids[None]
    out, grads, d_weights = results(arrays, w, ints, d_out.astype(jnp.dtype(dtype)), settings)
    wanted, wanted_grads, wanted_d, gap = expected(row(given), ids, d_out[0], branches, weights)
    assert gap > 1e-5, "choose a seed without near ties"
    agree(out[0], wanted, OUTPUT_LIMIT[dtype], "out")
    for name, x in wanted_grads.items():
        agree(grads[name][0], x, GRADIENT_LIMIT[dtype], name)
    if w is not None:
        agree(d_weights, wanted_d, GRADIENT_LIMIT["float32"], "weights")


ALL = {"window_size": WINDOW}.items()


WEIGHTS = np.float32(np.random.default_rng(5).random(POOLED))


def test_three_gated_branches_of_packed_sequences_with_learned_pooling():
    check(inputs(), PACKED, settings=ALL, weights=WEIGHTS.astype(np.float64))


@pytest.mark.slow
def test_three_gated_branches_with_learned_pooling():
    check(inputs(), ONE, settings=ALL, weights=WEIGHTS.astype(np.float64))


def test_three_gated_branches_with_means():
    check(inputs(), ONE, settings=ALL)


@pytest.mark.slow
def test_three_gated_branches_of_packed_sequences_with_means():
    check(inputs(), PACKED, settings=ALL)


def test_bfloat16():
    check(inputs(dtype="bfloat16"), ONE, settings=ALL, dtype="bfloat16")


def test_a_gate_that_is_none_switches_its_branch_off():
    given = {name: x for name, x in inputs().items() if name not in ("g_cmp", "g_swa")}
    check(given, ONE, settings=ALL, branches=("g_slc",))


def test_without_gates_the_branches_are_added():
    given = {name: x for name, x in inputs().items() if name not in GATES}
    check(given, ONE, branches=("g_cmp", "g_slc"))


def test_no_gradient_reaches_the_future():
    given = {name: np.float32(x) for name, x in inputs().items()}
    d_out = given.pop("d_out")
    for t in (0, 7, 8, 40):
        one = np.zeros_like(d_out)
        one[:, t] = d_out[:, t]
        _, grads, _ = results(given, None, None, one, ALL)
        assert not any(x[:, t + 1 :].any() for x in grads.values())
        assert grads["value"][:, t].any()


def test_a_packed_sequence_equals_the_sequence_alone():
    """Alone, it is followed by tokens that no earlier token sees. Equal weights are the mean."""
    lo, hi = 24, 59  # the sequence of id 4
    given = {name: np.float32(x) for name, x in inputs().items()}
    d_out = given.pop("d_out")
    mean = np.full(POOLED, 1 / POOLED, np.float32)
    out, grads, _ = results(given, mean, PACKED[None], d_out, ALL)
    alone = {name: np.roll(x, -lo, axis=1) for name, x in given.items()}
    d_alone = np.roll(d_out, -lo, axis=1)
    d_alone[:, hi - lo :] = 0
    out_alone, grads_alone, _ = results(alone, None, None, d_alone, ALL)
    agree(out[:, lo:hi], out_alone[:, : hi - lo], 2e-6, "out")
    for name, x in grads_alone.items():
        agree(grads[name][:, lo:hi], x[:, : hi - lo], 1e-5, name)
    assert not out[:, PACKED < 0].any()
    assert not any(x[:, PACKED < 0].any() for x in grads.values())


def test_a_text_shorter_than_a_pooled_block_has_no_compressed_output():
    rng = np.random.default_rng(0)
    q = np.float32(rng.standard_normal((1, 6, 2, 8)))

    @jax.jit
    def both(q, g_cmp):
        return (
            xsake.native_sparse_attention(q, q, q, **SIZES),
            xsake.native_sparse_attention(q, q, q, g_cmp=g_cmp, **SIZES),
        )

    summed, compressed = map(np.asarray, both(q, np.ones((1, 6, 2), np.float32)))
    seen = oracle.window_mask(np.zeros(6, int), 2, 6)
    x = q[0].astype(np.float64)
    agree(summed[0], oracle.attention(x, x, x, seen, 8**-0.5)[0], 2e-6, "out")
    assert not compressed.any()


def test_given_indices_with_a_compressed_branch_that_was_asked_for():
    given = {name: np.float32(x) for name, x in inputs().items() if name != "d_out"}
    call = SIZES | {"window_size": WINDOW}

    @jax.jit
    def both(given):
        chosen = nsa.select_blocks(given["query"], given["key"], **SIZES)
        return xsake.native_sparse_attention(**given, **call), xsake.native_sparse_attention(
            **given, **call, block_indices=chosen, block_counts=SELECTED, compressed=True
        )

    computed, chosen = both(given)
    agree(chosen, np.asarray(computed, np.float64), 2e-6, "out")


def test_mlp_pooling_and_its_gradient():
    """Directional derivatives of every parameter, against central differences in float64."""
    rng = np.random.default_rng(0)
    M, H, Hv, T = 5, 6, 6, 33
    shapes = {
        "w_in": (POOLED, H, M),
        "w_out": (M, H),
        "b_in": (M,),
        "b_out": (H,),
        "positions": (POOLED, H),
    }
    parameters = {name: 0.5 * rng.standard_normal(shape) for name, shape in shapes.items()}
    q, k, v = (rng.standard_normal((T, heads, H)) for heads in (4, 2, 2))
    d_out = rng.standard_normal((T, 4, Hv))
    ids = np.zeros(T, int)

    def pooled(x, p):
        out = []
        for first, _ in oracle.pooled_blocks(ids, POOLED, STRIDE):
            tokens = x[first : first + POOLED] + p["positions"][:, None]
            y = np.einsum("lkh,lhm->km", tokens, p["w_in"]) + p["b_in"]
            y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
            out.append(y @ p["w_out"] + p["b_out"])
        return np.stack(out)

    def value(p):
        seen = oracle.compressed_mask(ids, 2, POOLED, STRIDE)
        out, _, _ = oracle.attention(q, pooled(k, p), pooled(v, p), seen, H**-0.5)
        return (out * d_out).sum(), out

    @jax.jit
    def loss(p, gate):
        arrays = (jnp.asarray(x, jnp.float32)[None] for x in (q, k, v))
        out = xsake.native_sparse_attention(
            *arrays, g_cmp=gate, compression=nsa.mlp_pooling(**p), **SIZES
        )
        return (out * jnp.asarray(d_out, jnp.float32)).sum(), out

    p32 = {name: jnp.asarray(x, jnp.float32) for name, x in parameters.items()}
    gate = jnp.ones((1, T, 4, Hv))
    grads, out = jax.grad(loss, has_aux=True)(p32, gate)
    assert relative_error(out[0], value(parameters)[1]) <= 2e-6
    for name, x in parameters.items():
        direction, step = rng.standard_normal(x.shape), 1e-5
        ends = (value(parameters | {name: x + s * direction})[0] for s in (step, -step))
        slope = (next(ends) - next(ends)) / (2 * step)
        size = np.abs(np.asarray(grads[name]) * direction).sum()
        assert abs((np.asarray(grads[name]) * direction).sum() - slope) <= 1e-5 * size, name


@pytest.mark.parametrize("weights", [(POOLED,), (POOLED, 2)], ids=["shared weights", "by head"])
@pytest.mark.parametrize("positions", [(POOLED, 3), (POOLED, 2, 3)], ids=["shared", "by head"])
def test_weighted_pooling_with_a_position_embedding(weights, positions):
    rng = np.random.default_rng(0)
    blocks, w, e = (rng.standard_normal(x) for x in ((1, 4, POOLED, 2, 3), weights, positions))
    pool = nsa.weighted_pooling(*(jnp.asarray(x, jnp.float32) for x in (w, e)))
    found = pool(jnp.asarray(blocks, jnp.float32))
    by_head = np.broadcast_to(w[:, None] if w.ndim == 1 else w, (POOLED, 2))[..., None]
    wanted = (by_head * (blocks + (e[:, None] if e.ndim == 2 else e))).sum(2)
    agree(found, wanted, 2e-6, "pooled")


def test_pooled_keys_are_one_interval_for_each_query():
    """Hopper's kernels read two integers for each query where a rule is of this kind."""
    ids = np.sort(np.where(PACKED < 0, 9, PACKED))  # padding between sequences is no interval
    sequences = sequences_of(1, T, segment_ids=ids, cu_seqlens=None, token_indices=None)
    slots = slots_of(sequences, T, POOLED, STRIDE)
    rule = masks.documents(sequences.number, slots.number) & masks.causal()
    rule = masks.at_positions(rule, None, slots.end)
    lo, hi = np.asarray(intervals_of(rule, (T, slots.end.shape[1])))[0, 0, :, :, None]
    slot = np.arange(slots.end.shape[1])[None]
    seen = oracle.compressed_mask(ids, 1, POOLED, STRIDE)[:, 0]
    inside = (lo <= slot) & (slot < hi)
    np.testing.assert_array_equal(inside[:, : seen.shape[1]], seen)
    assert not inside[:, seen.shape[1] :].any()
