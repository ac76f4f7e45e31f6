"""The pass before the Hopper backward (delta, lse, zeros), without a GPU: interpreted, lowered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conditions import needs_interpreter, needs_newer_jax
from xsake import BlockMask, _jax, masks
from xsake.backends import Sizes
from xsake.backends.options import BackwardTiling


def random_inputs(batch, length, heads, size, dtype="bfloat16", with_d_lse=True):
    """out, d_out, lse and d_lse; the first head's row 5 is empty."""
    rng = np.random.default_rng(length)
    out, d_out = (
        jnp.asarray(rng.standard_normal((batch, length, heads, size)), dtype) for _ in range(2)
    )
    lse, d_lse = (
        jnp.asarray(rng.standard_normal((batch, heads, length)) * 9, jnp.float32) for _ in range(2)
    )
    return out, d_out, lse.at[:, 0, 5].set(-jnp.inf), d_lse if with_d_lse else None


def mask_of_all(length):
    return BlockMask.from_rule(masks.everything(), (length, length)).lists


def exact(out, d_out, lse, d_lse, rows):
    """lse in base 2 and delta in float64, +inf and 0 where a row is empty or past the end."""
    out, d_out, lse = (np.asarray(x, np.float64) for x in (out, d_out, lse))
    delta = np.einsum("btnh,btnh->bnt", out, d_out)
    if d_lse is not None:
        delta = delta - np.asarray(d_lse, np.float64)
    empty = lse == -np.inf
    past = ((0, 0), (0, 0), (0, rows - lse.shape[-1]))
    lse = np.where(empty, np.inf, lse / np.log(2))
    return np.pad(lse, past, constant_values=np.inf), np.pad(np.where(empty, 0, delta), past)


def check(found, want):
    """Float32 sums of at most 256 products of numbers near 1."""
    np.testing.assert_allclose(found[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], want[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "size", "rows", "zeros", "with_d_lse", "dtype"),
    [
        (1, 136, 3, 64, 192, 64, True, "bfloat16"),
        (2, 200, 1, 128, 256, None, False, "float16"),
        (1, 64, 2, 256, 128, 128, True, "bfloat16"),
    ],
)
@needs_interpreter
def test_one_pass_computes_lse_delta_and_zeros(
    batch, length, heads, size, rows, zeros, with_d_lse, dtype, capsys, monkeypatch
):
    """More units than CTAs, a last block that is partly or wholly past the end; no race."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import delta as hopper_delta

    monkeypatch.setattr(_jax, "multiprocessors", lambda: 1)
    given = random_inputs(batch, length, heads, size, dtype, with_d_lse)
    found = hopper_delta.statistics(
        *given,
        rows=rows,
        zeros=zeros,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    check(found, exact(*given, rows))
    assert "RACE" not in capsys.readouterr().out  # the interpreter prints them
    if zeros is None:
        assert len(found) == 2
    else:
        assert found[2].shape == (batch, length, heads, zeros)
        assert not np.asarray(found[2]).any()


@pytest.mark.parametrize("length", [136, 140])
@needs_interpreter
def test_every_length_has_the_same_statistics(length, monkeypatch):
    """Lengths that are no multiple of 8 use plain XLA, with zeros for the padded q."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import delta as hopper_delta
    from xsake.backends.hopper import prepare as hopper_prepare
    from xsake.backends.hopper.shape import Shape

    given = out, d_out, lse, d_lse = random_inputs(1, length, 2, 64)
    assert hopper_delta.fits(out) == (length == 136)
    monkeypatch.setattr(_jax, "multiprocessors", lambda: 1)
    shape = Shape(Sizes(1, length, length, 2, 2, 64, 64), (128, 128), 2)
    tiling = BackwardTiling()
    found = hopper_prepare.prepare(
        out, lse, d_out, d_lse, mask_of_all(length), shape, tiling,
        zeros=64, interpret=plgpu.InterpretGPUParams(),
    )  # fmt: skip
    check(found, exact(*given, 256))
    assert found.zeros.shape == (1, 136 if length == 136 else 144, 2, 64)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("zeros", [None, 128])
@needs_newer_jax
def test_every_head_size_lowers_for_cuda(size, zeros):
    """The tiles in flight fit in shared memory, and the zeros' copies have their layouts."""
    from xsake.backends.hopper import delta as hopper_delta

    tile = jax.ShapeDtypeStruct((2, 1032, 3, size), jnp.bfloat16)
    value = jax.ShapeDtypeStruct((2, 3, 1032), jnp.float32)

    def run(out, d_out, lse, d_lse):
        return hopper_delta.statistics(out, d_out, lse, d_lse, rows=1152, zeros=zeros)

    lowered = jax.jit(run).trace(tile, tile, value, value).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("length", "rows", "reason"),
    [
        (100, 128, "100 tokens are not a multiple of 8"),
        (136, 128, "rows must be a multiple of 64 and at least T = 136, got 128"),
    ],
)
@needs_newer_jax
def test_unsupported_lengths_are_refused(length, rows, reason):
    from xsake.backends.hopper import delta as hopper_delta

    with pytest.raises(ValueError, match=reason):
        hopper_delta.statistics(*random_inputs(1, length, 1, 64), rows=rows)
