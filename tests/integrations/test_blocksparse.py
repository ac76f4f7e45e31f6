"""ejkernel's blocksparse_attention: its examples run as written, and every parameter counts."""

from __future__ import annotations

import functools
import inspect
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests import oracle
from xsake import masks
from xsake.attention import dot_product_attention
from xsake.integrations.ejkernel import (
    BwdParams,
    FwdParams,
    SparseMask,
    blocksparse,
    blocksparse_attention,
    create_sparsity_mask,
)

B, N, K, T, H = 2, 4, 2, 24, 8
BLOCK = 8  # three of them
CLOSE, CLOSE_GRADIENT = 2e-6, 1e-5
# The examples of ejkernel.kernels._triton.blocksparse_attention._interface, as they are printed
# there.
EXAMPLES = """
>>> import jax.numpy as jnp
>>>
>>> batch, num_heads, seq_len, head_dim = 2, 12, 2048, 64
>>> q = jnp.ones((batch, num_heads, seq_len, head_dim))
>>> k = jnp.ones((batch, num_heads, seq_len, head_dim))
>>> v = jnp.ones((batch, num_heads, seq_len, head_dim))
>>>
>>>
>>> output = blocksparse_attention(
...     q, k, v,
...     q_blocksize=128,
...     kv_blocksize=128,
...     causal=True
... )
>>> results.append(output)
>>>
>>> output = blocksparse_attention(
...     q, k, v,
...     sliding_window=(256, 256),
...     q_blocksize=64,
...     kv_blocksize=64
... )
>>> results.append(output)
>>> output = blocksparse_attention(q, k, v)
>>> results.append(output)
"""


def run(examples):
    results = []
    code = re.sub(r"^(>>>|\.\.\.) ?", "", examples, flags=re.MULTILINE)
    exec(code, {"blocksparse_attention": blocksparse_attention, "results": results})
    return results


@pytest.mark.second_python
def test_the_examples_run_as_written():
    """They are traced as written, and computed at a smaller size: ones in, ones out."""
    shapes = [x.shape for x in jax.eval_shape(lambda: run(EXAMPLES))]
    assert shapes == [(2, 12, 2048, 64)] * 3
    for output in run(EXAMPLES.replace("2, 12, 2048, 64", "1, 2, 300, 8")):
        assert output.shape == (1, 2, 300, 8)
        np.testing.assert_allclose(output, 1, atol=1e-6)


def test_the_signature_is_ejkernels():
    names = """query key value q_segment_ids kv_segment_ids q_positions kv_positions softmax_aux
    bias attention_mask sequence_parallelism_mesh_axis_name logits_soft_cap qkv_layouts
    softmax_scale fwd_params bwd_params mask_builder sliding_window chunk_size causal
    fused_backward q_blocksize
    kv_blocksize""".split()
    assert list(inspect.signature(blocksparse_attention).parameters) == names
    defaults = {
        x.name: x.default for x in inspect.signature(blocksparse_attention).parameters.values()
    }
    assert defaults.pop("causal") is True
    assert defaults.pop("fused_backward") is False
    assert {x for name, x in defaults.items() if name not in names[:3]} == {None}


# ------------------------------------------------------------------------------- every parameter


def some_on_both(cases, *names):
    """The cases as parameters; only those named run on CI's first Python too."""
    second = pytest.mark.second_python
    return [pytest.param(x, marks=() if x in names else second) for x in cases]


@functools.cache
def arrays():
    rng = np.random.default_rng(0)
    x = oracle.random_inputs(rng, B, T, T, N, K, H)
    return {name: np.float32(x[name]) for name in ("q", "k", "v", "d_out")}


def by_head(x):
    """[B, N, T, H] of [B, T, N, H], and back."""
    return np.asarray(x).swapaxes(1, 2)


def ours(**more):
    a = arrays()
    return by_head(blocksparse_attention(*(by_head(a[x]) for x in "qkv"), **more))


def expected(spec, **more):
    a = arrays()
    allowed = oracle.allowed(spec, B, N, T, T)
    return oracle.attention(a["q"], a["k"], a["v"], allowed=allowed, **more)[0]


