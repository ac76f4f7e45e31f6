"""The TPU kernels: interpreted against the oracle and splash attention, lowered, and refusals."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

import xsake
from tests import oracle
from tests.backends import test_conformance as conformance
from tests.backends.tpu.conftest import WITH_RACES
from xsake import BlockMask, Options, masks
from xsake.backends import Call, tpu
from xsake.backends.tpu import visits
from xsake.bench.cases import CONFORMANCE, Case
from xsake.masks import intervals

pytestmark = pytest.mark.second_python  # a minute in the interpreter

BLOCK = 32
B, T, S, N, K, H, Hv = 2, 50, 60, 2, 1, 24, 40
SOFT_CAP = 3.0


@functools.cache
def attend_and_gradients():
    """One program for all run-time masks: blocks, segment ids, positions and lengths are data."""

    @jax.jit
    def run(q, k, v, d_out, d_lse, blocks, ids, positions, lengths):
        rule = masks.at_positions(masks.sliding_window(40, 3), *positions)
        rule = rule & masks.documents(*ids) & masks.lengths(*lengths)
        mask = BlockMask.from_dense(blocks, rule, shape=(T, S), block=BLOCK)
        settings = {"implementation": "tpu", "logits_soft_cap": SOFT_CAP, "return_residual": True}
        attend = functools.partial(xsake.dot_product_attention, mask=mask, **settings)
        results, pull_back = jax.vjp(attend, q, k, v)
        return *results, *pull_back((d_out, d_lse))

    return run


def run_time_mask(kind: str):
    """(blocks [B, N, 2, 2], ids, positions, lengths) of one kind."""
    rng = np.random.default_rng(len(kind))
    blocks = np.ones((B, N, 2, 2), bool)
    ids = np.zeros((B, T), np.int32), np.zeros((B, S), np.int32)
    positions = np.tile(np.arange(T), (B, 1)), np.tile(np.arange(S), (B, 1))
    lengths = np.full(B, T), np.full(B, S)
    if kind == "unequal lists":  # a head with all blocks, and heads with empty rows and columns
        blocks[0, 1, 0], blocks[1, 0, :, 1], blocks[1, 1] = False, False, np.eye(2)
    elif kind == "data":
        ids = rng.integers(-1, 2, (B, T)), rng.integers(-1, 2, (B, S))
        positions = rng.permuted(positions[0], axis=1), rng.permuted(positions[1], axis=1)
        lengths = np.array([T, 20]), np.array([33, S])
    as_int32 = functools.partial(jax.tree.map, lambda x: np.asarray(x, np.int32))
    return blocks, as_int32(ids), as_int32(positions), as_int32(lengths)


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(B, T, N, H), (B, S, K, H), (B, S, K, Hv), (B, T, N, Hv), (B, T, N)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("kind", ["unequal lists", "data"])
def test_run_time_masks_agree_with_the_oracle(kind, interpreted):
    """Grouped heads, odd lengths, a soft cap; output, logsumexp and gradients, without a race."""
    check_against_the_oracle(attend_and_gradients(), kind)


def test_visits_that_fill_scalar_memory_are_split_into_launches(monkeypatch, interpreted):
    """Each launch has some of the work tiles of two kv heads."""
    monkeypatch.setattr(tpu, "interpret", dataclasses.replace(WITH_RACES, random_seed=1))
    monkeypatch.setattr(visits, "MOST_WORDS", 8)
    check_against_the_oracle(attend_and_gradients.__wrapped__(), "unequal lists")


def check_against_the_oracle(run, kind):
    """run: the result of `attend_and_gradients`."""
    blocks, ids, positions, lengths = run_time_mask(kind)
    q, k, v, d_out, d_lse = inputs()
    rule = "positions", ("sliding_window", 40, 3), *positions
    parts = rule, ("documents", *ids), ("lengths", *lengths), ("blocks", blocks, (BLOCK, BLOCK))
    spec = functools.reduce(lambda a, b: ("and", a, b), parts)
    call = {"allowed": oracle.allowed(spec, B, N, T, S), "soft_cap": SOFT_CAP}
    out, lse = oracle.attention(*(x.astype(np.float64) for x in (q, k, v)), **call)
    assert np.isinf(lse).any()  # empty queries
    d_lse = np.where(np.isfinite(lse), d_lse, 0).astype(np.float32)
    grads = oracle.attention_grads(
        *(x.astype(np.float64) for x in (q, k, v)), **call, d_out=d_out, d_lse=d_lse
    )
    got = run(q, k, v, d_out, d_lse, blocks, ids, positions, lengths)
    want = {"out": out, "lse": lse, **grads}
    for x, (name, y) in zip(got, want.items(), strict=True):
        floor = 1.0 if name == "lse" else 0.0
        limits = conformance.GRADIENT_LIMIT if name in grads else conformance.OUTPUT_LIMIT
        assert oracle.relative_error(x, y, floor=floor) <= limits["float32"], name


def test_a_dropped_block_cannot_leak(interpreted):
    """NaN in all keys of a dropped block changes no bit of any result; its dk and dv are 0."""
    blocks, *rest = run_time_mask("unequal lists")
    blocks[..., 1] = False
    q, k, v, d_out, d_lse = inputs()
    k_bad, v_bad = (np.where(np.arange(S)[:, None, None] < BLOCK, x, np.nan) for x in (k, v))
    good = attend_and_gradients()(q, k, v, d_out, d_lse, blocks, *rest)
    bad = attend_and_gradients()(q, k_bad, v_bad, d_out, d_lse, blocks, *rest)
    for x, y in zip(good, bad, strict=True):
        np.testing.assert_array_equal(x, y)
    assert not any(np.any(x[:, BLOCK:]) for x in bad[3:])


# ------------------------------------------------------------------------------------- conformance


def reduced(case: Case) -> Case:
    """The case with about 60 tokens in blocks of 32, and two heads unless they form groups."""
    short = min(60, case.T, case.S or case.T)
    factor = short / min(case.T, case.S or case.T)
    S = None if case.S is None else int(case.S * factor)
    block = min(case.block[0], BLOCK), min(case.block[1], BLOCK)
    # Positions come with a rule, never with blocks.
    densities = None if case.permuted else case.head_densities or (1.0,)
    N = case.N if case.K or case.mask_heads else 2
    return dataclasses.replace(
        case, T=int(case.T * factor), S=S, N=N, block=block, head_densities=densities
    )


# One case for each kind of input that the tests above do not have runs on the second Python.
ON_SECOND_PYTHON = {"bfloat16", "several sinks, documents", "heads of 256"}


def why_not(case: Case) -> str | None:
    """What `tpu` says about a case wherever it runs."""
    if case.bias is not None or case.token_mask is not None or case.dtype == "float16":
        return "refused, see below"
    return "its rule is random blocks" if case.name == "bigbird" else None


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            reduced(case),
            id=case.name,
            marks=pytest.mark.second_python if case.name in ON_SECOND_PYTHON else pytest.mark.slow,
        )
        for case in CONFORMANCE
        if why_not(case) is None
    ],
)
def test_conformance_cases_agree_with_the_oracle(case, interpreted):
    conformance.test_every_case_agrees_with_the_oracle(case, "tpu")


# ------------------------------------------------------------------------------------------- splash


SPLASH_T, SPLASH_BLOCK = 256, 128


def splash_cases():
    """(name, rule, block densities by head) of masks that splash attention can express."""
    causal, window = masks.causal(), masks.sliding_window(70, 20)
    return [
        ("causal, unequal heads", causal, (0.2, 0.9)),
        ("causal", causal, (1.0, 1.0)),
        ("all", masks.everything(), (1.0, 1.0)),
        ("unequal heads", masks.everything(), (0.3, 0.7)),
        ("window", window, (1.0, 1.0)),
        ("window, unequal heads", window, (0.2, 0.9)),
        ("causal window", causal & window, (1.0, 1.0)),
        ("chunked", masks.chunked(100) & causal, (1.0, 1.0)),
        ("prefix", masks.prefix(150) | causal, (1.0, 1.0)),
        ("strided", masks.strided(3) & causal, (1.0, 1.0)),
    ]


@pytest.mark.parametrize(
    ("rule", "densities"),
    [pytest.param(*rest, id=name, marks=pytest.mark.slow) for name, *rest in splash_cases()],
)
def test_splash_attention_gives_the_same(rule, densities, interpreted):
    """Output and gradients within 1e-5 in float32, both interpreted, ours without a race."""
    case = Case("splash", T=SPLASH_T, N=2, head_densities=densities, rule=rule)
    given = case.arguments()
    q, k, v = (given[name] for name in ("query", "key", "value"))
    mask = given["mask"]
    weight = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)
    heads = [splash_mask.NumpyMask(np.asarray(x)) for x in mask.to_dense(heads=2)[0]]
    sizes = {
        field.name: SPLASH_BLOCK
        for field in dataclasses.fields(splash_kernel.BlockSizes)
        if field.name.startswith("block_")
    }
    splash = splash_kernel.make_splash_mha(
        splash_mask.MultiHeadMask(heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash_kernel.BlockSizes(**sizes),
        interpret=True,
    )

    def theirs(q, k, v):
        q, k, v = (x[0].swapaxes(0, 1) for x in (q * case.H**-0.5, k, v))
        return splash(q, k, v).swapaxes(0, 1)[None]

    def ours(q, k, v):
        return xsake.dot_product_attention(q, k, v, mask=mask, implementation="tpu")

    @functools.partial(jax.jit, static_argnums=0)
    def both(attend, q, k, v):
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(weight)

    for x, y in zip(both(ours, q, k, v), both(theirs, q, k, v), strict=True):
        assert oracle.relative_error(x, y) <= 1e-5


# ----------------------------------------------------------------------------------------- lowering


@pytest.mark.parametrize(
    ("head_size", "dtype", "block", "by_intervals"),
    [
        (64, "bfloat16", 128, False),
        (64, "bfloat16", 128, True),
        (128, "bfloat16", 128, False),
        (256, "bfloat16", 128, False),
        (64, "float32", (16, 64), False),
    ],
)
def test_forward_and_backward_lower_for_tpus(head_size, dtype, block, by_intervals, monkeypatch):
    """Three kernels as Mosaic modules, with every kind of rule, on a machine without a TPU.

    Those of a mask with intervals in several launches.
    """
    length = 300
    rule = masks.at_positions(masks.sliding_window(90, 3), jnp.arange(length), jnp.arange(length))
    rule &= masks.documents(jnp.arange(length) // 100)
    rule &= masks.lengths(query=jnp.array([250]), key_value=jnp.array([200]))
    if by_intervals:
        monkeypatch.setattr(intervals, "are_read", lambda: True)
        monkeypatch.setattr(visits, "MOST_WORDS", 24)
    else:
        rule &= ~masks.first(2) & (masks.strided(7) | masks.chunked(48))
    mask = BlockMask.from_rule(rule, (length, length), block=block)
    assert (mask.intervals is not None) == by_intervals
    q, k, v = (jax.ShapeDtypeStruct((1, length, heads, head_size), dtype) for heads in (4, 2, 2))

    def gradients(q, k, v):
        def attend(q, k, v):
            return tpu.forward(Call(q, k, v, None, mask, 0.1, 5.0, Options()))

        results, pull_back = jax.vjp(attend, q, k, v)
        return pull_back(results)

    # Remainders lower to instructions of one generation, which a mesh without devices names.
    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(gradients).trace(q, k, v).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 3


@pytest.mark.parametrize("most", [visits.MOST_WORDS, pytest.param(24, marks=pytest.mark.slow)])
def test_they_lower_inside_shard_map(most, monkeypatch):
    """In one launch, and in several, which share their results; both with intervals."""
    monkeypatch.setattr(intervals, "are_read", lambda: True)
    monkeypatch.setattr(visits, "MOST_WORDS", most)
    length, heads = 300, jax.sharding.PartitionSpec(None, None, "heads", None)
    rule = masks.causal() & masks.documents(jnp.arange(length) // 100)
    mask = BlockMask.from_rule(rule, (length, length))
    q, k, v = (jax.ShapeDtypeStruct((1, length, n, 64), "bfloat16") for n in (4, 2, 2))

    def gradients(q, k, v):
        results, pull_back = jax.vjp(
            lambda *qkv: tpu.forward(Call(*qkv, None, mask, 0.1, None, Options())), q, k, v
        )
        return pull_back(results)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("heads",))
    run = jax.shard_map(gradients, mesh=mesh, in_specs=(heads,) * 3, out_specs=(heads,) * 3)
    text = jax.jit(run).trace(q, k, v).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 3


# ----------------------------------------------------------------------------------------- refusals


TOKEN_RULE = "array([1, 1, 256, 256])"


def reason(dtype="bfloat16", H=64, **arguments):
    q = jax.ShapeDtypeStruct((1, 256, 2, H), dtype)
    return xsake.explain(q, q, q, **arguments).reasons["tpu"]


def test_it_needs_a_tpu():
    assert reason() == "needs a TPU; this is a cpu"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, None),
        ({"dtype": "float16"}, "takes bfloat16 and float32; this is float16"),
        ({"bias": jax.ShapeDtypeStruct((256, 256), "float32")}, "takes no bias"),
        ({"H": 264}, "takes heads of up to 256; these are 264 and 264"),
        (
            {"mask": BlockMask.from_rule(masks.causal(), (256, 256), block=(128, 24))},
            "takes blocks of multiples of 16 up to 512; these are 128 × 24",
        ),
        (
            {"mask": np.ones((256, 256), bool)},
            f"cannot evaluate {TOKEN_RULE}, only rules of positions, segment ids and lengths",
        ),
    ],
)
def test_refusals(arguments, said, monkeypatch):
    monkeypatch.setattr(tpu, "interpret", WITH_RACES)
    assert reason(**arguments) == said


def test_a_row_block_with_too_many_visits_is_refused(monkeypatch):
    monkeypatch.setattr(tpu, "interpret", WITH_RACES)
    monkeypatch.setattr(visits, "MOST_WORDS", 2)
    assert reason(is_causal=True) == (
        "takes row blocks of up to 1 visits; these may have 2; use larger blocks"
    )
