import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hads.draws import attention
from xsake import block_scores, selection
from xsake.hads import row_blocks


@pytest.mark.parametrize("band", [0, 2])
def test_forced_blocks_are_the_same_in_numpy_and_jax(band):
    """By the definition: the first block, the diagonal and the band, none after the diagonal."""
    wanted = [[j <= i and (j == 0 or i - j <= band) for j in range(6)] for i in range(6)]
    row, column = np.ogrid[:6, :6]
    found = selection.is_forced(row, column, band)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, wanted)
    on_device = jax.jit(lambda row, column: selection.is_forced(row, column, band))(row, column)
    np.testing.assert_array_equal(on_device, wanted)
    if not band:
        assert found[5].sum() == selection.FORCED_BLOCKS


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([3, 8]), st.integers(0, 2), st.booleans())
def test_every_row_block_keeps_exactly_its_count(seed, n, band, ties):
    """With ties and NaN; forced blocks are kept, blocks after the diagonal never."""
    rng = np.random.default_rng(seed)
    scores = (
        rng.integers(0, 3, (2, n, n)).astype(np.float32) if ties else rng.normal(size=(2, n, n))
    )
    scores = np.where(rng.random(scores.shape) < 0.1, np.nan, scores).astype(np.float32)
    floor, most = row_blocks.floors(n, band), row_blocks.ceilings(n)
    counts = rng.integers(floor, most + 1, (2, n))
    kept = np.asarray(selection.keep_top(scores, counts, band=band))
    np.testing.assert_array_equal(kept.sum(-1), counts)
    assert kept[:, row_blocks.forced(n, band)].all()
    assert not kept[:, ~row_blocks.allowed(n)].any()
    np.testing.assert_array_equal(
        np.asarray(selection.ranks(scores, band)) < counts[..., None], kept
    )


@pytest.mark.parametrize(("n", "first", "band"), [(3, 0, 0), (8, 0, 2), (8, 5, 1), (8, 7, 0)])
def test_ranking_keeps_what_sorting_keeps(n, first, band):
    """Ties, NaN, counts below the forced and above the allowed, row blocks past the last block."""
    rng = np.random.default_rng(n + first)
    scores = rng.integers(0, 4, (2, 3, 3, n)).astype(np.float32)
    scores[scores == 3] = np.nan
    counts = rng.integers(-1, n + 3, (3, 3))
    kept = [
        np.asarray(form(scores, counts, band, first))
        for form in (selection._keep_by_rank, selection._keep_by_sorting)
    ]
    np.testing.assert_array_equal(*kept)


def test_the_highest_scores_are_kept():
    scores = np.arange(36.0).reshape(6, 6)[:, ::-1].copy()  # falling along the row
    kept = np.asarray(selection.keep_top(scores, np.full(6, 4)))
    np.testing.assert_array_equal(np.nonzero(kept[5])[0], [0, 1, 2, 5])


def test_top_p_takes_the_fewest_blocks_that_reach_the_share():
    p = np.array([0.05, 0.5, 0.25, 0.15, 0.05])
    scores = jnp.log(jnp.asarray(np.tile(p, (5, 1))))
    cap = row_blocks.ceilings(5)
    # in the last row block 0 and 4 are forced (0.10), then 0.5, 0.25, 0.15
    for share, want in ((0.05, 2), (0.55, 3), (0.61, 4), (0.99, 5)):
        counts = selection.counts_for_mass(scores, share, cap)
        assert counts[4] == want
    capped = selection.counts_for_mass(scores, 0.99, jnp.full(5, 3))
    assert capped[4] == 3
    assert (np.asarray(capped) <= 3).all()


def test_masks_list_what_was_selected_and_run_under_jit():
    q, k, _, _ = attention(100)

    @jax.jit
    def choose(q, k, counts):
        blocks = selection.keep_top(block_scores.estimate("gaussian", q, k, 16), counts)
        return blocks, selection.to_mask(blocks, 100, 16)

    counts = np.minimum(3, row_blocks.ceilings(7))
    blocks, mask = choose(q, k, counts)
    assert not mask.overflow
    np.testing.assert_array_equal(mask.blocks()[0] > 0, blocks)
    np.testing.assert_array_equal(mask.kv_count[0], np.broadcast_to(counts, (4, 7)))
