"""The step sizes of the `xla` backend, for CPUs and GPUs: they do not change results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests import oracle
from tests.backends.test_conformance import GRADIENT_LIMIT, OUTPUT_LIMIT, expected
from tests.backends.test_conformance import run as run_case
from tests.draws import FAST_COMPILATION
from tests.probes import assert_near, assert_same_bits, random_arrays, run
from xsake import BlockMask, Options, _jax, masks
from xsake.backends import Call, Sizes
from xsake.backends.choice import BACKENDS
from xsake.backends.options import XlaSteps
from xsake.backends.xla import cpu_jax_0_10 as xla_chains
from xsake.backends.xla import output
from xsake.backends.xla.chunks import FEW_PAIRS, blocks_per_step, device_steps, work_order
from xsake.bench.cases import Case

# Several chunks, and lists that end inside a step; dq by scatter-add or in its own pass.
LARGE = {
    "dq added": Options(xla=XlaSteps(rows=64, keys=48)),
    "dq by rows": Options(xla=XlaSteps(rows=64, keys=48, dq_by_rows=True)),
}
CHAINS = Options(xla=XlaSteps(rows=512, keys=1, chains=3))
WAYS = LARGE | {"chains": CHAINS}
large_steps = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
EVERYTHING_AT_ONCE = {
    "B": 2,
    "T": 77,
    "S": 91,
    "N": 4,
    "K": 2,
    "H": 8,
    "Hv": 12,
    "rule": masks.sliding_window(60, 30),
    "block": (16, 16),
    "head_densities": (0.1, 0.8),
    "sinks": 0,
    "soft_cap": 3.0,
}


@pytest.fixture(autouse=True)
def few_rows_make_a_chain(monkeypatch):
    monkeypatch.setattr(xla_chains, "MIN_ROW_BLOCKS", 1)


OWN = Case("own bias", bias=(0, 0, 0, 0), **EVERYTHING_AT_ONCE)
SHARED = Case("shared bias", bias=(1, 0, 0, 1), dtype="bfloat16", **EVERYTHING_AT_ONCE)


@pytest.mark.parametrize(
    ("case", "way"),
    [
        (OWN, "chains"),
        (SHARED, "dq added"),
        pytest.param(OWN, "dq added", marks=pytest.mark.slow),
        pytest.param(SHARED, "chains", marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_everything_at_once_agrees_with_the_oracle(case, way):
    """Odd lengths, uneven heads, grouped heads, bias, sinks and a soft cap, with all gradients.

    The conformance tests cover dq_by_rows.
    """
    out, lse, grads, terms, _ = expected(case)
    (got_out, got_lse), got_grads = run_case(case, "xla", WAYS[way])
    assert oracle.relative_error(got_out, out) <= OUTPUT_LIMIT[case.dtype]
    assert oracle.relative_error(got_lse, lse, floor=1.0) <= OUTPUT_LIMIT[case.dtype]
    for name, grad in grads.items():
        error = oracle.relative_error(got_grads[name], grad, floor=1e-3 * terms[name])
        assert error <= GRADIENT_LIMIT[case.dtype], name


@large_steps
def test_a_dropped_block_cannot_leak_into_a_large_step(options):
    """NaN in a block that no row of its head visits, among rows that visit nothing at all."""
    q, k, v, d_out, d_lse = random_arrays(1, 64, 70, 4, 2, 8)
    bits = np.random.default_rng(1).random((1, 4, 4, 5)) < 0.7
    bits[:, :2, :, 2] = False  # the query heads of kv head 0 drop block 2
    bits[:, :, 1] = False
    mask = BlockMask.from_dense(jnp.asarray(bits), shape=(64, 70), block=16)
    clean = run("xla", q, k, v, d_out, d_lse, mask=mask, options=options)
    poison = [x.at[:, 32:48, 0].set(jnp.nan) for x in (k, v)]
    poisoned = run("xla", q, *poison, d_out, d_lse, mask=mask, options=options)
    assert_same_bits(clean, poisoned)
    out, lse, dq, dk, dv = poisoned
    assert not out[:, 16:32].any()
    assert (lse[:, 16:32] == -np.inf).all()
    assert not dq[:, 16:32].any()
    assert not dk[:, 32:48, 0].any()
    assert not dv[:, 32:48, 0].any()
    assert all(dk[:, 32:48, 1].any(-1).ravel()), "the other head does use it"
    bare = BlockMask.from_dense(jnp.zeros_like(bits), shape=(64, 70), block=16)
    out, lse, *grads = run("xla", q, *poison, d_out, d_lse, mask=bare, options=options)
    assert not out.any()
    assert (lse == -np.inf).all()
    assert not any(grad.any() for grad in grads)


@large_steps
def test_a_row_that_drops_a_block_cannot_see_it_in_a_large_step(options):
    """Block 0 is NaN. It comes right after the lists of row blocks 0 and 1, which drop it."""
    q, k, v, d_out, d_lse = random_arrays(1, 64, 70, 4, 2, 8)
    bits = np.zeros((1, 4, 4, 5), bool)
    # the lists of row blocks 0 and 1 end within their first step; row block 1 is empty in two heads
    bits[:, :, 0, 2] = bits[:, 2:, 1, 2] = bits[:, :, 2:, :4] = True
    mask = BlockMask.from_dense(jnp.asarray(bits), shape=(64, 70), block=16)
    clean = run("xla", q, k, v, d_out, d_lse, mask=mask, options=options)
    poison = [x.at[:, :16].set(jnp.nan) for x in (k, v)]
    poisoned = run("xla", q, *poison, d_out, d_lse, mask=mask, options=options)
    for name, x, y in zip(("out", "lse", "dq"), clean, poisoned, strict=False):
        assert np.asarray(x[:, :32]).tobytes() == np.asarray(y[:, :32]).tobytes(), name
        assert np.isnan(y[:, 32:]).all(), "the other rows do see it"


@pytest.mark.slow
def test_a_new_mask_does_not_recompile_large_steps():
    x = random_arrays(1, 64, 64, 2, 2, 8)
    programs, seen = run._cache_size(), set()
    for seed in range(3):
        bits = jnp.asarray(np.random.default_rng(seed).random((2, 4, 4)) < 0.6)
        mask = BlockMask.from_dense(bits, masks.causal(), block=16, capacity=16)
        seen.add(float(run("xla", *x, mask=mask, options=LARGE["dq by rows"])[2].sum()))
    assert run._cache_size() == programs + 1
    assert len(seen) == 3, "contents do matter"


@pytest.mark.parametrize("way", ["dq by rows", pytest.param("chains", marks=pytest.mark.slow)])
def test_memory_of_large_steps_is_linear_in_length(way):
    """Temporaries of output and gradients, from the compiler: twice the tokens, twice the bytes."""

    def temporary_bytes(T):
        x = jax.ShapeDtypeStruct((1, T, 2, 32), jnp.float32)
        mask = jax.eval_shape(lambda: BlockMask.from_rule(masks.causal(), (T, T)))

        def gradients(q, k, v, mask):
            return jax.grad(
                lambda *x: xsake.dot_product_attention(
                    *x, mask=mask, implementation="xla", options=WAYS[way]
                ).sum(),
                (0, 1, 2),
            )(q, k, v)

        lowered = jax.jit(gradients).lower(x, x, x, mask)
        return lowered.compile(FAST_COMPILATION).memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(2048), temporary_bytes(4096)
    assert long < 2.1 * short
    assert long < 4096 * 4096 * 4, "not even one head's logits"


def float_additions(options, bias_shape):
    """unique_indices of every scatter that adds floating-point numbers in the backward pass."""
    B, T, N, H = 2, 64, 2, 8
    x, bias = jnp.zeros((B, T, N, H)), jnp.zeros(bias_shape)
    mask = BlockMask.from_rule(masks.causal(), (T, T), block=16)
    arguments = {"implementation": "xla", "options": options}
    jaxpr = jax.make_jaxpr(
        jax.grad(
            lambda x, bias: xsake.dot_product_attention(
                x, x, x, bias, mask=mask, **arguments
            ).sum(),
            (0, 1),
        )
    )(x, bias)
    found = []

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scatter-add" and eqn.outvars[0].aval.dtype == jnp.float32:
                found.append(eqn.params["unique_indices"])
            for value in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    look(inner)

    look(jaxpr.jaxpr)
    return found


def test_deterministic_gradients_on_a_gpu_scatter_only_to_unique_indices(monkeypatch):
    """Atomic adds are unordered, so indices are unique or sums are kept in registers."""
    monkeypatch.setattr(_jax, "platform", lambda: "gpu")
    own = (2, 2, 64, 64)
    assert set(float_additions(Options(deterministic=True), own)) == {True}
    assert False in float_additions(Options(), own), "dq is added by default"


def test_a_shared_bias_is_not_deterministic_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_jax, "platform", lambda: "gpu")
    x, mask = jnp.zeros((2, 64, 2, 8)), BlockMask.from_rule(masks.causal(), (64, 64), block=16)

    def why_not(bias):
        return BACKENDS["xla"].why_not(
            Call(x, x, x, bias, mask, 1.0, None, Options(deterministic=True))
        )

    assert why_not(None) is None
    assert why_not(jnp.zeros((2, 2, 64, 64))) is None
    assert "bias [1, 2, 64, 64] deterministically" in why_not(jnp.zeros((1, 2, 64, 64)))


def test_steps_of_a_device():
    """CPUs add in order anyway; deterministic gradients have a cost on GPUs only."""
    mask = BlockMask.from_rule(masks.everything(), (256, 1280), block=128)

    def steps(platform, deterministic, pairs=FEW_PAIRS + 1):
        return device_steps(platform, deterministic, mask.block, pairs)

    assert not steps("cpu", deterministic=True).dq_by_rows
    assert steps("gpu", deterministic=True).dq_by_rows
    assert not steps("gpu", deterministic=False).dq_by_rows
    assert blocks_per_step(steps("cpu", deterministic=False), mask) == 1
    assert blocks_per_step(steps("gpu", deterministic=False), mask) == 8
    assert blocks_per_step(steps("gpu", deterministic=False), mask.transpose()) == 2
    for platform in ("cpu", "gpu"):
        assert not steps(platform, deterministic=False).one_loop
        assert steps(platform, deterministic=False, pairs=FEW_PAIRS).one_loop


@pytest.mark.parametrize(
    ("platform", "version", "block", "in_chains"),
    [
        ("cpu", (0, 10, 2), (128, 128), True),
        ("cpu", (0, 10, 2), (128, 64), False),
        ("cpu", (0, 11, 0), (128, 128), False),
        ("gpu", (0, 10, 2), (128, 128), False),
    ],
)
def test_jax_before_0_11_uses_chains_on_a_cpu(monkeypatch, platform, version, block, in_chains):
    monkeypatch.setattr(_jax, "version", lambda: version)
    assert (device_steps(platform, False, block, FEW_PAIRS + 1).chains > 8) == in_chains


@pytest.fixture
def chains_only(monkeypatch):
    """The forward by chunks is disabled."""
    monkeypatch.setattr(output, "visit_chunks", None)


@pytest.mark.usefixtures("chains_only")
@pytest.mark.parametrize(
    ("heads", "rule"),
    [
        pytest.param(1, None, marks=pytest.mark.slow),
        (4, masks.sliding_window(40, 20)),
        pytest.param(2, masks.sliding_window(40, 20), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_chains_make_every_visit_once(heads, rule):
    """Heads that differ, empty rows and columns."""
    arrays = random_arrays(2, 90, 77, 4, 2, 8)
    bits = np.random.default_rng(heads).random((2, heads, 6, 5)) < 0.15
    bits[:, :, 2] = True
    bits[0, 0, 3:] = False
    mask = BlockMask.from_dense(jnp.asarray(bits), rule, shape=(90, 77), block=16)
    got = run("xla", *arrays, mask=mask, options=CHAINS)
    assert_near(got, run("reference", *arrays, mask=mask))


@pytest.mark.usefixtures("chains_only")
@pytest.mark.parametrize("heads", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_chains_of_a_list_that_batch_rows_share(heads):
    arrays = random_arrays(2, 40, 40, 4, 2, 8)
    bits = np.random.default_rng(heads).random((1, heads, 3, 3)) < 0.6
    mask = BlockMask.from_dense(jnp.asarray(bits), masks.causal(), shape=(40, 40), block=16)
    got = run("xla", *arrays, mask=mask, options=CHAINS)
    assert_near(got, run("reference", *arrays, mask=mask))


@pytest.mark.by_version
def test_a_batch_of_texts_that_are_long_enough_for_the_usual_steps():
    """Without options: each JAX version then takes the way that is fastest for it."""
    q, k, v, *_ = random_arrays(2, 1056, 1056, 2, 1, 8)
    assert FEW_PAIRS < 2 * 2 * 1056**2
    got, expected = (
        xsake.dot_product_attention(q, k, v, is_causal=True, implementation=name)
        for name in ("xla", "dense")
    )
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.usefixtures("chains_only")
def test_one_long_row_is_never_in_two_chains():
    """The row block has more visits than total ÷ chains."""
    arrays = random_arrays(2, 90, 80, 4, 2, 8)
    bits = np.zeros((2, 4, 6, 5), bool)
    bits[1, 3, 2] = bits[0, 0, 0, 0] = True
    rule = masks.sliding_window(40, 20)  # so that both kinds of visits exist
    mask = BlockMask.from_dense(jnp.asarray(bits), rule, shape=(90, 80), block=16)
    got = run("xla", *arrays, mask=mask, options=CHAINS)
    assert_near(got, run("reference", *arrays, mask=mask))


@pytest.mark.usefixtures("chains_only")
def test_a_denser_mask_of_the_same_capacity_does_not_recompile_chains():
    arrays = random_arrays(1, 64, 64, 2, 2, 8)
    programs, one_program = None, True
    for share in (0.0, 0.3, 1.0):
        bits = jnp.asarray(np.random.default_rng(3).random((2, 4, 4)) < share)
        mask = BlockMask.from_dense(bits, masks.causal(), block=16, capacity=16)
        expected = run("reference", *arrays, mask=mask)
        before = run._cache_size()
        assert_near(run("xla", *arrays, mask=mask, options=CHAINS), expected)
        one_program &= programs is None or run._cache_size() == before
        programs = run._cache_size()
    assert one_program


def test_float32_stays_float32_where_float64_is_enabled():
    """Constants that JAX would make 64 bits wide: in chunks and in chains."""
    arrays = random_arrays(1, 40, 40, 2, 1, 8)
    expected = run("reference", *arrays, is_causal=True)
    with jax.enable_x64(True):
        for options in (None, CHAINS):
            got = run("xla", *arrays, is_causal=True, options=options)
            assert {x.dtype for x in got} == {jnp.dtype(jnp.float32)}
            assert_near(got, expected)


@pytest.mark.parametrize(
    ("limit", "value"), [("MIN_ROW_BLOCKS", 5), ("MAX_VISITS", 19)], ids=["few", "many"]
)
def test_chains_are_not_used_for_few_row_blocks_or_too_many_visits(monkeypatch, limit, value):
    """Two heads, each with four row blocks and a capacity of ten blocks."""
    q = jnp.zeros((1, 64, 2, 8))
    mask = BlockMask.from_rule(masks.causal(), (64, 64), block=16)
    assert xla_chains.fits(mask, Sizes.of(q, q, q), 2)
    assert not xla_chains.fits(mask, Sizes.of(q, q, q), 0)
    monkeypatch.setattr(xla_chains, limit, value)
    assert not xla_chains.fits(mask, Sizes.of(q, q, q), 2)


@pytest.mark.slow
def test_chunks_side_by_side_equal_chunks_in_sequence():
    """Up to rounding: XLA contracts multiply and add differently in the two programs on x86."""
    T, side = 77, 10
    arrays = random_arrays(2, T, T, 3, 3, 8)
    blocks = np.random.default_rng(T).random((2, 3, side, side)) < 0.5
    mask = BlockMask.from_dense(jnp.asarray(blocks), masks.causal(), shape=(T, T), block=8)
    steps = [XlaSteps(rows=16, keys=1, side_by_side=n) for n in (1, 3)]
    assert len(work_order(mask, Sizes.of(*arrays[:3]), steps[1], 3)) == 3
    assert_near(*(run("xla", *arrays, mask=mask, options=Options(xla=x)) for x in steps))


def test_few_chunks_do_not_go_side_by_side():
    """Few chunks use one loop body, which saves compile time."""
    q = jnp.zeros((2, 24, 3, 8))
    mask = BlockMask.from_rule(masks.causal(), (24, 24), block=8)
    assert len(work_order(mask, Sizes.of(q, q, q), XlaSteps(rows=16, keys=1), 3)) == 1


def test_a_negative_number_of_chains_is_refused():
    with pytest.raises(ValueError, match=r"XlaSteps.chains must not be negative, got -1"):
        XlaSteps(rows=1, keys=1, chains=-1)


@pytest.mark.parametrize("name", ["rows", "keys", "side_by_side"])
def test_a_step_size_of_zero_is_refused(name):
    with pytest.raises(ValueError, match=rf"XlaSteps.{name} must be at least 1, got 0"):
        XlaSteps(**{"rows": 1, "keys": 1} | {name: 0})
