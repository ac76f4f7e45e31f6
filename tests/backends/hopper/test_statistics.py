"""Statistics as by-products of the Hopper forward: interpreted, lowered, and on a GPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests import oracle
from tests.backends.hopper.test_hopper import FORWARD, mask_of, own_lists
from tests.conditions import needs_gpu, needs_interpreter, needs_newer_jax
from xsake import Options, _jax, masks
from xsake.backends import Call, hopper, kernel_rule
from xsake.backends.options import ForwardTiling

LIMIT = 1e-3
WHAT = ("blocks", "tokens")


def compared(found, want):
    """Asserts that mass and entropies are those of the oracle, which has them in reverse order."""
    names = ("mass", "entropy over blocks", "entropy over keys")
    for name, got, expected in zip(names, found, want[::-1], strict=False):
        assert np.abs(np.asarray(got, np.float64) - expected).max() <= LIMIT, name


@pytest.mark.parametrize(
    ("block", "length", "what", "tiling", "shared_bytes"),
    [
        ((128, 128), 200, "blocks", {"lazy_rescale": 8.0}, 0),
        ((128, 128), 200, "blocks", {"lazy_rescale": 8.0, "lazy_maximum": True}, None),
        ((64, 64), 136, "tokens", {"overlap": False}, None),
        ((64, 64), 136, "tokens", {}, 0),
    ],
    ids=str,
)
@needs_interpreter
@pytest.mark.second_python
def test_small_statistics_agree_when_interpreted(
    block, length, what, tiling, shared_bytes, capsys, monkeypatch
):
    """Full, partial and short blocks, two heads of one kv head, sinks, a soft cap, empty rows.

    Logarithms are in global memory (without space in shared memory) or in shared memory.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import forward_kernel

    monkeypatch.setattr(_jax, "multiprocessors", lambda: 1)
    if shared_bytes is not None:
        monkeypatch.setattr(forward_kernel, "SHARED_BYTES", shared_bytes)
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(3 * rng.standard_normal((1, length, heads, 64)), jnp.bfloat16)
        for heads in (2, 1, 1)
    )
    ids = np.where(np.arange(length) < length - 5, 0, -1)
    mask = mask_of(masks.documents(ids) & masks.causal(), length, block)
    sinks = np.array([0.5, -1.0], np.float32)
    _, _, *found = forward_kernel.forward(
        q,
        k,
        v,
        mask.lists,
        block=block,
        rule=kernel_rule.by_query(mask),
        scale=0.125,
        soft_cap=5.0,
        tiling=ForwardTiling(**tiling),
        statistics=what,
        sinks=jnp.asarray(sinks),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    assert "RACE" not in capsys.readouterr().out  # the interpreter prints them
    spec = ("and", ("documents", ids, ids), ("causal",))
    allowed = oracle.allowed(spec, 1, 2, length, length)
    given = {"allowed": allowed, "block": block, "scale": 0.125, "soft_cap": 5.0}
    exact = [np.asarray(x, np.float64) for x in (q, k)]
    entropies = oracle.statistics(*exact, **given)[:2]
    mass = oracle.statistics(*exact, **given, sinks=sinks)[2]
    compared(found, (*entropies, mass))
    assert len(found) == (2 if what == "blocks" else 3)
    assert not np.asarray(found[1])[..., length - 5 :].any()


@pytest.mark.parametrize("length", [1, 200, 385])
@pytest.mark.parametrize(("rows", "block"), [(192, 128), (192, 64), (128, 128), (64, 64)])
@needs_newer_jax
def test_masses_of_64_rows_become_those_of_row_blocks(length, rows, block):
    """Row blocks of the mask, whatever the rows of a work tile; the last ones are short."""
    from xsake.backends.hopper.statistics_tile import mean_mass

    by_row = np.random.default_rng(length).random((2, 3, length, 5))
    tiles = -(-length // rows)
    padded = np.pad(by_row, ((0, 0), (0, 0), (0, tiles * rows - length), (0, 128 - 5)))
    sums = padded.reshape(2, 3, tiles, rows // 64, 64, 128).sum(4)
    found = mean_mass(jnp.asarray(sums, jnp.float32), length, block, 5)
    begins = np.arange(0, length, block)
    sizes = np.diff(np.append(begins, length))[:, None]
    want = np.add.reduceat(by_row, begins, axis=2) / sizes
    np.testing.assert_allclose(found, want, rtol=1e-5)


def shape_of(length=256, head_size=64):
    """q, k or v of two heads."""
    return jax.ShapeDtypeStruct((1, length, 2, head_size), jnp.bfloat16)


def call_of(q, bias=None):
    """A causal call whose keys and values are its queries."""
    mask = mask_of(masks.causal(), q.shape[1])
    return Call(q, q, q, bias, mask, 0.1, None, Options(hopper_forward=ForwardTiling()))


@needs_newer_jax
def test_without_statistics_nothing_of_them_is_traced(monkeypatch):
    """The program is the one without the option: no line of statistics_tile.py runs."""
    from xsake.backends.hopper import forward_kernel

    def refuse(*args, **named):
        raise AssertionError("statistics were not asked for")

    class Never:
        """In place of `Sums`: nothing is an instance of it, and it cannot be made."""

        __init__ = refuse

    monkeypatch.setattr(forward_kernel, "Sums", Never)
    monkeypatch.setattr(forward_kernel, "StatisticsTile", refuse)
    monkeypatch.setattr(forward_kernel, "mean_mass", refuse)
    jax.clear_caches()  # so that the kernel is traced again
    q = shape_of()
    traced = jax.make_jaxpr(lambda q: hopper.forward(call_of(q)))(q)
    assert [x.shape for x in traced.out_avals] == [(1, 256, 2, 64), (1, 256, 2)]
    with pytest.raises(AssertionError, match="not asked for"):
        jax.make_jaxpr(lambda q: hopper.observed(call_of(q), None, "blocks"))(q)


@needs_newer_jax
@pytest.mark.second_python
def test_statistics_lower_for_cuda():
    """Layout inference and verification, with sinks."""

    def observe(q, sinks):
        return hopper.observed(call_of(q), sinks, "tokens")

    shapes = shape_of(500), jax.ShapeDtypeStruct((2,), jnp.float32)
    text = jax.jit(observe).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == FORWARD


@pytest.mark.parametrize(
    ("head_size", "bias", "why"),
    [
        (256, None, "takes heads of up to 128; these are 256 and 256"),
        (64, (1, 2, 256, 1), "takes no bias of one value per query, which the kernels do not read"),
        (128, (1, 2, 1, 256), None),
    ],
)
def test_what_has_no_statistics_says_why(head_size, bias, why):
    """The door then takes plain JAX, unless the backend was named."""
    bias = None if bias is None else jnp.zeros(bias)
    q = jnp.zeros(shape_of(head_size=head_size).shape, jnp.bfloat16)
    assert hopper.why_not_observed(call_of(q, bias)) == why


def test_steps_of_half_blocks_have_no_statistics():
    call = call_of(jnp.zeros(shape_of(head_size=64).shape, jnp.bfloat16))
    half = dataclasses.replace(call, options=Options(hopper_forward=ForwardTiling(step=64)))
    why = "takes steps of whole blocks; hopper_forward has steps of 64"
    assert hopper.why_not_observed(half) == why


@pytest.mark.parametrize("in_shared", [True, False])
@pytest.mark.gpu
@needs_gpu
def test_tall_work_tiles_have_statistics_on_a_gpu(in_shared, monkeypatch):
    from xsake.backends.hopper import forward_kernel

    if not in_shared:
        monkeypatch.setattr(forward_kernel, "SHARED_BYTES", 0)
    jax.clear_caches()  # so that the kernel is traced again
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 3001, 2, 64)), jnp.bfloat16) for _ in range(3))
    mask = mask_of(masks.causal(), 3001)
    want = oracle.statistics(
        *(np.asarray(x, np.float64) for x in (q, k)),
        allowed=np.asarray(mask.to_dense(1, 2)),
        block=(128, 128),
    )
    for lazy in (False, True):
        tiling = ForwardTiling(lazy_rescale=8.0, rows=192, lazy_maximum=lazy)
        how = {"mask": mask, "options": Options(hopper_forward=tiling), "implementation": "hopper"}
        plain = xsake.dot_product_attention(q, k, v, **how)
        for _ in range(10):
            out, found = xsake.observed_attention(q, k, v, what="blocks", **how)
            compared([found.mass, found.block_entropy], want)
            assert oracle.relative_error(out, np.asarray(plain, np.float64)) <= 1e-6


