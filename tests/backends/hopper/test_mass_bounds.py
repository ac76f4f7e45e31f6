"""The kernel of the bound on dropped masses, against plain JAX: interpreted, lowered, on a card."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conditions import needs_gpu, needs_interpreter, needs_newer_jax
from xsake import _jax
from xsake.hads import mass_bounds
from xsake.hads.chunks import Softmax

pytestmark = needs_newer_jax

NOT_NUMBERS = (np.inf, -np.inf, np.nan)


def problem(B, T, S, N, K, H, block, dropped=0.5, dtype="bfloat16"):
    """(q, k, noise, dropped); of the first row block no block is dropped, of the second one all."""
    rng = np.random.default_rng(T + H)
    q, k = (
        jnp.asarray(scale * rng.standard_normal(shape), dtype)
        for scale, shape in ((0.1, (B, T, N, H)), (1, (B, S, K, H)))
    )
    noise = jnp.asarray(2 * rng.standard_normal((B, T, N)), jnp.float32)
    drops = rng.random((B, N, -(-T // block[0]), -(-S // block[1]))) < dropped
    drops[:, :, 0], drops[:, :, 1:2] = False, True
    return q, k, noise, jnp.asarray(drops)


def by_both(monkeypatch, given, block, softmax, interpret=False, run=mass_bounds.bounds):
    """(the bounds by the kernel, by plain JAX) at bounds of all sizes.

    The kept logsumexp is that of the dropped blocks and the noise.
    """
    from xsake.backends.hopper import mass_bounds as kernel

    q, k, noise, drops = given
    how = {"block": block, "softmax": softmax}
    mass_bounds._by_kernel.cache_clear()
    monkeypatch.setattr(mass_bounds, "why_no_kernel", lambda *_: "asked for plain JAX")
    finite = (jnp.where(jnp.isfinite(x), x, 0) for x in (q, k))
    share = mass_bounds.bounds(*finite, jnp.full_like(noise, 10), drops, **how)
    total = 10 + jnp.where(share > 0, jnp.log(share) - jnp.log1p(-share), 0)
    kept = jnp.moveaxis(total, 1, 2) + noise
    run = functools.partial(run, **how)
    want = run(q, k, kept, drops)
    monkeypatch.setattr(mass_bounds, "why_no_kernel", lambda *_: None)
    interpreted = functools.partial(kernel.mass_bounds, interpret=interpret)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "mass_bounds", interpreted)
        found = run(q, k, kept, drops)
    mass_bounds._by_kernel.cache_clear()
    return np.asarray(found), np.asarray(want)


def compared(found, want):
    """Asserts that bounds are those of plain JAX, and that many are not near 0 or 1."""
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    np.testing.assert_allclose(found, want, rtol=1e-3)
    np.testing.assert_allclose(1 - found, 1 - want, rtol=1e-3, atol=1e-6)
    of_dropped = want[want > 0]
    assert ((of_dropped > 0.01) & (of_dropped < 0.99)).mean() > 0.2


@pytest.mark.parametrize(
    ("shape", "block", "soft_cap"),
    [
        ((1, 200, 200, 4, 2, 64), (64, 64), None),
        ((2, 136, 1200, 2, 2, 64), (128, 16), 3.0),
        ((1, 150, 200, 2, 2, 128), (64, 64), None),
    ],
    ids=str,
)
@needs_interpreter
def test_the_kernel_has_the_bounds_of_plain_jax_when_interpreted(
    shape, block, soft_cap, monkeypatch, capsys
):
    """Short row blocks, a short last block, more blocks than one product has; inf and NaN."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    q, k, noise, drops = problem(*shape, block)
    for at, value in enumerate(NOT_NUMBERS):
        q = q.at[0, block[0] + at, 0, 0].set(value)
        noise = noise.at[0, block[0] + 4 + at, 0].set(value)
    k = k.at[0, 3, -1, 0].set(np.inf)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    given = (q, k, noise, drops)
    found, want = by_both(monkeypatch, given, block, Softmax(soft_cap), interpret)
    assert "RACE" not in capsys.readouterr().out
    compared(found, want)
    assert np.isnan(want).any()
    assert (want == 1).any()
    assert not want[:, :, : block[0]].any()


@needs_interpreter
def test_a_mapped_axis_is_folded_into_the_batch(monkeypatch):
    """Of queries and dropped blocks, but not of keys and the kept logsumexp."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def run(q, k, kept, drops, block, softmax):
        def one(q, drops):
            return mass_bounds.bounds(q, k, kept, drops, block, softmax)

        return jax.vmap(one)(jnp.stack([q, q[:, ::-1]]), jnp.stack([drops, ~drops]))

    given = problem(1, 130, 200, 2, 1, 64, (64, 64))
    interpret = plgpu.InterpretGPUParams()
    found, want = by_both(monkeypatch, given, (64, 64), Softmax(), interpret, run)
    compared(found, want)
    assert found.shape == (2, 1, 2, 130)


def test_the_bounds_lower_for_cuda(monkeypatch):
    monkeypatch.setattr(_jax, "why_no_hopper", lambda *_: None)
    for H, block in ((64, (64, 64)), (256, (128, 128))):
        given = problem(1, 300, 300, 2, 1, H, block)
        run = functools.partial(mass_bounds.bounds, block=block, softmax=Softmax(2.0))
        text = jax.jit(jax.vmap(run)).trace(*(x[None] for x in given))
        text = text.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "float32"}, "supports bfloat16 and float16; these are float32 and float32"),
        ({"H": 80}, "supports heads of 64, 128, 256; these are 80"),
        ({"block": (32, 64)}, "supports row blocks of a multiple of 64 tokens; these are of 32"),
        ({"soft_cap": 1e6}, "supports soft caps of up to 1000; this is 1000000.0"),
        ({"soft_cap": 50.0}, None),
        ({}, None),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_compute_says_why(change, why, monkeypatch):
    monkeypatch.setattr(_jax, "why_no_hopper", lambda *_: None)
    sizes = dict(B=1, T=128, S=128, N=2, K=1, H=64, block=(64, 64)) | change
    softmax = Softmax(sizes.pop("soft_cap", None))
    q, k, *_ = problem(**sizes)
    assert mass_bounds.why_no_kernel(q, k, sizes["block"], softmax) == why


@pytest.mark.parametrize(
    ("shape", "block", "soft_cap", "dtype"),
    [
        ((4, 2048, 2048, 9, 3, 64), (128, 128), None, "bfloat16"),
        ((1, 3001, 3001, 4, 4, 128), (64, 64), 20.0, "bfloat16"),
        ((1, 700, 5000, 2, 1, 256), (128, 64), None, "float16"),
        ((2, 1000, 9000, 2, 1, 64), (64, 16), 5.0, "float16"),
    ],
    ids=str,
)
@pytest.mark.gpu
@needs_gpu
def test_the_kernel_has_the_bounds_of_plain_jax_on_a_gpu(
    shape, block, soft_cap, dtype, monkeypatch
):
    q, k, noise, drops = problem(*shape, block, dtype=dtype)
    for at, value in enumerate(NOT_NUMBERS):
        q = q.at[0, 270 + at, 0, 0].set(value)
        noise = noise.at[0, 280 + at, 0].set(value)
    k = k.at[0, 3, 0, 0].set(np.inf)
    for _ in range(5):  # a missing barrier does not show every time
        compared(*by_both(monkeypatch, (q, k, noise, drops), block, Softmax(soft_cap)))
