"""The kernel of block sensitivity: interpreted, lowered, refused, and on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conditions import needs_gpu, needs_interpreter, needs_newer_jax
from xsake import _jax
from xsake.evaluate.methods import SOURCES, Activations, Method, sources_of
from xsake.hads import sensitivity_by_kernel, statistics
from xsake.hads.chunks import Softmax

TOLERANCE = 0.02  # of the largest; p and the values have 8 bits


def layer(T, N, K, H, Hv, dtype="bfloat16", batch=()):
    """q, k, v and the output projection of a layer."""
    rng = np.random.default_rng(T)
    shapes = (T, N, H), (T, K, H), (T, K, Hv), (N, Hv, 96)
    q, k, v, kernel = (rng.standard_normal((*batch, *shape)) for shape in shapes)
    return *(jnp.asarray(x, dtype) for x in (1.5 * q, k, v)), jnp.asarray(kernel, jnp.float32)


def exact(q, k, v, kernel, block, sinks):
    """Mean over row block i of ‖(u_j - m_j out) W‖², in float64."""
    q, k, v, kernel = (np.asarray(x, np.float64) for x in (q, k, v, kernel))
    T, N, H = q.shape
    k, v = (np.repeat(x, N // k.shape[1], axis=1) for x in (k, v))
    logits = np.where(np.tri(T, dtype=bool), np.einsum("tnh,snh->nts", q, k) / np.sqrt(H), -np.inf)
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    total = weight.sum(-1, keepdims=True)
    if sinks is not None:
        sinks = np.asarray(sinks, np.float64)[:, None, None]
        total = total + np.exp(sinks - logits.max(-1, keepdims=True))
    p = weight / total
    starts = np.arange(0, T, block)
    out = np.einsum("nts,snh->nth", p, v)
    found = np.zeros((N, len(starts), len(starts)))
    for j, start in enumerate(starts):
        own = slice(start, start + block)
        u = np.einsum("nts,snh->nth", p[..., own], v[own])
        change = u - p[..., own].sum(-1, keepdims=True) * out
        size = (np.einsum("nth,nhw->ntw", change, kernel) ** 2).sum(-1)
        found[:, :, j] = np.stack([size[:, i : i + block].mean(1) for i in starts], 1)
    return found


def check(got, q, k, v, kernel, block, sinks=None):
    want = exact(q, k, v, kernel, block, sinks)
    assert np.abs(got - want).max() < TOLERANCE * want.max()
    seen = np.tri(want.shape[-1], dtype=bool)
    np.testing.assert_allclose(got[:, seen].mean(), want[:, seen].mean(), rtol=2**-8)
    assert (got[:, ~seen] == 0).all()


@pytest.fixture
def interpreted(monkeypatch):
    """`block_sensitivity` takes the kernel, on Mosaic's interpreter."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    measuring = functools.partial(
        sensitivity_by_kernel._measuring, interpret=plgpu.InterpretGPUParams(detect_races=True)
    )
    monkeypatch.setattr(sensitivity_by_kernel, "why_not", lambda *_: None)
    monkeypatch.setattr(sensitivity_by_kernel, "_measuring", measuring)
    statistics.block_sensitivity.clear_cache()
    yield
    statistics.block_sensitivity.clear_cache()


@pytest.mark.parametrize(
    ("T", "N", "K", "H", "Hv", "block", "dtype", "has_sinks"),
    [
        (200, 2, 1, 64, 64, 64, "bfloat16", False),
        (300, 2, 2, 64, 128, 128, "bfloat16", True),
        (333, 1, 1, 128, 64, 64, "float16", False),
        (130, 1, 1, 64, 64, 64, "bfloat16", False),
    ],
)
@needs_interpreter
def test_the_kernel_measures_the_change_by_every_block(
    T, N, K, H, Hv, block, dtype, has_sinks, interpreted, capsys
):
    """Grouped heads, short last blocks and CTAs, more blocks than slots, sinks."""
    q, k, v, kernel = layer(T, N, K, H, Hv, dtype)
    sinks = jnp.linspace(0.5, 2, N) if has_sinks else None
    got = statistics.block_sensitivity(q, k, v, kernel, block, Softmax(sinks=sinks))
    assert "RACE" not in capsys.readouterr().out
    check(np.asarray(got), q, k, v, kernel, block, sinks)


@pytest.mark.parametrize(
    ("dtype", "offset", "size", "has_sinks"),
    [
        ("bfloat16", 10, 1, False),
        ("bfloat16", 10, 1, True),
        ("float16", 0, 2e4, False),
        ("float16", 3, 1e-7, True),
    ],
)
@needs_interpreter
def test_what_all_values_have_in_common_and_their_size_cost_no_digits(
    dtype, offset, size, has_sinks, interpreted
):
    q, k, v, kernel = layer(140, 2, 1, 64, 64, dtype)
    q, v, kernel = q / 5, v + jnp.asarray(offset, dtype), kernel * size
    sinks = jnp.linspace(0.5, 2, 2) if has_sinks else None
    got = statistics.block_sensitivity(q, k, v, kernel, 64, Softmax(sinks=sinks))
    check(np.asarray(got), q, k, v, kernel, 64, sinks)


