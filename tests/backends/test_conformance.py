"""Every case of bench/cases.py on every backend, against the float64 oracle and against jax.nn."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests import oracle
from tests.draws import FAST_COMPILATION
from xsake import _jax, masks
from xsake.backends import Options, hopper
from xsake.backends.choice import BACKENDS
from xsake.backends.options import XlaSteps
from xsake.bench.cases import CONFORMANCE, Case

# On a GPU `pytest -m gpu` runs the whole module.
pytestmark = [pytest.mark.gpu] if _jax.platform() == "gpu" else []

# max |error| ÷ max |reference|. float32: sums of a few hundred terms of relative error 6e-8, and
# gradients chain three products. Half precision: inputs are rounded before the oracle sees them, so
# what remains is the rounding of the output (bfloat16: 2**-9) and of p and ds (the same again).
OUTPUT_LIMIT = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1e-2}
GRADIENT_LIMIT = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}

DIFFERENTIABLE = {"query": "dq", "key": "dk", "value": "dv", "bias": "dbias", "sinks": "dsinks"}

# Every backend with its defaults, and `xla` in two more ways. Large steps are those of a GPU: many
# query rows and several kv blocks per step (so that lists end inside a step), and dq in a pass of
# its own. Three loops are those of large calls; the calls here are small and have one.
LARGE_STEPS, THREE_LOOPS = "xla, large steps", "xla, three loops"
WAYS = {name: (name, None) for name in BACKENDS}
WAYS[LARGE_STEPS] = "xla", Options(xla=XlaSteps(rows=2048, keys=256, dq_by_rows=True))
WAYS[THREE_LOOPS] = "xla", Options(xla=XlaSteps(rows=512, keys=1, side_by_side=4))

# The step size changes how tokens, row blocks and bias are batched. It does not change how rules,
# sinks and dtypes are handled, so large steps run only the cases that affect batching: lengths,
# lists, groups of heads, bias, rules that read arrays at b, n, q or k, and empty rows.
IN_LARGE_STEPS = {
    "dense",
    "odd lengths",
    "one query",
    "more keys than queries",
    "more queries than keys",
    "first keys and window",
    "one kv head",
    "two batch rows, odd sizes",
    "head blocks",
    "head blocks, no rule",
    "kv-head blocks",
    "kv blocks of 64",
    "more row blocks than a GPU takes at once",
    "shared blocks",
    "token mask",
    "documents, T ≠ S",
    "lengths",
    "permuted positions",
    "bias",
    "bias per head",
    "bias per query",
    "soft cap and bias",
    "bfloat16 head blocks",
}
# Each case compiles its own program. A GPU runs all of them; a CPU runs one case of each kind:
# lists that end inside a step, groups of heads, bias, arrays read at q and k, empty rows.
LARGE_STEPS_ON_A_CPU = {
    "odd lengths",
    "one kv head",
    "head blocks",
    "token mask",
    "documents, T ≠ S",
    "bias per query",
    "bfloat16 head blocks",
}
# The formulas of `dense` and `reference` know nothing of blocks: what differs is the dtype, the
# sizes, bias, sinks, the soft cap and where the mask comes from.
DENSE_ON_A_CPU = {
    "one token",
    "more keys than queries",
    "window, causal",
    "grouped heads",
    "values half as wide",
    "kv-head blocks",
    "bigbird",
    "documents, T ≠ S",
    "lengths",
    "permuted positions",
    "token mask",
    "bias per query",
    "soft cap and bias",
    "several sinks, documents",
    "float16",
    "bfloat16 head blocks",
}
REFERENCE_ON_A_CPU = {
    "more keys than queries",
    "values half as wide",
    "lengths",
    "token mask",
    "soft cap and bias",
    "several sinks, documents",
    "bfloat16 head blocks",
}
# Sizes and rules that matter to the Hopper kernels. To `xla` these are sizes like any other, and it
# evaluates every rule alike; test_masks.py and test_block_mask.py have them all.
FOR_HOPPER = {
    "bigbird",
    "chunked, causal",
    "dilated",
    "longformer",
    "not",
    "prefix",
    "strided",
    "window, causal",
    "heads of 256",
    "values half as wide",
    "values twice as wide",
    "row blocks of 64",
    "kv blocks of 64",
    "kv blocks of 64, heads of 256",
    "more row blocks than a GPU takes at once",
}
# Cases with one kind of input, which other cases here have beside another, and test_properties.py
# or test_probes.py have on `xla` too.
REPEATED_ON_XLA = {
    "causal",
    "window",
    "first keys and window",
    "more keys than queries",
    "more queries than keys",
    "two batch rows, odd sizes",
    "values narrower than keys",
    "grouped heads",
    "head blocks, no rule",
    "token mask, shared",
    "documents",
    "bias",
    "bias per head",
    "soft cap",
    "sinks",
    "bfloat16",
    "float16",
}
# Three loops are compiled with XLA's optimiser: one case for each kind of input.
IN_THREE_LOOPS = {
    "head blocks",
    "documents, T ≠ S",
    "bias per query",
    "bfloat16 head blocks",
}
assert {case.name for case in CONFORMANCE} >= IN_LARGE_STEPS
assert IN_LARGE_STEPS >= LARGE_STEPS_ON_A_CPU
assert {case.name for case in CONFORMANCE} >= DENSE_ON_A_CPU | FOR_HOPPER | IN_THREE_LOOPS
assert {case.name for case in CONFORMANCE} >= REPEATED_ON_XLA
assert DENSE_ON_A_CPU >= REFERENCE_ON_A_CPU


def marks_of(case: Case, way: str) -> list[pytest.MarkDecorator]:
    if way == THREE_LOOPS:
        return [pytest.mark.optimized]
    is_here = {
        LARGE_STEPS: case.name in LARGE_STEPS_ON_A_CPU,
        "dense": case.name in DENSE_ON_A_CPU,
        "reference": case.name in REFERENCE_ON_A_CPU,
        "xla": case.name not in FOR_HOPPER | REPEATED_ON_XLA,
        "tpu": _jax.platform() == "tpu",  # tests/backends/tpu/ interprets the kernels
    }
    return [] if is_here.get(way, True) or _jax.platform() == "gpu" else [pytest.mark.slow]


PAIRS = [
    pytest.param(case, way, id=f"{case.name}-{way}", marks=marks_of(case, way))
    for case in CONFORMANCE
    for way in WAYS
    if case.name in {LARGE_STEPS: IN_LARGE_STEPS, THREE_LOOPS: IN_THREE_LOOPS}.get(way, {case.name})
]


@functools.cache
def arguments(case: Case) -> dict[str, object]:
    return case.arguments()


@functools.cache
def why_no_hopper() -> str | None:
    """Of a call that the kernels take on every machine that has them."""
    q = jax.ShapeDtypeStruct((1, 128, 1, 128), jnp.bfloat16)
    return xsake.explain(q, q, q).reasons["hopper"]


def taken_by(case: Case, backend: str) -> Case:
    """The case with a dtype and block size that the backend supports.

    Skips, with the backend's own reason, what it cannot run on this machine.
    """
    if backend == "hopper":
        if (reason := why_no_hopper()) is not None:
            pytest.skip(f"hopper {reason}")
        dtype = case.dtype if case.dtype != "float32" else "bfloat16"
        block = tuple(x if x in hopper.limits.BLOCKS else 128 for x in case.block)
        case = dataclasses.replace(case, dtype=dtype, block=block)
    reason = xsake.explain(**arguments(case)).reasons[backend]
    if reason is not None:
        pytest.skip(f"{backend} {reason}")
    return case


def spec_of(rule):
    """A rule as a spec for the oracle, read off its public fields."""
    match type(rule).__name__:
        case "Window":
            return ("sliding_window", rule.left, rule.right)
        case "And" | "Or" as name:
            return (name.lower(), spec_of(rule.a), spec_of(rule.b))
        case "Not":
            return ("not", spec_of(rule.a))
        case "Chunked":
            return ("chunked", rule.size)
        case "First":
            return ("first", rule.n)
        case "Strided":
            return ("strided", rule.stride)
        case "GlobalTokens":
            return ("global_tokens", rule.n)
        case "Random":
            return ("random", rule.density, rule.seed, rule.block)
    raise AssertionError(f"the oracle has no equivalent of {rule}")


def allowed_in(case: Case) -> np.ndarray:
    """Who sees whom in a case, bool [B, N, T, S], by the oracle alone."""
    B, T, S, N, *_ = case.sizes
    arrays, parts = case.arrays(), [("everything",)]
    if case.rule is not None:
        rule = spec_of(case.rule)
        parts.append(("positions", rule, arrays.get("q_positions"), arrays.get("kv_positions")))
    if case.blocks() is not None:
        parts.append(("blocks", case.blocks(), case.block))
    if "mask" in arrays:
        parts.append(("array", arrays["mask"]))
    if case.documents:
        parts.append(("documents", arrays["q_segment_ids"], arrays["kv_segment_ids"]))
    if case.lengths:
        parts.append(("lengths", arrays["query_seq_lengths"], arrays["key_value_seq_lengths"]))
    return oracle.allowed(functools.reduce(lambda a, b: ("and", a, b), parts), B, N, T, S)


@functools.cache
def expected(case: Case):
    """The oracle's output, logsumexp and gradients, and the cotangents they belong to."""
    given = {name: np.asarray(arguments(case)[name], np.float64) for name in inputs_of(case)}
    q, k, v = (given.pop(name) for name in ("query", "key", "value"))
    setting = {"allowed": allowed_in(case), "scale": case.scale, "soft_cap": case.soft_cap, **given}
    out, lse = oracle.attention(q, k, v, **setting)
    rng = np.random.default_rng(99)
    d_out, d_lse = (rng.standard_normal(x.shape) for x in (out, lse))
    d_lse = np.where(np.isfinite(lse), d_lse, 0)
    d_out = np.asarray(jnp.asarray(d_out, case.dtype), np.float64)
    cotangents = {"d_out": d_out, "d_lse": d_lse}
    grads = oracle.attention_grads(q, k, v, **setting, **cotangents)
    terms = oracle.gradient_terms(q, k, v, **setting, **cotangents)
    return out, lse, grads, terms, (d_out, d_lse)


