"""Plans whose last row blocks have another weight in the budget than the others."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.hads.test_plan import BLOCK, N_ROWS, profile_of
from xsake.hads import Plan, budget, make, row_blocks
from xsake.hads.terms import Terms, check_terms

END = row_blocks.END


@pytest.mark.parametrize("band", [0, 1])
@pytest.mark.parametrize("n", [2, 3, 5, 10, 12])
def test_the_last_row_blocks_keep_the_calibrated_fraction_of_the_last_ones(n, band):
    """Of optional blocks, also in texts shorter than calibration; one of END has no such end."""
    density, floors = 0.9, row_blocks.floors(N_ROWS, band)
    ceilings = row_blocks.ceilings(N_ROWS)
    counts = np.random.default_rng(0).integers(2, 7, (2, 4, N_ROWS))
    counts = np.clip(counts, floors, ceilings).astype(np.int32)
    terms = Terms(density, "output", "mean_query", BLOCK, N_ROWS * BLOCK, band, end_weight=4.0)
    found = Plan(counts, None, terms).at(n * BLOCK - 3).counts
    kept = (counts - floors) / np.maximum(ceilings - floors, 1)
    beyond = kept[..., :-END][..., -(N_ROWS // 4) :].mean(-1)
    target, least = np.empty((2, 4, n)), row_blocks.floors(n, band)
    for i in range(n):
        to_end, optional = n - i, i + 1 - least[i]
        if n > END and to_end <= END:
            target[..., i] = least[i] + kept[..., N_ROWS - to_end] * optional
        elif i < N_ROWS - END:
            target[..., i] = counts[..., i]
        else:
            target[..., i] = least[i] + beyond * optional
    density = max(density, row_blocks.least_density(n, band))
    np.testing.assert_array_equal(found, budget.filled(target, density, n, band).counts)


@pytest.mark.parametrize("policy", ["uniform", "output"])
@pytest.mark.parametrize(("n", "band"), [(5, 0), (6, 0), (8, 0), (6, 1), (8, 2)])
def test_a_weight_moves_blocks_to_the_end_of_longer_texts_than_a_few_row_blocks(n, band, policy):
    """Where the few row blocks before the calibrated end keep little but forced blocks."""
    profile, m = profile_of(1, 4, n), 24
    facts = dataclasses.replace(profile.facts, band=band)
    profile = dataclasses.replace(profile, facts=facts)
    heavy, plain, light = (
        make(profile, 0.4, policy, end_weight=x, length=m * BLOCK).counts for x in (16.0, 1.0, 0.01)
    )
    assert heavy.sum() == plain.sum() == light.sum()
    at_end = [int(x[..., -END:].sum()) for x in (heavy, plain, light)]
    assert at_end[0] > at_end[1] > at_end[2]
    most = 4 * row_blocks.ceilings(m)
    middle, end = slice(n, -END), slice(-END, None)  # the middle has no calibrated row blocks
    assert at_end[0] / most[end].sum() > heavy[..., middle].sum() / most[middle].sum()


@pytest.mark.parametrize(("n", "band", "least"), [(3, 0, 5), (4, 0, 5), (5, 1, 6), (6, 2, 7)])
def test_a_weighted_end_of_all_optional_blocks_is_not_extended(n, band, least):
    """No row block before it says how much less the others keep; a shorter text needs none."""
    profile = profile_of(1, 4, n)
    facts = dataclasses.replace(profile.facts, band=band)
    plan = make(dataclasses.replace(profile, facts=facts), 0.95, "uniform", end_weight=16.0)
    assert plan.at((n - 1) * BLOCK).counts.shape == (1, 4, n - 1)
    message = f"needs at least {least} calibrated row blocks to be extended to 24, this one has {n}"
    with pytest.raises(ValueError, match=message):
        plan.at(24 * BLOCK)
    terms = dataclasses.replace(plan.terms, end_weight=1.0)
    assert dataclasses.replace(plan, terms=terms).at(24 * BLOCK).counts.shape == (1, 4, 24)


@pytest.mark.parametrize("band", [0, 1])
def test_a_text_whose_middle_is_forced_too_needs_no_calibrated_middle(band):
    n = band + 3
    terms = Terms(0.9, "output", "mean_query", BLOCK, n * BLOCK, band, end_weight=4.0)
    plan = Plan(row_blocks.floors(n, band)[None, None].copy(), None, terms)
    assert plan.at((n + 1) * BLOCK).counts.sum() == round(0.9 * (n + 1) * (n + 2) / 2)


@pytest.mark.parametrize("n", [6, 12])
def test_a_weight_moves_blocks_to_the_end_of_shorter_and_longer_texts(n):
    plan, plain = (make(profile_of(), 0.75, "output", end_weight=x) for x in (30.0, 1.0))
    mine, other = (x.at(n * BLOCK).counts for x in (plan, plain))
    assert mine.sum() == other.sum()
    assert mine[..., -END:].sum() > other[..., -END:].sum()


def test_the_budget_of_a_cache_follows_the_last_row_block_before_the_end():
    plan = make(profile_of(), 0.75, "output", end_weight=30.0)
    wanted, found = plan.counts[..., -END - 1], plan.decode_budget(0.5)
    assert (found < 1).any()
    assert np.ptp(plan.counts[..., -END - 1]) > 0
    np.testing.assert_allclose(found, np.minimum(wanted * (found / wanted).max(), 1), rtol=1e-5)


@pytest.mark.parametrize("n", [3, 4])
def test_the_budget_of_a_cache_follows_the_end_if_all_blocks_before_it_are_forced(n):
    """Row blocks 0 and 1 have no others: every head would get the same."""
    counts = np.broadcast_to(row_blocks.floors(n), (1, 2, n)).copy()
    counts[0, 1, -1] = n
    terms = Terms(0.9, "kl", "mean_query", BLOCK, n * BLOCK, end_weight=2.0)
    ((narrow, wide),) = Plan(counts, None, terms).decode_budget(0.5)
    np.testing.assert_allclose(wide / narrow, n / 2, rtol=1e-5)


def test_a_plan_with_a_weight_is_saved_and_printed(tmp_path):
    plan = make(profile_of(), 0.75, "output", end_weight=30.0)
    plan.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan").terms == plan.terms
    assert "the last 2 row blocks count 30 ×" in str(plan)


def test_a_plan_from_before_there_were_weights_has_none(tmp_path):
    path, plan = tmp_path / "plan", make(profile_of(), 0.75)
    plan.save(path)
    with safe_open(path, framework="numpy") as file:
        header = json.loads(file.metadata()["xsake"])
        arrays = {name: file.get_tensor(name) for name in list(file.keys())}
    del header["end_weight"], header["checksum"]
    save_file(arrays, path, {"xsake": json.dumps(header)})
    assert Plan.load(path).terms == plan.terms
    assert plan.terms.end_weight == 1


@pytest.mark.parametrize(
    "weight", [0.0, -1.0, 9e-7, 1.1e6, float("inf"), float("nan"), "2", True, None]
)
def test_a_weight_that_is_none_or_beyond_the_limits_is_refused(weight):
    message = r"end_weight must be a number from 1e-06 to 1e\+06, got .*; 1 weighs all row blocks"
    with pytest.raises(ValueError, match=message):
        check_terms("output", "mean_query", None, end_weight=weight)


@pytest.mark.parametrize(("weight", "density", "last"), [(1e-6, 0.69, [2, 2]), (1e6, 0.75, [7, 8])])
@pytest.mark.parametrize("policy", ["uniform", "entropy"])
def test_the_limits_of_a_weight_are_reached(policy, weight, density, last):
    """The lightest end keeps the forced blocks only, the heaviest all; the total is the same."""
    found, plain = (make(profile_of(), density, policy, end_weight=x) for x in (weight, 1.0))
    assert found.counts.sum() == plain.counts.sum()
    assert (found.counts[..., -END:] == last).all()


def test_prompts_that_end_in_different_row_blocks_are_refused():
    """Unless none of them has a weighted end."""
    plan = make(profile_of(), 0.6, end_weight=16.0)
    plan.check_lengths([3 * BLOCK, 3 * BLOCK - 5])
    plan.check_lengths([BLOCK, END * BLOCK])
    plan.at(END * BLOCK).check_lengths([BLOCK, 3 * BLOCK])
    make(profile_of(), 0.6).check_lengths([BLOCK, 3 * BLOCK])
    message = (
        r"these prompts have \[1, 3\] row blocks of 16 tokens, but a plan with end_weight = 16 "
        "needs prompts with the same number of row blocks; pass them in separate calls"
    )
    with pytest.raises(ValueError, match=message):
        plan.check_lengths([BLOCK, 3 * BLOCK])
