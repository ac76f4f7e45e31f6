"""The kernel that chooses outliers: on the CPU, lowered, and on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conditions import needs_gpu, needs_newer_jax
from xsake.block_scores import queries

SCALE = 0.3


def random_queries(batch, T, N, H, dtype="bfloat16"):
    """Numbers with a mean of their own in every column."""
    rng = np.random.default_rng(T + H)
    q = rng.standard_normal((batch, T, N, H)) + 2 * rng.standard_normal((N, H))
    return jnp.asarray(q, dtype)


def run(q, block, parts):
    from xsake.backends.hopper import outliers

    return np.asarray(outliers.outliers(q, block, parts, scale=SCALE))


def check(q, block, parts, found):
    """Each result is a query of its part, and none of the part is further away, in float64.

    Float32 sums of at most 256 squares differ by less than 1e-5 of themselves.
    """
    B, T, N, H = q.shape
    size, blocks = block // parts, -(-T // block)
    assert found.shape == (B, blocks * parts, N, H)
    assert found.dtype == q.dtype
    scaled = np.asarray((q.astype(jnp.float32) * SCALE).astype(q.dtype))
    exact = np.asarray(q, np.float64)
    for b, n, part in np.ndindex(B, N, blocks * parts):
        row = exact[b, part // parts * block :, n][:block]
        members = slice(part * size, min((part + 1) * size, T))
        if part * size >= T:
            np.testing.assert_array_equal(found[b, part, n], 0)
            continue
        away = ((exact[b, members, n] - row.mean(0)) ** 2).sum(-1)
        is_found = (scaled[b, members, n] == found[b, part, n]).all(-1)
        assert is_found.any()
        assert away[is_found].max() >= away.max() * (1 - 1e-5)


CASES = [
    # (batch, T, N, H), block, parts, dtype
    ((2, 301, 3, 64), 128, 16, "bfloat16"),  # a short last block
    ((1, 128, 2, 64), 64, 16, "float16"),  # two lanes for each token's distance
    ((1, 70, 3, 128), 64, 16, "bfloat16"),  # the last block has six tokens
    ((2, 256, 1, 128), 128, 16, "bfloat16"),
    ((1, 200, 2, 256), 128, 16, "float16"),  # a warp for each token
    ((1, 65, 1, 256), 64, 64, "bfloat16"),  # every token is a part
    ((1, 130, 2, 64), 128, 2, "bfloat16"),  # more row groups than parts
    ((1, 190, 1, 128), 64, 8, "bfloat16"),
]


@pytest.fixture
def emulator(monkeypatch):
    from tests.backends.hopper import lane_emulator

    lane_emulator.emulate(monkeypatch)
    return lane_emulator


@pytest.mark.parametrize(("shape", "block", "parts", "dtype"), CASES, ids=str)
@needs_newer_jax
def test_the_furthest_query_of_each_part_is_found(shape, block, parts, dtype, emulator):
    q = random_queries(*shape, dtype)
    check(q, block, parts, run(q, block, parts))


@needs_newer_jax
def test_the_first_of_equally_distant_queries_is_found(emulator):
    """Queries of small integers: means and distances are exact. So it agrees with plain JAX."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.integers(-1, 2, (2, 192, 2, 64)) * (np.arange(64) < 3), jnp.bfloat16)
    want = jax.vmap(functools.partial(queries.outliers, part=8, block=64))(q)
    np.testing.assert_array_equal(run(q, 64, 8), (want * SCALE).astype(q.dtype))


@needs_newer_jax
def test_what_is_not_a_number_stays_in_its_row_block(emulator):
    """Loads and stores stay inside, and other row blocks and heads are not changed."""
    q = random_queries(1, 192, 2, 64)
    clean = run(q, 64, 16).reshape(3, 16, 2, 64)
    with np.errstate(invalid="ignore"):
        poisoned = run(q.at[0, 70, 0].set(jnp.nan).at[0, 90, 0, 5].set(jnp.inf), 64, 16)
    poisoned = poisoned.reshape(clean.shape)
    np.testing.assert_array_equal(poisoned[[0, 2]], clean[[0, 2]])
    np.testing.assert_array_equal(poisoned[1, :, 1], clean[1, :, 1])


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("T", [1024, 1000])
@needs_newer_jax
def test_it_lowers_for_cuda(block, size, T):
    """Whole row blocks and a short one, which is copied in another way."""
    from xsake.backends.hopper import outliers

    q = jax.ShapeDtypeStruct((2, T, 3, size), jnp.bfloat16 if T % block else jnp.float16)
    step = jax.jit(functools.partial(outliers.outliers, block=block, parts=16, scale=SCALE))
    text = step.trace(q).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("shape", "block", "parts", "dtype"),
    [*CASES, ((1, 8192, 9, 64), 64, 16, "bfloat16"), ((2, 4001, 4, 128), 128, 16, "bfloat16")],
    ids=str,
)
def test_on_a_card_the_furthest_query_of_each_part_is_found(shape, block, parts, dtype):
    q = random_queries(*shape, dtype)
    check(q, block, parts, run(q, block, parts))
