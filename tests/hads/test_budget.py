import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xsake.hads import budget, row_blocks

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(2, 12))


def draw_mass(layers, heads, n, seed, sharp=2.0):
    """Block mass of random heads: rows over the allowed blocks that add up to 1."""
    rng = np.random.default_rng(seed)
    logits = (
        rng.normal(size=(layers, heads, n, n)) * sharp * rng.uniform(0, 2, (layers, heads, 1, 1))
    )
    mass = np.where(row_blocks.allowed(n), np.exp(logits), 0)
    return mass / mass.sum(-1, keepdims=True)


def every_policy(layers, heads, n, density, seed, band=0, end_weight=1.0):
    mass = draw_mass(layers, heads, n, seed)
    entropies = np.random.default_rng(seed).uniform(0, 1, (layers, heads))
    yield budget.uniform(density, layers, heads, n, band, end_weight)
    yield budget.level(density, layers, heads, n, band)
    yield budget.entropy(entropies, density, n, band, end_weight)
    for cost in (budget.surrogate(mass, band), budget.additive(mass, band)):
        yield budget.by_gains(budget.falling_gains(cost, band), density, band, end_weight)


@settings(max_examples=60, deadline=None)
@given(
    SIZES, st.floats(0, 1), st.integers(0, 3), st.integers(0, 2), st.sampled_from([1.0, 0.2, 9.0])
)
def test_budgets_add_up_and_every_row_keeps_its_floor(size, share, seed, band, end_weight):
    """The total is exact; every row block has its forced blocks and at most all of its blocks."""
    layers, heads, n = size
    least = row_blocks.floors(n, band).sum() / (n * (n + 1) / 2)
    density = min(1.0, least + share * (1 - least) + 1e-9)
    for found in every_policy(layers, heads, n, density, seed, band, end_weight):
        assert found.counts.sum() == round(density * layers * heads * n * (n + 1) / 2)
        assert (found.counts >= row_blocks.floors(n, band)).all()
        assert (found.counts <= row_blocks.ceilings(n)).all()
        assert found.counts.dtype == np.int32
        np.testing.assert_allclose(found.density, density, atol=0.51 / (heads * n * (n + 1) / 2))


@pytest.mark.parametrize("seed", range(6))
def test_kl_is_optimal_for_its_surrogate(seed):
    """Against every allocation of the same total to two heads of four row blocks."""
    heads, n, density = 2, 4, 0.85
    cost = budget.surrogate(draw_mass(1, heads, n, seed))
    found = budget.by_cost(cost, density)
    total = found.counts.sum()
    ranges = [
        range(a, b + 1) for a, b in zip(row_blocks.floors(n), row_blocks.ceilings(n), strict=True)
    ]
    best = min(
        budget.cost_of(cost, np.array(counts).reshape(1, heads, n))
        for counts in itertools.product(*ranges * heads)
        if sum(counts) == total
    )
    np.testing.assert_allclose(budget.cost_of(cost, found.counts), best, rtol=1e-12)
    assert total < heads * n * (n + 1) / 2  # there was something to choose


@pytest.mark.parametrize(("weight", "seed"), [(0.01, 2), (20.0, 3)])
def test_a_weighted_end_is_optimal_for_the_weighted_cost(weight, seed):
    """Against every allocation of the same total to two heads of five row blocks."""
    cost = budget.surrogate(draw_mass(1, 2, 5, seed))
    weights = [1, 1, 1, weight, weight]
    np.testing.assert_array_equal(row_blocks.weights(5, weight), weights)
    weighted = cost * np.array(weights)[:, None]
    plain, found = (budget.by_cost(cost, 0.85, end_weight=x).counts for x in (1.0, weight))
    ranges = list(map(range, row_blocks.floors(5), row_blocks.ceilings(5) + 1))
    best = min(
        budget.cost_of(weighted, np.array(x).reshape(1, 2, 5))
        for x in itertools.product(*ranges * 2)
        if sum(x) == found.sum()
    )
    np.testing.assert_allclose(budget.cost_of(weighted, found), best, rtol=1e-12)
    assert budget.cost_of(weighted, plain) > best * (1 + 1e-6)  # the weight decides something


def test_an_end_of_great_weight_keeps_nearly_all_of_its_blocks():
    uniform, level, *others = every_policy(2, 3, 12, 0.6, 0, end_weight=1e6)
    assert (level.counts[..., -1] < 12).all()  # a window has no weights
    for found in uniform, *others:
        assert found.counts[..., -2:].mean() > 0.95 * 11.5  # but those that hold no mass