@needs_interpreter
def test_a_mapped_axis_is_folded_into_the_batch(interpreted):
    q, k, v, kernel = layer(130, 2, 1, 64, 64, batch=(2,))
    sinks = jnp.linspace(-1, 2, 4).reshape(2, 2)

    def measured(q, k, v, kernel, sinks):
        return statistics.block_sensitivity(q, k, v, kernel, 64, Softmax(sinks=sinks))

    got = jax.vmap(measured)(q, k, v, kernel, sinks)
    for i in range(2):
        want = measured(q[i], k[i], v[i], kernel[i], sinks[i])
        np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(("H", "Hv", "block"), [(64, 64, 64), (128, 128, 128), (64, 128, 64)])
@needs_newer_jax
def test_it_lowers_for_cuda(H, Hv, block, x64):
    def shape(*dims):
        return jax.ShapeDtypeStruct((2, 1000, *dims), jnp.bfloat16)

    with jax.enable_x64(x64):
        step = sensitivity_by_kernel._measuring(block)
        traced = jax.jit(step).trace(shape(4, H), shape(2, H), shape(4, Hv))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "xsake_sensitivity" in text


@needs_newer_jax
def test_an_oracle_in_a_scan_over_layers_lowers_for_cuda(monkeypatch):
    """As in the pass of a model, where the source of the scores is chosen at run time."""
    monkeypatch.setattr(sensitivity_by_kernel, "why_not", lambda *_: None)
    statistics.block_sensitivity.clear_cache()
    counts = np.minimum(np.arange(4) + 1, 2)[None, None].repeat(3, 0).repeat(2, 1)
    given = np.zeros((3, 2, 4, 4), bool)
    method = Method(counts, given, jnp.int32(SOURCES.index("sensitivity")))
    sources = sources_of([method])

    def blocks(method, q, k, v, kernel):
        def layer(number, x):
            return number + 1, method.blocks(number, Activations(*x), 64, sources)

        return jax.lax.scan(layer, 0, (q, k, v, kernel))[1]

    q, k = (jax.ShapeDtypeStruct((3, 250, heads, 64), jnp.bfloat16) for heads in (2, 1))
    kernel = jax.ShapeDtypeStruct((3, 2, 64, 96), jnp.float32)
    traced = jax.jit(blocks).trace(method, q, k, k, kernel)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    statistics.block_sensitivity.clear_cache()
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"softmax": Softmax(soft_cap=5.0)}, "supports neither a soft cap nor a window"),
        ({"dtype": "float32"}, "supports bfloat16 and float16; this is float32"),
        ({"H": 256}, "supports heads of 64 and 128; these are (256, 64)"),
        ({"block": 32}, "supports blocks of 64 and 128; these are 32"),
    ],
    ids=str,
)
def test_a_call_that_it_cannot_take_has_a_reason(change, reason, monkeypatch):
    monkeypatch.setattr(_jax, "why_no_hopper", lambda _: None)
    how = {"softmax": Softmax(), "dtype": "bfloat16", "H": 64, "block": 64} | change
    q, k, v, _ = layer(70, 1, 1, how["H"], 64, how["dtype"])
    found = sensitivity_by_kernel.why_not(q, k, v, how["block"], how["softmax"])
    assert found is not None
    assert found.startswith(reason)


def test_without_a_hopper_gpu_it_says_so():
    q, k, v, _ = layer(70, 1, 1, 64, 64)
    if (why := _jax.why_no_hopper((0, 11))) is not None:
        assert sensitivity_by_kernel.why_not(q, k, v, 64, Softmax()) == why


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("T", "N", "K", "H", "Hv", "block", "dtype", "has_sinks"),
    [
        (1000, 6, 2, 64, 64, 64, "bfloat16", False),
        (2048, 4, 4, 128, 128, 128, "bfloat16", True),
        (1111, 2, 1, 128, 64, 64, "float16", False),
        (777, 2, 2, 64, 128, 128, "bfloat16", False),
    ],
)
def test_on_a_card(T, N, K, H, Hv, block, dtype, has_sinks):
    q, k, v, kernel = layer(T, N, K, H, Hv, dtype)
    sinks = jnp.linspace(0.5, 2, N) if has_sinks else None
    assert sensitivity_by_kernel.why_not(q, k, v, block, Softmax(sinks=sinks)) is None
    got = statistics.block_sensitivity(q, k, v, kernel, block, Softmax(sinks=sinks))
    check(np.asarray(got), q, k, v, kernel, block, sinks)