@pytest.fixture
def by_definition(monkeypatch):
    """The backend `reference`: what is tested is the mask, and compiling the others takes long."""
    door = functools.partial(dot_product_attention, implementation="reference")
    monkeypatch.setattr(blocksparse, "dot_product_attention", door)


RNG = np.random.default_rng(1)
IDS, KV_IDS = RNG.integers(-1, 2, (2, B, T)).astype(np.int32)
Q_AT, KV_AT = (RNG.permuted(np.tile(np.arange(T), (B, 1)), axis=1).astype(np.int32) for _ in "qk")
SEEN = RNG.random((B, N, T, T)) < 0.5
SINKS = RNG.standard_normal((N, 3)).astype(np.float32)
BIAS = RNG.standard_normal((B, N, T, T)).astype(np.float32)
CAUSAL = ("causal",)


def ranges(*bounds):
    return SparseMask(*(np.array(x, np.int32)[None, None] for x in bounds))


BEFORE = ranges([0, 0, 1], [1, 2, 3])  # a row block visits its own kv block and the one before it
BEFORE_MAP = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]], bool)[None, None]
WIDE_MAP = np.array([[1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1]], bool)[None, None]
HEADS = np.arange(N)[:, None]
UPPER = np.arange(3)[None] + 1
OF_HEADS = SparseMask(np.maximum(UPPER - 1 - HEADS, 0)[None], np.tile(UPPER, (N, 1))[None])
OF_HEADS_MAP = (np.arange(3) >= np.asarray(OF_HEADS.lower_bounds)[..., None]) & (
    np.arange(3) < np.asarray(OF_HEADS.upper_bounds)[..., None]
)