def inputs_of(case: Case) -> list[str]:
    return [name for name in DIFFERENTIABLE if name in arguments(case)]


def run(case: Case, backend: str, options: Options | None = None):
    """(out, lse), gradients of every differentiable input."""
    given = arguments(case)
    names = inputs_of(case)
    rest = {name: x for name, x in given.items() if name not in names}

    def attend(*arrays):
        call = dict(zip(names, arrays, strict=True)) | rest
        return xsake.dot_product_attention(
            **call, implementation=backend, return_residual=True, options=options
        )

    # Only GPUs use large steps, so there is no need to compile them with a CPU's optimiser.
    large = options is WAYS[LARGE_STEPS][1]

    @functools.partial(jax.jit, compiler_options=FAST_COMPILATION if large else None)
    def both(arrays, d_out, d_lse):
        results, pull_back = jax.vjp(attend, *arrays)
        return results, pull_back((d_out, d_lse))

    d_out, d_lse = expected(case)[-1]
    results, grads = both(
        [given[name] for name in names],
        jnp.asarray(d_out, case.dtype),
        jnp.asarray(d_lse, jnp.float32),
    )
    return results, dict(zip(map(DIFFERENTIABLE.get, names), grads, strict=True))


@pytest.mark.parametrize(("case", "way"), PAIRS)
def test_every_case_agrees_with_the_oracle(case: Case, way: str):
    """Output, logsumexp and the gradient of every input."""
    backend, options = WAYS[way]
    case = taken_by(case, backend)
    out, lse, grads, terms, _ = expected(case)
    (got_out, got_lse), got_grads = run(case, backend, options)
    assert (got_out.dtype, got_lse.dtype) == (jnp.dtype(case.dtype), jnp.float32)
    limit = OUTPUT_LIMIT[case.dtype]
    assert oracle.relative_error(got_out, out) <= limit
    assert oracle.relative_error(got_lse, lse, floor=1.0) <= limit
    assert got_grads.keys() == grads.keys()
    for name, grad in grads.items():
        # where terms cancel to nothing (one visible key: dq = 0) rounding is relative to the terms
        error = oracle.relative_error(got_grads[name], grad, floor=1e-3 * terms[name])
        assert error <= GRADIENT_LIMIT[case.dtype], f"{name}: {error}"


