import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hads.draws import attention, blocks_of, dense
from xsake import block_scores, selection
from xsake.hads import rows
from xsake.hads.baselines import block_mass


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([3, 8]), st.integers(0, 2), st.booleans())
def test_every_row_keeps_exactly_its_count(seed, n, band, ties):
    """With ties, with NaN; forced blocks among them, never a block of the future."""
    rng = np.random.default_rng(seed)
    scores = (
        rng.integers(0, 3, (2, n, n)).astype(np.float32) if ties else rng.normal(size=(2, n, n))
    )
    scores = np.where(rng.random(scores.shape) < 0.1, np.nan, scores).astype(np.float32)
    floor, most = rows.floors(n, band), rows.ceilings(n)
    counts = rng.integers(floor, most + 1, (2, n))
    kept = np.asarray(selection.keep_top(scores, counts, band=band))
    np.testing.assert_array_equal(kept.sum(-1), counts)
    assert kept[:, rows.forced(n, band)].all()
    assert not kept[:, ~rows.allowed(n)].any()
    np.testing.assert_array_equal(
        np.asarray(selection.ranks(scores, band)) < counts[..., None], kept
    )


@pytest.mark.parametrize(("n", "first", "band"), [(3, 0, 0), (8, 0, 2), (8, 5, 1), (8, 7, 0)])
def test_counting_keeps_what_sorting_keeps(n, first, band):
    """Ties, NaN, counts below the forced and above the allowed, rows past the end of a text."""
    rng = np.random.default_rng(n + first)
    scores = rng.integers(0, 4, (2, 3, 3, n)).astype(np.float32)
    scores[scores == 3] = np.nan
    counts = rng.integers(-1, n + 3, (3, 3))
    kept = [
        np.asarray(form(scores, counts, band, first))
        for form in (selection._kept_by_counting, selection._kept_by_sorting)
    ]
    np.testing.assert_array_equal(*kept)


def test_the_highest_scores_are_kept():
    scores = np.arange(36.0).reshape(6, 6)[:, ::-1].copy()  # falling along the row
    kept = np.asarray(selection.keep_top(scores, np.full(6, 4)))
    np.testing.assert_array_equal(np.nonzero(kept[5])[0], [0, 1, 2, 5])


def test_top_p_takes_the_fewest_blocks_that_reach_the_share():
    p = np.array([0.05, 0.5, 0.25, 0.15, 0.05])
    scores = jnp.log(jnp.asarray(np.tile(p, (5, 1))))
    cap = rows.ceilings(5)
    # in the last row 0 and 4 are forced (0.10), then 0.5, 0.25, 0.15
    for share, want in ((0.05, 2), (0.55, 3), (0.61, 4), (0.99, 5)):
        counts = selection.counts_for_mass(scores, share, cap)
        assert counts[4] == want
    capped = selection.counts_for_mass(scores, 0.99, jnp.full(5, 3))
    assert capped[4] == 3
    assert (np.asarray(capped) <= 3).all()


