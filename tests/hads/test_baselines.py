import numpy as np
import pytest

from tests.hads.draws import attention, dense
from xsake import block_scores, selection
from xsake.hads import baselines, row_blocks

N_ROWS = 16


@pytest.mark.parametrize("name", baselines.FIXED)
@pytest.mark.parametrize("density", [0.3, 0.43, 0.6])
def test_fixed_patterns_have_the_density_asked_for(name, density):
    """The total is exact; all are causal and have the diagonal; all but one have block 0."""
    blocks = baselines.fixed(name, density, layers=2, heads=3, n=N_ROWS)
    assert blocks.shape == (2, 3, N_ROWS, N_ROWS)
    assert blocks.sum() == round(density * 2 * 3 * 136)
    assert not blocks[..., ~row_blocks.allowed(N_ROWS)].any()
    assert blocks[..., np.eye(N_ROWS, dtype=bool)].all()
    assert blocks[..., 0].all() == (name != "sliding_window")


def test_patterns_are_what_their_names_say():
    plain = baselines.fixed("sliding_window", 0.43, 1, 1, N_ROWS)[0, 0]
    assert not plain[-4:, 0].any()
    window = baselines.fixed("sink_window", 0.43, 1, 1, N_ROWS)[0, 0]
    for i in range(4, N_ROWS):
        near = np.nonzero(window[i, 1:])[0] + 1
        np.testing.assert_array_equal(near, np.arange(near[0], i + 1))  # one run, to the diagonal
    long = baselines.fixed("longformer", 0.43, 1, 1, N_ROWS)[0, 0]
    assert long[4:, :2].all()
    strided = baselines.fixed("strided", 0.6, 1, 1, 32)[0, 0][31]
    assert np.diff(np.nonzero(strided)[0]).max() > 1  # gaps, and blocks beyond them
    draws = baselines.fixed("random", 0.5, 2, 2, N_ROWS)
    assert (draws[0, 0] != draws[0, 1]).any()
    assert (draws[0] != draws[1]).any()
    np.testing.assert_array_equal(draws, baselines.fixed("random", 0.5, 2, 2, N_ROWS))


def test_all_patterns_have_the_same_number_of_blocks():
    entropies = np.random.default_rng(0).uniform(0.1, 0.9, (2, 3))
    totals = {
        name: baselines.counts(name, 0.43, 2, 3, N_ROWS, entropies).sum()
        for name in baselines.COUNTS
    }
    assert set(totals.values()) == {round(0.43 * 2 * 3 * 136)}


def test_vertical_slash_finds_a_column_and_a_diagonal():
    """Queries that look at block 2 and at 64 tokens before: both lines score highest."""
    T, H, block = 256, 64, 16
    rng = np.random.default_rng(0)
    places = rng.normal(size=(T + 64, H)) / np.sqrt(H)
    k = places[64:].copy()
    k[40] = places[0]
    q = 60 * places[:T] + 60 * places[0]  # token t looks at key t - 64, and all at key 40
    scores = np.asarray(
        baselines.vertical_slash(
            q[:, None].astype(np.float32), k[:, None].astype(np.float32), block
        )
    )[0]
    for i in (9, 12):
        others = np.delete(scores[i, :i], [2, i - 4])
        assert scores[i, 2] > others.max()
        assert scores[i, i - 4] > others.max()


def test_the_oracle_keeps_more_mass_than_any_pattern():
    q, k, v, _ = attention(N_ROWS * 16)
    p, _ = dense(q, k, v)
    mass = p.reshape(4, N_ROWS, 16, N_ROWS, 16).sum(-1).mean(2)

    def kept(blocks):
        return float((mass * np.asarray(blocks)).sum(-1).mean())

    counts = baselines.counts("random", 0.4, 1, 4, N_ROWS)[0]
    best = kept(selection.keep_top(baselines.oracle(q, k, 16), counts))
    for selector in block_scores.ESTIMATES:
        assert (
            best
            >= kept(selection.keep_top(block_scores.estimate(selector, q, k, 16), counts)) - 1e-6
        )
    assert best > kept(baselines.fixed("random", 0.4, 1, 4, N_ROWS)[0]) + 0.05