def exact_jax_nn(*args, **named):
    """jax.nn's attention at the highest matmul precision; by default it uses TF32 on GPUs."""
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(*args, **named)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"is_causal": True},
        {"local_window_size": (9, 3)},
        {"local_window_size": 12, "is_causal": True},
        {
            "query_seq_lengths": np.array([7, 64], np.int32),
            "key_value_seq_lengths": np.array([50, 64], np.int32),
            "scale": 0.3,
        },
        {
            "bias": np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(1, 1, 64, 64),
            "mask": np.arange(64 * 64).reshape(64, 64) % 3 != 1,
        },
    ],
    ids=lambda extra: "+".join(extra) or "plain",
)
def test_jax_nn_calls_work_unchanged(extra):
    """The same call on jax.nn gives the same output and gradients."""
    rng = np.random.default_rng(5)
    q = jnp.asarray(rng.standard_normal((2, 64, 4, 16)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((2, 64, 2, 16)), jnp.float32) for _ in range(2))
    weight = jnp.asarray(rng.standard_normal(q.shape), jnp.float32)

    def output_and_gradients(attend):
        def both(q, k, v):
            out, pull_back = jax.vjp(lambda *x: attend(*x, **extra), q, k, v)
            return out, *pull_back(weight)

        return jax.jit(both)(q, k, v)

    want = output_and_gradients(exact_jax_nn)
    for backend in ("xla", "dense"):
        ours = functools.partial(xsake.dot_product_attention, implementation=backend)
        got = output_and_gradients(ours)
        for x, y, limit in zip(got, want, (2e-6, 1e-5, 1e-5, 1e-5), strict=True):
            assert oracle.relative_error(x, y) <= limit, backend