def local_masks(q_len, kv_len, num_heads, head_idx, num_reps):
    """Another window for every head, as ejkernel's and splash attention's masks."""
    assert (q_len, kv_len, num_heads, num_reps) == (T, T, N, N // K)
    if head_idx == 3:
        return splash.NumpyMask(SEEN[0, 0])
    local = splash.LocalMask((q_len, kv_len), (1 + 3 * head_idx, None), 0)
    return local | splash.CausalMask((q_len, kv_len), -20) if head_idx == 2 else local


LOCAL = np.stack([np.asarray(local_masks(T, T, N, n, 2)[:, :]) for n in range(N)])[None]


def both(spec):
    return ("and", CAUSAL, spec)


PARAMETERS = {
    "q_segment_ids": ({"q_segment_ids": IDS}, both(("documents", IDS, IDS)), {}),
    "kv_segment_ids": (
        {"q_segment_ids": IDS, "kv_segment_ids": KV_IDS},
        both(("documents", IDS, KV_IDS)),
        {},
    ),
    "q_positions": ({"q_positions": Q_AT}, ("positions", CAUSAL, Q_AT, None), {}),
    "kv_positions": (
        {"kv_positions": KV_AT, "sliding_window": 3},
        ("positions", both(("sliding_window", 3, 3)), None, KV_AT),
        {},
    ),
    "softmax_aux, one a head": ({"softmax_aux": SINKS[:, 0]}, CAUSAL, {"sinks": SINKS[:, :1]}),
    "softmax_aux, one a kv head": (
        {"softmax_aux": SINKS[:K, 0]},
        CAUSAL,
        {"sinks": np.repeat(SINKS[:K, :1], N // K, axis=0)},
    ),
    "softmax_aux for all heads": (
        {"softmax_aux": SINKS[0]},
        CAUSAL,
        {"sinks": np.tile(SINKS[0], (N, 1))},
    ),
    "softmax_aux by kv head": (
        {"softmax_aux": SINKS[:K]},
        CAUSAL,
        {"sinks": np.repeat(SINKS[:K], N // K, axis=0)},
    ),
    "softmax_aux by head": ({"softmax_aux": SINKS}, CAUSAL, {"sinks": SINKS}),
    "bias": ({"bias": BIAS}, CAUSAL, {"bias": BIAS}),
    "attention_mask": ({"attention_mask": SEEN}, both(("array", SEEN)), {}),
    "attention_mask for all heads": (
        {"attention_mask": SEEN[:, 0].astype(np.int32)},
        both(("array", SEEN[:, :1])),
        {},
    ),
    "attention_mask and segments": (
        {"attention_mask": SEEN, "q_segment_ids": IDS, "kv_segment_ids": IDS},
        both(("and", ("array", SEEN), ("documents", IDS, IDS))),
        {},
    ),
    "logits_soft_cap": ({"logits_soft_cap": 0.7}, CAUSAL, {"soft_cap": 0.7}),
    "softmax_scale": ({"softmax_scale": 0.1}, CAUSAL, {"scale": 0.1}),
    "qkv_layouts": (
        {"qkv_layouts": (BEFORE,), "chunk_size": BLOCK},
        both(("blocks", BEFORE_MAP, (BLOCK, BLOCK))),
        {},
    ),
    "qkv_layouts of heads": (
        {"qkv_layouts": OF_HEADS, "chunk_size": BLOCK, "causal": False},
        ("blocks", OF_HEADS_MAP, (BLOCK, BLOCK)),
        {},
    ),
    "chunk_size": (
        {"qkv_layouts": ranges([0, 1], [1, 2]), "chunk_size": 12},
        both(("chunked", 12)),
        {},
    ),
    "q_blocksize and kv_blocksize": (
        {
            "qkv_layouts": ranges([0, 3], [2, 6]),
            "q_blocksize": 12,
            "kv_blocksize": 4,
        },
        both(("blocks", WIDE_MAP, (12, 4))),
        {},
    ),
    "fwd_params and bwd_params": (
        {
            "qkv_layouts": ranges([0, 1], [1, 2]),
            "fwd_params": FwdParams(q_blocksize=12, kv_blocksize=12),
            "bwd_params": BwdParams(q_blocksize=12, kv_blocksize=12),
        },
        both(("chunked", 12)),
        {},
    ),
    "mask_builder of layouts": (
        {"mask_builder": lambda: (BEFORE,), "chunk_size": BLOCK},
        both(("blocks", BEFORE_MAP, (BLOCK, BLOCK))),
        {},
    ),
    "mask_builder of masks": ({"mask_builder": local_masks}, both(("array", LOCAL)), {}),
    "mask_builder of rules": (
        {"mask_builder": lambda q, kv, heads, head, reps: masks.strided(2), "causal": False},
        ("strided", 2),
        {},
    ),
    "sliding_window": ({"sliding_window": 5}, both(("sliding_window", 5, 5)), {}),
    "causal": ({"causal": False}, ("everything",), {}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", some_on_both(PARAMETERS, "softmax_aux by head", "mask_builder of masks", "chunk_size")
)
def test_a_parameter_does_what_its_documentation_says(name, by_definition):
    arguments, spec, settings = PARAMETERS[name]
    found = expected(spec, **settings)
    assert oracle.relative_error(found, expected(CAUSAL)) > 1e-2, "the case changes nothing"
    assert oracle.relative_error(ours(**arguments), found) <= CLOSE


def test_every_parameter_has_a_case():
    elsewhere = {"query", "key", "value", "fused_backward", "sequence_parallelism_mesh_axis_name"}
    given = {name for arguments, *_ in PARAMETERS.values() for name in arguments}
    assert given | elsewhere == set(inspect.signature(blocksparse_attention).parameters)


@pytest.mark.parametrize(
    ("arguments", "block"),
    [
        ({"chunk_size": 16}, (16, 16)),
        ({"q_blocksize": 8, "kv_blocksize": 24}, (8, 24)),
        ({"fwd_params": FwdParams(q_blocksize=8)}, (8, 64)),
        ({"chunk_size": 8, "bwd_params": BwdParams(q_blocksize=8, kv_blocksize=8)}, (8, 8)),
        ({"qkv_layouts": ranges([0], [1])}, (64, 64)),
    ],
)
def test_the_mask_has_the_blocks_asked_for(monkeypatch, arguments, block):
    calls = []
    monkeypatch.setattr(
        blocksparse,
        "dot_product_attention",
        lambda q, k, v, mask, **rest: calls.append((mask, rest)) or q,
    )
    ours(**arguments)
    mask, _ = calls[0]
    assert mask.block == block


def test_a_fused_backward_is_that_of_the_hopper_kernels(monkeypatch):
    """It is required of `hopper`, which then runs or raises; elsewhere it is refused, with why."""
    with pytest.raises(
        ValueError, match=r"fused_backward=True needs the backend hopper, which need"
    ):
        ours(fused_backward=True)
    calls = []
    monkeypatch.setattr(
        blocksparse, "dot_product_attention", lambda q, k, v, **rest: calls.append(rest) or q
    )
    monkeypatch.setattr(
        blocksparse, "explain", lambda *q, **rest: SimpleNamespace(reasons={"hopper": None})
    )
    ours(fused_backward=True)
    assert calls[0]["options"].hopper_backward.fused
    assert calls[0]["implementation"] == "hopper"
    with pytest.raises(ValueError, match="fused_backward=True takes no bias, whose gradient"):
        ours(fused_backward=True, bias=BIAS)


def test_full_bounds_do_not_show_what_a_rule_hides(by_definition):
    """ejkernel's own example calls the diagonal of a causal mask full, which shows the future."""
    lower, upper = np.zeros((1, 1, 3), np.int32), np.array([[[1, 2, 3]]], np.int32)
    found = ours(qkv_layouts=(SparseMask(lower, upper, lower, upper),), chunk_size=BLOCK)
    assert oracle.relative_error(found, expected(CAUSAL)) <= CLOSE


@pytest.mark.parametrize("is_sorted", [True, False])
def test_sparse_masks_of_inputs_hold_what_is_seen(is_sorted):
    """Without segments and in order they are the smallest ones; full blocks are full."""
    spec, ids = both(("sliding_window", 3, None)), (np.zeros((B, T), np.int32),) * 2
    q_at = kv_at = np.tile(np.arange(T), (B, 1))
    if not is_sorted:
        q_at, kv_at, ids = Q_AT, KV_AT, (IDS, KV_IDS)
    spec = ("and", ("positions", spec, q_at, kv_at), ("documents", *ids))
    layouts = create_sparsity_mask(
        q_at, ids[0], kv_at, ids[1], None, 6, BLOCK, True, window_left=3, window_right=-1
    )
    seen = oracle.allowed(spec, B, 1, T, T).reshape(B, 1, 3, BLOCK, 4, 6).swapaxes(3, 4)
    seen = [seen, seen, seen.swapaxes(2, 3)]
    for layout, blocks in zip(layouts, seen, strict=True):
        live, full = blocks.any((4, 5)), blocks.all((4, 5))
        lower, upper, lower_full, upper_full = map(np.asarray, jax.tree.leaves(layout))
        for at in np.ndindex(live.shape[:3]):
            some = np.flatnonzero(live[at])
            own = (some[0], some[-1] + 1) if some.size else (0, 0)
            bounds = lower[at], upper[at]
            assert bounds == own if is_sorted else bounds[0] <= own[0] and own[1] <= bounds[1]
            assert full[at][lower_full[at] : upper_full[at]].all()
            assert upper_full[at] > lower_full[at] or not is_sorted or not full[at].any()


# ------------------------------------------------------------------------ ejkernel's known faults

UNSORTED = np.array([[1, 0, 2, 0] * 6, [0] * 5 + [1] * 9 + [0] * 7 + [-1] * 3], np.int32)
FAULTS = {
    "windows not aligned with blocks": ({"sliding_window": (5, 2)}, ("sliding_window", 5, 2)),
    "-1 sides": ({"sliding_window": (-1, 3)}, ("sliding_window", None, 3)),
    "unsorted segments": ({"q_segment_ids": UNSORTED}, ("documents", UNSORTED)),
    "masks of heads": ({"attention_mask": SEEN}, ("array", SEEN)),
    "built masks of heads": ({"mask_builder": local_masks}, ("array", LOCAL)),
    "sinks, in dq and dk too": ({"causal": True, "softmax_aux": SINKS}, CAUSAL),
}


@pytest.mark.parametrize("name", some_on_both(FAULTS, "unsorted segments"))
def test_faults_of_ejkernel_are_right_here(name):
    """Output and gradients, in three blocks on each side, and on the backend of this machine."""
    arguments, spec = FAULTS[name]
    a, allowed = arrays(), oracle.allowed(spec, B, N, T, T)
    sinks = {"sinks": SINKS} if "softmax_aux" in arguments else {}
    arguments = {"causal": False, "chunk_size": BLOCK} | arguments
    aux = arguments.pop("softmax_aux", None)

    @jax.jit
    def run(q, k, v, aux, d_out):
        out, pull_back = jax.vjp(
            lambda q, k, v, aux: blocksparse_attention(q, k, v, softmax_aux=aux, **arguments),
            q, k, v, aux,
        )  # fmt: skip
        return out, pull_back(d_out)

    out, grads = run(*(by_head(a[x]) for x in "qkv"), aux, by_head(a["d_out"]))
    found, _ = oracle.attention(a["q"], a["k"], a["v"], allowed=allowed, **sinks)
    assert oracle.relative_error(by_head(out), found) <= CLOSE
    wanted = oracle.attention_grads(**a, allowed=allowed, **sinks)
    for name, grad in zip(("dq", "dk", "dv"), grads[:3], strict=True):
        assert oracle.relative_error(by_head(grad), wanted[name]) <= CLOSE_GRADIENT
    if sinks:
        assert oracle.relative_error(grads[3], wanted["dsinks"]) <= CLOSE_GRADIENT


@pytest.mark.second_python
def test_sequences_may_be_sharded(by_definition):
    """Three shards of eight tokens, by vmap over a named axis; the masks are of whole sequences."""
    a = arrays()

    def shards(x, axis):
        return np.stack(np.split(x, 3, axis))

    def run(q, k, v, ids, seen):
        return blocksparse_attention(
            q, k, v, ids, ids, attention_mask=seen, sliding_window=(9, 2), mask_builder=local_masks,
            causal=False, sequence_parallelism_mesh_axis_name="tokens",
        )  # fmt: skip

    parts = [shards(by_head(a[x]), 2) for x in "qkv"]
    out = jax.vmap(run, axis_name="tokens")(*parts, shards(IDS, 1), shards(SEEN, 2))
    spec = ("and", ("array", LOCAL & SEEN), ("documents", IDS))
    found = by_head(np.concatenate(np.asarray(out), axis=2))
    wanted = expected(("and", spec, ("sliding_window", 9, 2)))
    assert oracle.relative_error(found, wanted) <= CLOSE


def main() -> None:
    """Output and gradients with tokens over two devices; test_easydel.py has a process for it."""
    a, tokens = arrays(), P(None, None, "tokens", None)

    def attend(q, k, v, ids):
        return blocksparse_attention(
            q, k, v, ids, ids, sliding_window=(9, -1), chunk_size=BLOCK,
            sequence_parallelism_mesh_axis_name="tokens",
        )  # fmt: skip

    mesh = Mesh(np.array(jax.devices()[:2]), ("tokens",))
    specs = (tokens, tokens, tokens, P(None, "tokens"))
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=tokens)

    @jax.jit
    def run(q, k, v, d_out):
        out, pull_back = jax.vjp(lambda *qkv: sharded(*qkv, IDS), q, k, v)
        return out, *pull_back(d_out)

    ours = run(*(by_head(a[name]) for name in ("q", "k", "v", "d_out")))
    spec = both(("and", ("documents", IDS), ("sliding_window", 9, None)))
    wanted = oracle.attention_grads(**a, allowed=oracle.allowed(spec, B, N, T, T))
    theirs = (expected(spec), wanted["dq"], wanted["dk"], wanted["dv"])
    errors = [oracle.relative_error(by_head(a), b) for a, b in zip(ours, theirs, strict=True)]
    assert max(errors) <= CLOSE_GRADIENT, errors
