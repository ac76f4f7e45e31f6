"""The Hopper kernels: refusals, and lowering for CUDA without a card."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import xsake
from tests.conditions import needs_newer_jax
from xsake import BlockMask, Options, _jax, block_scores, masks
from xsake.backends import Call, hopper
from xsake.backends.options import BackwardTiling, ForwardTiling
from xsake.hads import sampled_by_kernel
from xsake.masks import intervals

RULES = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.sliding_window(300, 10),
    "documents": masks.documents(jnp.arange(500) // 130) & masks.causal(),
    "positions": masks.at_positions(masks.causal(), jnp.arange(500)[::-1], jnp.arange(500)[::-1]),
    "lengths": masks.lengths(query=jnp.array([400]), key_value=jnp.array([300])),
    "prefix": masks.prefix(jnp.array([70])) | masks.causal(),
    "chunked": masks.chunked(200) & masks.causal(),
    "two intervals": masks.documents(jnp.arange(500) // 130) | masks.first(20),
    "not": ~masks.first(20),
    "function": masks.rule(lambda b, n, q, k: (q - k) * 3 < 100 * (n + 1)),
}


def mask_of(rule, length=500, block=(128, 128)):
    """A BlockMask of ragged length."""
    rule = masks.everything() if rule is None else rule
    return BlockMask.from_rule(rule, (length, length), block=block)


# Kernels of the forward and a work table; of the fused backward, transposed lists and a work table;
# of dq by rows and a work table.
FORWARD, FUSED, BY_ROWS = 2, 3, 2


def kernels_lowered(mask, head_size=64, value_size=None, deterministic=False, **backward):
    """How many kernels a call and its gradients lower to for CUDA, on a machine without a card."""
    length = mask.shape[0]
    q, k, v = (
        jax.ShapeDtypeStruct((1, length, heads, size), jnp.bfloat16)
        for heads, size in ((4, head_size), (2, head_size), (2, value_size or head_size))
    )

    def attend(q, k, v):
        options = Options(
            deterministic=deterministic,
            hopper_forward=ForwardTiling(),
            hopper_backward=BackwardTiling(**backward),
        )
        return hopper.forward(Call(q, k, v, None, mask, 0.1, None, options))

    def gradients(q, k, v):
        (out, lse), pull_back = jax.vjp(attend, q, k, v)
        return pull_back((out, lse))

    text = jax.jit(gradients).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("@mosaic_gpu")


def backward_kernels_lowered(*arguments, **more):
    """`kernels_lowered` of the gradients alone: the forward is lowered in other tests."""

    def zeros(settings, q, k, v, mask, bias=None, sinks=None):
        B, T, N, _ = q.shape
        return jnp.zeros((B, T, N, v.shape[3]), q.dtype), jnp.zeros((B, N, T), jnp.float32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "run_forward", zeros)
        return kernels_lowered(*arguments, **more)


@needs_newer_jax
def test_results_and_gradients_vary_as_the_arguments_do():
    """Inside jax.shard_map: a result that claims to be the same everywhere has wrong gradients."""
    heads = jax.sharding.PartitionSpec(None, None, "heads")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("heads",))
    mask = BlockMask.from_rule(masks.causal(), (256, 256))
    q, k = (jax.ShapeDtypeStruct((1, 256, n, 64), jnp.bfloat16) for n in (4, 2))
    seen = []

    def gradients(q, k, v):
        call = functools.partial(Call, bias=None, mask=mask, scale=0.1, soft_cap=None)
        results, pull_back = jax.vjp(
            lambda *x: hopper.forward(call(*x, options=Options())), q, k, v
        )
        found = pull_back(results)
        seen.extend(map(_jax.varying_axes, (*results, *found)))
        return found

    run = jax.shard_map(gradients, mesh=mesh, in_specs=(heads,) * 3, out_specs=(heads,) * 3)
    jax.jit(run).trace(q, k, k)
    assert seen == [("heads",)] * 5


def slow(*values):
    """Lowering a call and its gradients takes 3 to 9 s: one case of each kind in `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "names",
    [
        ["none"],
        *(slow([x]) for x in ("causal", "function", "documents", "two intervals")),
        list(RULES),
    ],
    ids=len,
)
@needs_newer_jax
def test_every_rule_lowers_for_cuda(names):
    """Layout inference and verification of the forward and the fused backward; all rules as one."""
    rules = [RULES[name] for name in names if RULES[name] is not None]
    rule = functools.reduce(lambda a, b: a & b, rules) if rules else None
    assert kernels_lowered(mask_of(rule), 128) == FORWARD + FUSED


@pytest.mark.parametrize(
    ("block", "sizes"),
    [
        slow((128, 128), (40, 40)),
        slow((128, 128), (64, 128)),
        slow((128, 128), (128, 64)),
        slow((128, 128), (192, 256)),
        slow((64, 128), (64, 64)),
        ((64, 128), (128, 128)),
        slow((128, 64), (64, 128)),
        ((128, 64), (256, 256)),
        slow((64, 64), (128, 128)),
        slow((64, 64), (256, 64)),
    ],
    ids=str,
)
@needs_newer_jax
def test_every_head_and_block_size_lowers_for_cuda(sizes, block):
    """Forward and one fused kernel; with a head of 256, kernels for each of dk, dv and dq."""
    kernels = kernels_lowered(mask_of(masks.causal(), block=block), *sizes)
    again = 0 if max(sizes) <= 128 else 1 + BY_ROWS  # ColumnsKernel a second time, dq
    assert kernels == FORWARD + FUSED + again


@pytest.mark.parametrize("block", [(64, 128), slow((128, 128)), slow((128, 64))], ids=str)
@needs_newer_jax
def test_deterministic_gradients_come_from_two_kernels(block):
    """dk and dv from one, dq from the other: nothing is added in an order that may change."""
    mask = mask_of(masks.causal(), block=block)
    assert backward_kernels_lowered(mask, 128, deterministic=True) == FUSED + BY_ROWS


@pytest.mark.parametrize(
    ("is_deterministic", "kernels"),
    [(False, FUSED), slow(True, FUSED + BY_ROWS)],
)
@needs_newer_jax
def test_lengths_that_are_multiples_of_8_have_a_kernel_for_delta(is_deterministic, kernels):
    """Before both forms of the backward; the lengths of the tests above have no such kernel."""
    eights = mask_of(masks.causal(), 504)
    found = backward_kernels_lowered(eights, 128, deterministic=is_deterministic)
    assert found == kernels + 1


@pytest.mark.parametrize(
    ("block", "size", "tiling"),
    [
        ((128, 128), 128, {}),
        slow((128, 128), 64, {"schedule": "fixed"}),
        slow((64, 128), 128, {"persistent": False}),
        slow((128, 64), 128, {}),
        slow((64, 64), 64, {}),
    ],
    ids=str,
)
@needs_newer_jax
def test_the_cast_of_dq_inside_the_kernel_lowers_for_cuda(block, size, tiling):
    """Shared memory and layouts fit a fourth warpgroup, and dq is a result of the kernel."""
    mask = mask_of(masks.causal(), 504, block)
    assert backward_kernels_lowered(mask, size, cast="kernel", **tiling) == FUSED + 1  # delta


@pytest.mark.parametrize("rule", ["causal", "window", "documents", "lengths"])
@needs_newer_jax
def test_a_row_block_counts_as_many_visits_as_the_transposed_lists_have(rule):
    """Otherwise it would be cast before it is complete, or never."""
    from xsake.backends.hopper import prepare as hopper_prepare
    from xsake.backends.hopper.shape import Shape

    mask = mask_of(RULES[rule], 500, (64, 128))
    columns = mask.transpose().lists
    visits = np.zeros(8, int)
    for start, count in zip(columns.kv_start[0, 0], columns.kv_count[0, 0], strict=True):
        np.add.at(visits, np.asarray(columns.kv_index[0, 0])[start : start + count], 1)
    x, lse = jnp.ones((2, 500, 3, 64), jnp.bfloat16), jnp.ones((2, 3, 500))
    prepared = hopper_prepare.prepare(
        x,
        lse,
        x,
        None,
        mask.lists,
        Shape.of(x, x, x, mask.lists, mask.block),
        BackwardTiling(),
        zeros=64,
        counts=True,
        interpret=True,
    )
    assert visits.any()
    counters = np.asarray(prepared.counters).reshape(2, 3, 8)
    np.testing.assert_array_equal(counters, np.broadcast_to(-visits, (2, 3, 8)))


def own_lists(heads, length, block=(128, 128), share=0.4):
    """A mask with one list per head; every third column of blocks is empty."""
    rng = np.random.default_rng(length)
    blocks = rng.random((1, heads, -(-length // block[0]), -(-length // block[1]))) < share
    blocks[..., ::3] = False
    return BlockMask.from_dense(blocks, masks.causal(), shape=(length, length), block=block)


@pytest.mark.parametrize(
    ("cast", "size"), [("pass", 64), slow("pass", 128), slow("kernel", 64), slow("kernel", 128)]
)
@needs_newer_jax
def test_heads_with_their_own_lists_have_one_launch_before_the_products(size, cast):
    """Transposed lists, their work table and delta, where every head is sorted by itself."""
    mask = own_lists(4, 1032)
    for order in ("natural", "heads"):
        assert backward_kernels_lowered(mask, size, cast=cast, order=order) == 2
    assert backward_kernels_lowered(mask, size, cast=cast) == FUSED + 1  # delta


def kernel_calls(function, *arguments):
    """The operands' shapes of every kernel that a function runs, in order."""

    def within(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "mpmd_map":
                yield [x.aval.shape for x in equation.invars]
            for inner in core.jaxprs_in_params(equation.params):
                yield from within(inner)

    return list(within(jax.make_jaxpr(function)(*arguments).jaxpr))


def gradients_of(mask, **options):
    """The backward of arrays with heads of 64: a function of q, k, v and d_out."""
    settings = hopper.Settings(0.1, None, Options(**options))

    def gradients(q, k, v, d_out):
        lse = jnp.zeros((*q.shape[:1], q.shape[2], q.shape[1]), jnp.float32)
        return hopper.run_backward(settings, (q, k, v, mask, d_out, lse, None), (d_out, None))

    return gradients


@pytest.mark.parametrize("rule", ["documents", *map(slow, ["causal", "two intervals", "chunks"])])
@needs_newer_jax
def test_heads_that_share_lists_have_one_launch_before_the_products(rule, monkeypatch):
    """Intervals of documents are transposed in it; those of rules without arrays are constants."""
    monkeypatch.setattr(intervals, "are_read", lambda: True)
    ids = np.arange(504) // 130
    rules = {
        "causal": masks.causal(),
        "documents": masks.documents(ids) & masks.causal(),
        "two intervals": masks.documents(ids) | masks.first(20),
        "chunks": masks.chunked(200) & masks.causal(),
    }
    mask = mask_of(rules[rule], 504)
    x = jax.ShapeDtypeStruct((1, 504, 2, 64), jnp.bfloat16)
    found = kernel_calls(
        gradients_of(mask, hopper_backward=BackwardTiling(order="heads")), x, x, x, x
    )
    assert len(found) == 2
    runs = {"documents": 1, "two intervals": 2, "chunks": 0, "causal": 0}[rule]
    flat = [shape[0] for shape in found[0] if len(shape) == 1]
    assert [size for size in flat if size >= 504] == [2 * 504 * runs] * (runs > 0)


@pytest.mark.parametrize("deterministic", [False, slow(True)])
@needs_newer_jax
def test_mapped_calls_do_not_share_a_work_table(deterministic):
    """Kernels count in it; calls of one mask that share it would leave work tiles out."""
    mask = mask_of(masks.causal(), 500)
    options = {"deterministic": deterministic, "hopper_forward": ForwardTiling()}

    def attend(q, k, v, d_out):
        settings = hopper.Settings(0.1, None, Options(**options))
        out = hopper.run_forward(settings, q, k, v, mask)
        return out, gradients_of(mask, **options)(q, k, v, d_out)

    x = jax.ShapeDtypeStruct((2, 3, 1, 500, 2, 64), jnp.bfloat16)
    calls = kernel_calls(jax.vmap(jax.vmap(attend)), x, x, x, x)
    tables = [shape for call in calls for shape in call if shape[-2:] == (9, 8)]
    assert tables == [(2, 3, 9, 8)] * (3 if deterministic else 2)


def attend(q, k, v, indices, counts):
    out = xsake.dot_product_attention(q, k, v, is_causal=True, implementation="hopper")
    return out.astype(jnp.float32).sum()


def attend_selected(q, k, v, indices, counts):
    out = xsake.apply_native_sparse_attention(q, k, v, indices, implementation="hopper")
    return out.astype(jnp.float32).sum()


def select(q, k, v, indices, counts):
    return block_scores.select("outlier_queries", q, k, counts, 128).lists[:4]


def certify(q, k, v, indices, counts):
    mask, T = mask_of(masks.causal(), q.shape[1]), q.shape[1]
    sparse, sample = (q, jnp.zeros(q.shape[:3])), jnp.arange(0, T, 64, dtype=jnp.int32)[None]
    found = sampled_by_kernel.figures((q, k, v, None), sparse, sample, mask.rule, None, 64)
    return sampled_by_kernel.estimates_and_densities(found, T, 64, 256, mask)


@pytest.mark.parametrize(
    ("function", "kernels"),
    [
        (jax.value_and_grad(attend, (0, 1, 2)), FORWARD + 2),
        slow(jax.value_and_grad(attend_selected, (0, 1, 2)), 4),
        (select, 3),
        slow(certify, 4),
    ],
    ids=["gradients", "selected", "lists", "certificate"],
)
@needs_newer_jax
def test_with_64_bit_types_kernels_and_results_are_the_same(function, kernels, monkeypatch):
    monkeypatch.setattr(_jax, "why_no_hopper", lambda needs: None)
    T = 512
    shapes = [jax.ShapeDtypeStruct((1, T, n, 64), jnp.bfloat16) for n in (4, 2, 2)]
    shapes += [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((1, T, 2, 3), (4, 4))]

    def lowered():
        traced = jax.jit(function).trace(*shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        dtypes = [x.dtype for x in jax.tree.leaves(traced.out_info)]
        return re.findall(r'module = "((?:[^"\\]|\\.)*)"', text), dtypes

    results = []
    for is_wide in (False, True):
        with jax.enable_x64(is_wide):
            results.append(lowered())
    assert len(results[0][0]) == kernels
    assert results[0] == results[1]


@needs_newer_jax
def test_a_cast_by_another_name_is_refused():
    """Also where nothing checks the types of options, as the tests do."""
    from xsake.backends.hopper import backward_kernel

    tiling = BackwardTiling()
    object.__setattr__(tiling, "cast", "later")
    x, lse = jnp.ones((1, 504, 1, 64), jnp.bfloat16), jnp.ones((1, 1, 504))
    with pytest.raises(ValueError, match=r"cast is 'later', which is none of \('pass', 'kernel'\)"):
        backward_kernel.backward(x, x, x, x, lse, x, None, mask_of(None, 504).lists, tiling=tiling)


def test_without_a_gpu_the_reason_names_it():
    """A named backend raises with its reason, and `explain` has it too."""
    if _jax.platform() == "gpu":
        pytest.skip("there is a GPU here")
    q = jnp.zeros((1, 128, 1, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"hopper.*needs a Hopper GPU.*this is a cpu"):
        xsake.dot_product_attention(q, q, q, implementation="hopper")
    assert "Hopper" in xsake.explain(q, q, q).reasons["hopper"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "bfloat16 and float16; this is float32"),
        ({"head": 320}, "heads of up to 256; these are 320"),
        ({"block": 32}, "blocks of 64 and 128; these are 32 × 32"),
        ({"rule": masks.random(0.5)}, "random"),
        ({"rule": masks.rule(lambda b, n, q, k: jnp.sin(q - k) > 0)}, "sin"),
        ({"capability": (10, 0)}, "compute capability 9.0"),
        ({"version": (0, 10, 2)}, "JAX 0.11"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else str(x),
)
def test_every_refusal_has_its_reason(change, reason, monkeypatch):
    """On a machine that claims to be an H200, one property of the call at a time is unsupported."""
    monkeypatch.setattr(_jax, "platform", lambda: "gpu")
    monkeypatch.setattr(_jax, "compute_capability", lambda: change.get("capability", (9, 0)))
    monkeypatch.setattr(_jax, "version", lambda: change.get("version", (0, 11, 2)))
    q = jnp.zeros((1, 256, 1, change.get("head", 64)), change.get("dtype", "bfloat16"))
    rule = change.get("rule", masks.causal())
    mask = BlockMask.from_rule(rule, (256, 256), block=change.get("block", 128))
    said = hopper.why_not(Call(q, q, q, None, mask, 1.0, None, Options()))
    assert said is not None
    assert reason in said


def test_supported_calls_are_not_refused(monkeypatch):
    """Every rule of this file runs on a machine that claims to be an H200."""
    monkeypatch.setattr(_jax, "platform", lambda: "gpu")
    monkeypatch.setattr(_jax, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(_jax, "version", lambda: (0, 11, 2))
    q = jnp.zeros((1, 500, 1, 64), jnp.bfloat16)
    array = masks.array(np.ones((500, 500), bool))
    rules = RULES | {"array": array, "array or causal": array | masks.causal()}
    for name, rule in rules.items():
        bias = jnp.zeros((1, 1, 500, 500))
        said = hopper.why_not(Call(q, q, q, bias, mask_of(rule), 1.0, None, Options()))
        assert said is None, f"{name}: {said}"