def in_many_ways_at_once(backend, arrays, ids):
    """out, lse, and the gradients by q, k, v, bias and sinks."""
    *inputs, d_out, d_lse = arrays

    def attend(q, k, v, bias, sinks):
        return xsake.dot_product_attention(
            q, k, v, bias, is_causal=True, local_window_size=(5, 3), q_segment_ids=ids,
            sinks=sinks, implementation=backend, return_residual=True,
        )  # fmt: skip

    out, pull_back = jax.vjp(attend, *inputs)
    return *out, *pull_back((d_out, d_lse))


def many_inputs():
    """(q, k, v, bias, sinks, d_out, d_lse in float64, ids); odd lengths, grouped heads."""
    rng = np.random.default_rng(0)
    q, k, v, d_out, d_lse = oracle.random_inputs(rng, 2, 21, 21, 4, 2, 8).values()
    bias, sinks = rng.standard_normal((1, 4, 21, 21)), rng.standard_normal(4)
    return (q, k, v, bias, sinks, d_out, d_lse), np.arange(21)[None] // 8


@pytest.mark.parametrize("backend", ["xla", "dense", "reference"])
def test_float64_stays_float64_throughout(backend):
    """Within 1e-12, some thousand roundings of 1e-16: any float32 on the way would make it 1e-8."""
    arrays, ids = many_inputs()
    *inputs, d_out, d_lse = arrays
    call = dict(zip(("q", "k", "v", "bias", "sinks"), inputs, strict=True))
    window = "and", ("causal",), ("sliding_window", 5, 3)
    call["allowed"] = oracle.allowed(("and", window, ("documents", ids)), 2, 4, 21, 21)
    grads = oracle.attention_grads(**call, d_out=d_out, d_lse=d_lse)
    with jax.enable_x64(True):
        run = jax.jit(in_many_ways_at_once, static_argnums=0, compiler_options=FAST_COMPILATION)
        got = run(backend, arrays, ids)
    want = (*oracle.attention(**call), *grads.values())
    for name, x, y in zip(("out", "lse", *grads), got, want, strict=True):
        assert x.dtype == np.float64, name
        assert oracle.relative_error(x, y) <= 1e-12, name


@pytest.mark.parametrize("backend", ["xla", "dense", "reference"])
def test_nothing_relies_on_rank_promotion(backend):
    """Some users make JAX raise where arrays of different rank are combined."""
    arrays, ids = many_inputs()
    arrays = [jax.ShapeDtypeStruct(x.shape, np.float32) for x in arrays]
    with jax.numpy_rank_promotion("raise"):
        out, *_ = jax.eval_shape(lambda *x: in_many_ways_at_once(backend, x, ids), *arrays)
    assert out.shape == arrays[0].shape


@pytest.mark.parametrize("backend", ["xla", "dense"])
def test_three_axes_mean_a_batch_of_one(backend):
    """[T, N, H] in, [T, N, Hv] and [T, N] out, as jax.nn allows."""
    x = jax.random.normal(jax.random.key(0), (40, 3, 8))
    out, lse = xsake.dot_product_attention(
        x, x, x, is_causal=True, implementation=backend, return_residual=True
    )
    assert (out.shape, lse.shape) == ((40, 3, 8), (40, 3))
    want = exact_jax_nn(x, x, x, is_causal=True)
    assert oracle.relative_error(out, want) <= 2e-6


def test_positional_arguments_keep_jax_nns_order():
    """query, key, value, bias, mask."""
    x = jax.random.normal(jax.random.key(0), (1, 20, 2, 8))
    bias = jax.random.normal(jax.random.key(1), (1, 2, 20, 20))
    mask = masks.causal()(0, 0, jnp.arange(20)[:, None], jnp.arange(20))[None, None]
    got = xsake.dot_product_attention(x, x, x, bias, mask)
    want = exact_jax_nn(x, x, x, bias, mask)
    assert oracle.relative_error(got, want) <= 2e-6
