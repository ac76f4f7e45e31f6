import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hads.draws import attention, blocks_of, dense
from xsake import block_scores, masks, selection
from xsake.hads import row_blocks

estimate = jax.jit(block_scores.estimate, static_argnums=(0, 3))


@pytest.mark.parametrize("selector", block_scores.ESTIMATES)
@pytest.mark.parametrize("T", [128, 117])
def test_estimates_order_blocks_by_their_mass(selector, T):
    """The half of the blocks with the best estimates has nearly the largest possible mass."""
    q, k, v, _ = attention(T)
    n = row_blocks.count_blocks(T, 16)
    counts = np.maximum(row_blocks.floors(n), -(-row_blocks.ceilings(n) // 2))
    mass = blocks_of(dense(q, k, v)[0], 16)
    mass = np.stack([mass[:, i : i + 16].mean(1) for i in range(0, T, 16)], 1)

    def kept(scores):
        return (mass * np.asarray(selection.keep_top(scores, counts))).sum(-1)[:, 3:].mean()

    scores = estimate(selector, q, k, 16)
    assert scores.shape == (4, n, n)
    assert np.isfinite(np.asarray(scores)[:, row_blocks.allowed(n)]).all()
    chance = np.mean([kept(jax.random.uniform(jax.random.key(i), (4, n, n))) for i in range(5)])
    best = kept(jnp.asarray(mass))
    assert kept(scores) > chance + 0.5 * (best - chance)


@pytest.mark.parametrize(
    "scores", [block_scores.mean_query, functools.partial(block_scores.gaussian, part=1)]
)
def test_mean_query_scores_are_the_logsumexp_over_the_keys_of_a_block(scores):
    q, k, v, _ = attention(64)
    got = np.asarray(jax.jit(scores, static_argnums=2)(q, k, 16))
    mean = np.asarray(q, np.float64).reshape(4, 16, 4, 8).mean(1)
    keys = np.repeat(np.asarray(k, np.float64), 2, axis=1)
    logits = np.einsum("inh,snh->nis", mean, keys) / np.sqrt(8)
    want = np.log(np.exp(logits).reshape(4, 4, 4, 16).sum(-1))
    may = row_blocks.allowed(4)
    np.testing.assert_allclose(got[:, may], want[:, may], rtol=1e-4, atol=1e-4)


def test_part_queries_find_a_block_that_few_queries_of_a_row_block_want():
    """Four of 16 queries want block 1, twelve want block 0 and do not want block 1 at all."""
    q, k = np.zeros((2, 48, 1, 2), np.float32)
    k[16:32, 0] = 1, 0
    q[32:, 0] = -4, 0
    q[36:40, 0] = 8, 0
    mean, parts = (
        np.asarray(estimate(name, jnp.asarray(q), jnp.asarray(k), 16))[0, 2]
        for name in ("mean_query", "part_queries")
    )
    assert mean[1] < mean[0]
    assert parts[1] > parts[0]
    assert np.exp(parts[1]) == pytest.approx(0.5, abs=0.01)  # the root of a quarter


@pytest.mark.parametrize(("T", "first"), [(117, 0), (48, 4)])
def test_every_query_scores_are_the_root_mean_squares_of_exact_masses(T, first):
    """Of a text with a short last block, and of its row blocks 4 to 6 as a chunk."""
    q, k, v, _ = attention(117)
    p = blocks_of(dense(q, k, v)[0], 16)[:, first * 16 : first * 16 + T]  # [N, T, n]
    want = np.stack([np.sqrt((p[:, i : i + 16] ** 2).mean(1)) for i in range(0, T, 16)], 1)
    part = q[first * 16 : first * 16 + T]
    got = np.asarray(jax.jit(block_scores.every_query, static_argnums=2)(part, k, 16, first))
    np.testing.assert_allclose(np.exp(got), want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("selector", ["outlier_queries", "every_query"])
def test_a_block_that_one_query_wants_is_found(selector):
    """The mean with its neighbours, which do not want block 1 at all, does not find it."""
    q, k = np.zeros((2, 192, 1, 2), np.float32)
    k[64:128, 0] = 1, 0
    q[128:, 0] = -12, 0
    q[141, 0] = 8, 0
    parts, found = (
        np.exp(np.asarray(estimate(name, jnp.asarray(q), jnp.asarray(k), 64))[0, 2])
        for name in ("part_queries", selector)
    )
    assert parts[1] < parts[0]
    assert found[1] > 0.1 > 10 * parts[1]


def test_outlier_queries_score_the_query_of_each_part_that_is_furthest_from_the_others():
    """Of every four queries the one furthest from the mean of 16; the last row block has five."""
    q, k, _, _ = attention(53)
    scores = functools.partial(block_scores.outlier_queries, parts=4)
    got = np.exp(np.asarray(jax.jit(scores, static_argnums=2)(q, k, 16)))
    keys = np.repeat(np.asarray(k, np.float64), 2, axis=1)
    for i in range(4):
        row = np.asarray(q, np.float64)[16 * i : 16 * i + 16]
        parts = [row[a : a + 4] for a in range(0, len(row), 4)]
        for n in range(4):
            away = [np.linalg.norm(x[:, n] - row[:, n].mean(0), axis=-1).argmax() for x in parts]
            chosen = np.stack([x[a, n] for x, a in zip(parts, away, strict=True)])
            weight = np.exp(chosen @ keys[: 16 * i + 16, n].T / np.sqrt(8))
            mass = np.stack([weight[:, j : j + 16].sum(-1) for j in range(0, 16 * i + 16, 16)], -1)
            share = mass / mass.sum(-1, keepdims=True)
            want = np.sqrt((share**2).sum(0) / 4)  # a row block has four parts, if also empty ones
            np.testing.assert_allclose(got[n, i, : i + 1], want, rtol=1e-4)


def test_the_largest_logit_of_every_few_keys_stands_for_them():
    """Keys that are a quarter of a block apart; the last block is short."""
    q, k, _, _ = attention(53)
    scores = functools.partial(block_scores.outlier_queries, parts=32, keys_per_peak=4)
    got = np.asarray(jax.jit(scores, static_argnums=2)(q, k, 32))
    keys = np.repeat(np.asarray(k, np.float64), 2, axis=1)
    logits = np.einsum("tnh,snh->nts", np.asarray(q, np.float64), keys) / np.sqrt(8)
    logits = np.pad(logits, ((0, 0), (0, 0), (0, 11)), constant_values=-np.inf)
    sums = np.exp(logits).reshape(4, 53, 2, 4, 8).max(3).sum(-1)
    sums[:, :32, 1] = 0
    squares = (sums / sums.sum(-1, keepdims=True)) ** 2
    want = np.sqrt(np.stack([squares[:, i : i + 32].sum(1) / 32 for i in (0, 32)], 1))
    np.testing.assert_allclose(np.exp(got), want, rtol=1e-4)


@pytest.mark.parametrize(("block", "peak"), [(32, 1), (64, 1), (128, 4)])
def test_blocks_of_128_have_the_largest_of_four_logits_unless_told_otherwise(block, peak):
    q, k, _, _ = attention(2 * block)
    found = block_scores.outlier_queries(q, k, block)
    for each in (1, 4):
        other = block_scores.outlier_queries(q, k, block, keys_per_peak=each)
        assert np.array_equal(found, other) == (each == peak)


@pytest.mark.parametrize("keys_per_peak", [0, 3, 64])
def test_peaks_of_keys_that_do_not_divide_a_block_are_refused(keys_per_peak):
    q, k, _, _ = attention(53)
    with pytest.raises(ValueError, match=f"keys_per_peak is {keys_per_peak}; it must divide"):
        block_scores.part_queries(q, k, 32, keys_per_peak=keys_per_peak)


def test_keys_that_no_query_sees_cannot_change_the_scores_of_every_query():
    """Neither in later blocks nor after a query in its own block, though they are NaN there."""
    q, k, _, _ = attention(96)
    clean = np.asarray(estimate("every_query", q, k, 16))
    poisoned = np.asarray(estimate("every_query", q, k.at[41:].set(jnp.nan), 16))
    np.testing.assert_array_equal(poisoned[:, :2], clean[:, :2])
    alone, other = (
        np.asarray(estimate("every_query", q[:41], x, 16))[:, :, :3]
        for x in (k, k.at[41:].set(jnp.nan))
    )
    np.testing.assert_array_equal(alone, other)


def test_past_query_does_not_depend_on_later_tokens():
    """With other tokens from block 5 on, row blocks up to the fifth keep their selection.

    Under `mean_query` that of the fifth changes: it depends on all queries of the row block.
    """
    (q, k, _, _), (other_q, other_k, _, _) = attention(128), attention(128, seed=1)
    counts = np.maximum(row_blocks.floors(8), row_blocks.ceilings(8) // 2)
    late = (np.arange(128) >= 80)[:, None, None]

    def same_rows(selector):
        first, second = (
            selection.keep_top(estimate(selector, q, k, 16), counts)
            for q, k in ((q, k), (jnp.where(late, other_q, q), jnp.where(late, other_k, k)))
        )
        return np.asarray(first == second).all((0, 2))

    assert same_rows("past_query")[:6].all()
    assert not same_rows("past_query")[6:].all()
    assert not same_rows("mean_query")[5]


def test_past_query_is_the_mean_query_of_the_row_block_before():
    q, k, _, _ = attention(117)
    scores, past = (np.asarray(estimate(name, q, k, 16)) for name in ("mean_query", "past_query"))
    for i in range(1, 8):
        np.testing.assert_array_equal(past[:, i, :i], scores[:, i - 1, :i])
        np.testing.assert_array_equal(past[:, i, i], scores[:, i - 1, i - 1])


def test_the_second_moment_of_keys_finds_a_block_that_the_mean_misses():
    """Two blocks with one mean; in one of them two keys stand out and carry the attention."""
    q = jnp.ones((48, 1, 8)) * 3
    k = np.zeros((48, 1, 8), np.float32)
    k[20, 0], k[24, 0] = 4, -4  # block 1: mean 0, spread
    scores = np.asarray(estimate("gaussian", q, jnp.asarray(k), 16))
    assert scores[0, 2, 1] > scores[0, 2, 0] + 1
    flat = np.asarray(estimate("pooled", q, jnp.asarray(k), 16))
    np.testing.assert_allclose(flat[0, 2, 1], flat[0, 2, 0], atol=1e-6)


def test_estimate_refuses_selectors_that_do_not_read_q_and_k():
    q, k, _, _ = attention(32)
    with pytest.raises(
        ValueError, match="no scores are computed from q and k for selector 'static'"
    ):
        block_scores.estimate("static", q, k, 16)
    with pytest.raises(ValueError, match="K dividing N"):
        block_scores.estimate("pooled", q[:, :3], k, 16)


def test_the_blocks_that_are_selected_are_the_best_by_their_estimates():
    """Of two texts by one call; a short last block, a band, counts below and above the bounds."""
    T, block, band = 117, 16, 1
    q, k = (jnp.stack(x) for x in zip(*(attention(T, seed=i)[:2] for i in range(2)), strict=True))
    n = row_blocks.count_blocks(T, block)
    counts = jnp.asarray(np.random.default_rng(0).integers(0, n + 2, (4, n)), jnp.int32)
    mask = block_scores.select("outlier_queries", q, k, counts, block, band)
    for b in range(2):
        kept = selection.keep_top(estimate("outlier_queries", q[b], k[b], block), counts, band)
        want = selection.to_mask(kept, T, block)
        np.testing.assert_array_equal(mask.blocks()[b], want.blocks()[0])
    assert mask.rule == masks.causal()
    with pytest.raises(ValueError, match=r"counts must be \[4, 8\], heads and row blocks, got"):
        block_scores.select("outlier_queries", q, k, counts[:, :5], block)
    with pytest.raises(ValueError, match=r"the whole text of both, got \[2, 48, 4, 8\]"):
        block_scores.select("outlier_queries", q[:, :48], k, counts, block)
