"""Heads with uneven budgets: their order over devices, and a model in that order."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.draws import FAST_COMPILATION
from tests.model.families import LLAMA, random_model, random_tokens
from xsake.hads import row_blocks
from xsake.hads.plan import Plan
from xsake.hads.terms import Terms
from xsake.model.head_order import with_head_order
from xsake.parallel.balance import balance_heads
from xsake.parallel.context.rows import device_loads

LAYERS, KV_HEADS, GROUP, DEVICES = 24, 32, 4, 8


def budgets(seed: int) -> np.ndarray:
    """Densities from 5% to 95% of 24 layers with 32 kv heads of 4 query heads each."""
    rng = np.random.default_rng(seed)
    kv = rng.permuted(np.tile(np.linspace(0.05, 0.95, KV_HEADS), (LAYERS, 1)), axis=1)
    return np.repeat(kv, GROUP, axis=1)


@pytest.mark.parametrize("seed", range(3))
def test_the_largest_device_is_near_the_mean_in_every_layer(seed):
    found = balance_heads(budgets(seed), DEVICES, KV_HEADS)
    assert found.before_ratio.mean() > 1.3
    assert found.after_ratio.max() <= 1.05
    assert found.speedup == pytest.approx(found.before.max(1).sum() / found.after.max(1).sum())
    assert (np.sort(found.order, 1) == np.arange(KV_HEADS)).all()
    assert np.allclose(found.before.sum(1), found.after.sum(1))


def test_sorted_budgets_which_are_worst_as_they_lie():
    found = balance_heads(np.linspace(0.05, 0.95, KV_HEADS), DEVICES)
    assert found.before_ratio[0] > 1.7
    assert found.after_ratio[0] <= 1.05
    assert "1.0" in str(found)


def test_as_many_devices_as_kv_heads_leave_rows_to_balance():
    """SmolLM2's shape: nine query heads in three groups, over three devices."""
    rng = np.random.default_rng(0)
    n = 126
    density = np.array([0.1, 0.9, 0.3])
    visits = np.minimum(
        rng.geometric(0.1, (3, n)) + density[:, None] * np.arange(n), np.arange(n) + 1
    )
    heads = balance_heads(visits.sum(1), 3)
    assert heads.after_ratio[0] == pytest.approx(heads.before_ratio[0])
    assert heads.before_ratio[0] > 1.5
    rows = device_loads(visits.sum(0), 3, "balanced")
    assert rows.max() / rows.mean() <= 1.01


@pytest.mark.parametrize(
    ("work", "devices", "kv_heads", "words"),
    [
        (np.ones(6), 4, None, "4 devices do not divide 6 kv heads"),
        (np.ones(6), 2, 4, "kv_heads = 4 does not divide the 6 heads"),
        (np.array([1.0, np.nan]), 2, None, "finite numbers from 0 up"),
    ],
)
def test_what_cannot_be_balanced_is_refused(work, devices, kv_heads, words):
    with pytest.raises(ValueError, match=words):
        balance_heads(work, devices, kv_heads)


def test_a_model_with_permuted_heads_gives_the_same_logits():
    n, block = 4, 16
    terms = Terms(
        density=0.6, policy="uniform", selector="mean_query", block=block, length=n * block
    )
    rng = np.random.default_rng(0)
    counts = np.minimum(rng.integers(1, n + 1, (LLAMA.layers, LLAMA.heads, n)), np.arange(1, n + 1))
    plan = Plan(np.maximum(counts, row_blocks.floors(n)).astype(np.int32), None, terms)
    order = np.array([[1, 0], [0, 1]])
    model = random_model(LLAMA, implementation="reference")
    run = jax.jit(
        lambda model, plan, tokens: model(tokens, mask=plan), compiler_options=FAST_COMPILATION
    )
    tokens = random_tokens(LLAMA, (1, n * block))
    expected = np.asarray(run(model, plan, tokens))
    moved = with_head_order(model, order)
    ours = np.asarray(run(moved, plan.with_head_order(order), tokens))
    assert np.abs(ours - expected).max() <= 1e-4  # float32 logits of size about 10
    without = np.asarray(run(moved, plan, tokens))
    assert np.abs(without - expected).max() > 1e-2  # the plan has to move too
    assert moved.hash() != model.hash()


def test_an_order_that_is_no_permutation_is_refused():
    with pytest.raises(ValueError, match="permutation of the kv heads of every layer"):
        with_head_order(random_model(LLAMA), [[0, 0], [0, 1]])