@pytest.mark.parametrize("in_shared", [True, False])
@pytest.mark.parametrize(
    ("length", "heads", "size", "block", "tiling"),
    [
        (2048, (4, 4), 128, (128, 128), None),
        (2048, (4, 2), 64, (128, 128), None),
        (2000, (4, 2), 128, (64, 128), {"lazy_rescale": 8.0}),
        (1501, (2, 2), 64, (64, 64), {"schedule": "fixed"}),
        (1501, (2, 1), 128, (128, 64), {"overlap": False, "persistent": False}),
        (4096, (2, 2), 128, (64, 64), {"order": "natural", "alternate_products": True}),
    ],
    ids=str,
)
@pytest.mark.gpu
@needs_gpu
def test_statistics_of_long_calls_agree_on_a_gpu(
    length, heads, size, block, tiling, in_shared, monkeypatch
):
    """Ten times: logarithms that are read too early, or overwritten, do not show every time."""
    from xsake.backends.hopper import forward_kernel

    if not in_shared:
        monkeypatch.setattr(forward_kernel, "SHARED_BYTES", 0)
    jax.clear_caches()  # so that the kernel is traced again
    rng = np.random.default_rng(length)
    q, k, v = (
        jnp.asarray(scale * rng.standard_normal((1, length, n, size)), jnp.bfloat16)
        for n, scale in ((heads[0], 2), (heads[1], 1), (heads[1], 1))
    )
    mask = own_lists(heads[0], length, block, 0.3)
    sinks = jnp.asarray(rng.standard_normal(heads[0]), jnp.float32)
    options = None if tiling is None else Options(hopper_forward=ForwardTiling(**tiling))

    how = {"mask": mask, "sinks": sinks, "options": options, "implementation": "hopper"}

    @jax.jit
    def run(q, k, v):
        plain = xsake.dot_product_attention(q, k, v, **how)
        return [xsake.observed_attention(q, k, v, what=x, **how) for x in WHAT], plain

    want = oracle.statistics(
        *(np.asarray(x, np.float64) for x in (q, k)),
        allowed=np.asarray(mask.to_dense(1, heads[0])),
        block=block,
        sinks=np.asarray(sinks),
    )
    for _ in range(10):
        observed, plain = run(q, k, v)
        for out, found in observed:
            compared([x for x in found if x is not None], want)
            assert oracle.relative_error(out, np.asarray(plain, np.float64)) <= 1e-6