def test_kl_beats_uniform_and_entropy_on_its_surrogate():
    cost = budget.surrogate(draw_mass(3, 4, 12, 0))
    found = [budget.cost_of(cost, x.counts) for x in every_policy(3, 4, 12, 0.4, 0)]
    assert found[3] == min(found)
    assert found[3] < 0.95 * found[0]


def test_the_surrogate_is_convex_after_the_forced_blocks():
    curve = budget.surrogate(draw_mass(2, 3, 10, 1))
    for i in range(3, 10):
        gains = -np.diff(curve[..., i, 1 : i + 1], axis=-1)
        assert (np.diff(gains, axis=-1) <= 1e-12).all()


def lower_hull(cost, i):
    """The greatest convex function below the points (c, cost[c]) from the floor of row i on."""
    first = row_blocks.floors(5)[i] - 1
    hull = cost.copy()
    for c in range(first, i + 1):
        chords = [
            cost[a] + (cost[b] - cost[a]) * (c - a) / (b - a)
            for a in range(first, c)
            for b in range(c + 1, i + 1)
        ]
        hull[c] = min([cost[c], *chords])
    return hull


@pytest.mark.parametrize("seed", range(4))
def test_a_cost_that_is_not_convex_loses_at_most_one_distance_to_the_hull(seed):
    """All row blocks but the last one allocated are on the vertices of their convex hulls."""
    cost = -np.sort(-np.random.default_rng(seed).random((1, 2, 5, 5)), axis=-1)
    found = budget.by_cost(cost, 0.8)
    ranges = [
        range(a, b + 1) for a, b in zip(row_blocks.floors(5), row_blocks.ceilings(5), strict=True)
    ]
    best = min(
        budget.cost_of(cost, np.array(counts).reshape(1, 2, 5))
        for counts in itertools.product(*ranges * 2)
        if sum(counts) == found.counts.sum()
    )
    distance = max(
        (cost[0, h, i] - lower_hull(cost[0, h, i], i))[: i + 1].max()
        for h in range(2)
        for i in range(5)
    )
    assert best <= budget.cost_of(cost, found.counts) <= best + distance + 1e-9


def test_a_density_below_the_forced_blocks_is_refused_with_the_minimum():
    for n, least in ((64, "0.062"), (32, "0.120"), (16, "0.228")):
        with pytest.raises(
            ValueError, match=rf"below {least}, the share of the blocks that.*train --hads\.block"
        ):
            budget.uniform(0.05, 2, 3, n)
    with pytest.raises(ValueError, match=r"density must be above 0 and at most 1, got 1\.2"):
        budget.uniform(1.2, 2, 3, 8)


def test_the_smallest_named_budget_is_possible():
    for found in every_policy(2, 3, 64, 0.062, 0):
        assert found.counts.sum() <= 1.02 * 6 * row_blocks.floors(64).sum()


def test_degenerate_heads_are_handled_and_reported():
    n = 8
    mass = draw_mass(1, 4, n, 0)
    mass[0, 1] = (
        np.where(row_blocks.allowed(n), 1, 0) / row_blocks.ceilings(n)[:, None]
    )  # all blocks equal
    cost = budget.surrogate(mass)
    cost[0, 2] = 0  # dead: nothing it drops costs anything
    cost[0, 3] = np.nan
    found = budget.by_cost(cost, 0.6)
    assert (found.counts[0, 2] == row_blocks.floors(n)).all()
    assert found.counts[0, 3].sum() == budget.uniform(0.6, 1, 1, n).counts.sum()
    assert any("layer 0, head 2 gains nothing" in note for note in found.notes)
    assert any("layer 0, head 3 has a cost that is not a number" in note for note in found.notes)
    assert found.counts.sum() == round(0.6 * 4 * n * (n + 1) / 2)
    found = budget.entropy(np.array([[0.5, np.nan, 0.1, 0.9]]), 0.6, n)
    assert any("head 1 has no entropy" in note for note in found.notes)
    same = budget.entropy(np.zeros((1, 4)), 0.6, n)
    assert (same.counts.sum(-1).max() - same.counts.sum(-1).min()) <= 1
    assert same.notes


def test_broad_heads_keep_more_under_entropy():
    found = budget.entropy(np.array([[0.2, 0.5, 0.9]]), 0.4, 16)
    totals = found.counts[0].sum(-1)
    assert totals[0] < totals[1] < totals[2]