@pytest.mark.parametrize("selector", block_scores.ESTIMATES)
@pytest.mark.parametrize("T", [128, 117])
def test_estimates_order_blocks_by_their_mass(selector, T):
    """Half of each row's blocks chosen by the estimate keep nearly the mass of the best half."""
    q, k, v, _ = attention(T)
    n = rows.count_blocks(T, 16)
    counts = np.maximum(rows.floors(n), -(-rows.ceilings(n) // 2))
    mass = blocks_of(dense(q, k, v)[0], 16)
    mass = np.stack([mass[:, i : i + 16].mean(1) for i in range(0, T, 16)], 1)

    def kept(scores):
        return (mass * np.asarray(selection.keep_top(scores, counts))).sum(-1)[:, 3:].mean()

    scores = block_scores.estimate(selector, q, k, 16)
    assert scores.shape == (4, n, n)
    assert np.isfinite(np.asarray(scores)[:, rows.allowed(n)]).all()
    chance = np.mean([kept(jax.random.uniform(jax.random.key(i), (4, n, n))) for i in range(5)])
    best = kept(jnp.asarray(mass))
    assert kept(scores) > chance + 0.5 * (best - chance)


@pytest.mark.parametrize(
    "scores", [block_scores.mean_query, functools.partial(block_scores.gaussian, part=1)]
)
def test_the_mean_query_meets_every_key(scores):
    q, k, v, _ = attention(64)
    got = np.asarray(scores(q, k, 16))
    mean = np.asarray(q, np.float64).reshape(4, 16, 4, 8).mean(1)
    keys = np.repeat(np.asarray(k, np.float64), 2, axis=1)
    logits = np.einsum("inh,snh->nis", mean, keys) / np.sqrt(8)
    want = np.log(np.exp(logits).reshape(4, 4, 4, 16).sum(-1))
    may = rows.allowed(4)
    np.testing.assert_allclose(got[:, may], want[:, may], rtol=1e-4, atol=1e-4)


def test_past_query_decides_nothing_by_a_later_token():
    """Other tokens from block 5 on: the rows up to the fifth keep their blocks, and no other does.

    Of `mean_query` the fifth row itself changes: its first query would see what its last says.
    """
    (q, k, _, _), (other_q, other_k, _, _) = attention(128), attention(128, seed=1)
    counts = np.maximum(rows.floors(8), rows.ceilings(8) // 2)
    late = (np.arange(128) >= 80)[:, None, None]

    def same_rows(selector):
        first, second = (
            selection.keep_top(block_scores.estimate(selector, q, k, 16), counts)
            for q, k in ((q, k), (jnp.where(late, other_q, q), jnp.where(late, other_k, k)))
        )
        return np.asarray(first == second).all((0, 2))

    assert same_rows("past_query")[:6].all()
    assert not same_rows("past_query")[6:].all()
    assert not same_rows("mean_query")[5]


def test_past_query_is_the_mean_query_of_the_row_before():
    q, k, _, _ = attention(117)
    scores, past = (
        np.asarray(block_scores.estimate(name, q, k, 16)) for name in ("mean_query", "past_query")
    )
    for i in range(1, 8):
        np.testing.assert_array_equal(past[:, i, :i], scores[:, i - 1, :i])
        np.testing.assert_array_equal(past[:, i, i], scores[:, i - 1, i - 1])


def test_the_second_moment_of_keys_finds_a_block_that_the_mean_misses():
    """Two blocks with one mean; in one of them two keys stand out and carry the attention."""
    q = jnp.ones((48, 1, 8)) * 3
    k = np.zeros((48, 1, 8), np.float32)
    k[20, 0], k[24, 0] = 4, -4  # block 1: mean 0, spread
    scores = np.asarray(block_scores.gaussian(q, jnp.asarray(k), 16))
    assert scores[0, 2, 1] > scores[0, 2, 0] + 1
    flat = np.asarray(block_scores.pooled(q, jnp.asarray(k), 16))
    np.testing.assert_allclose(flat[0, 2, 1], flat[0, 2, 0], atol=1e-6)


def test_block_mass_streams_to_the_same_as_all_at_once():
    q, k, v, _ = attention(100)
    mass = blocks_of(dense(q, k, v)[0], 16)
    want = np.stack([mass[:, i : i + 16].mean(1) for i in range(0, 100, 16)], 1)
    np.testing.assert_allclose(block_mass(q, k, 16, at_once=32), want, atol=1e-5)


def test_masks_list_what_was_chosen_and_run_under_jit():
    q, k, _, _ = attention(100)

    @jax.jit
    def choose(q, k, counts):
        blocks = selection.keep_top(block_scores.estimate("gaussian", q, k, 16), counts)
        return blocks, selection.to_mask(blocks, 100, 16)

    counts = np.minimum(3, rows.ceilings(7))
    blocks, mask = choose(q, k, counts)
    assert not mask.overflow
    np.testing.assert_array_equal(mask.blocks()[0] > 0, blocks)
    np.testing.assert_array_equal(mask.kv_count[0], np.broadcast_to(counts, (4, 7)))


def test_selectors_that_do_not_look_at_the_input_are_named():
    q, k, _, _ = attention(32)
    with pytest.raises(ValueError, match="'static' does not look at q and k"):
        block_scores.estimate("static", q, k, 16)
    with pytest.raises(ValueError, match="K dividing N"):
        block_scores.estimate("pooled", q[:, :3], k, 16)
