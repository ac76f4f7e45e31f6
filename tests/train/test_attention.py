"""A plan's budget is spent within documents."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from xsake import BlockMask, masks
from xsake.hads import Plan, row_blocks
from xsake.hads.plan import Terms
from xsake.model import PRESETS
from xsake.train.attention import Attention, shared_blocks, visited_density
from xsake.train.config import Config, Data

T, BLOCK, N = 90, 8, 3  # the last block is short
n = row_blocks.count_blocks(T, BLOCK)


def packed(seed, batch=2):
    """Documents of random lengths, rows of T tokens."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 40, (batch, T))
    return np.stack([np.repeat(np.arange(T), row)[:T] for row in lengths])


def inputs(seed, batch=2):
    draw = np.random.default_rng(seed)
    q = jnp.asarray(draw.normal(size=(batch, T, N, 16)), jnp.float32)
    k = jnp.asarray(draw.normal(size=(batch, T, 1, 16)), jnp.float32)
    return q, k


def plan_of(selector, most=4):
    counts = np.broadcast_to(np.minimum(most, np.arange(1, n + 1)), (2, N, n)).astype(np.int32)
    scores = np.random.default_rng(0).random((2, N, n, n)).astype(np.float32)
    terms = Terms(0.5, "kl", selector, BLOCK, T)
    return Plan(counts, scores if selector == "static" else None, terms)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_are_shared_if_a_document_is_in_both(seed):
    ids = packed(seed)
    parts = [[set(row[i * BLOCK : (i + 1) * BLOCK]) for i in range(n)] for row in ids]
    expected = [[[bool(a & b) for b in row] for a in row] for row in parts]
    np.testing.assert_array_equal(shared_blocks(jnp.asarray(ids), BLOCK), expected)


@pytest.mark.parametrize("selector", ["static", "mean_query", "pooled"])
def test_a_row_keeps_its_count_of_its_own_blocks_and_no_others(selector):
    """As many as the plan says or as there are: none is lost to another document's block."""
    ids, (q, k) = packed(1), inputs(1)
    plan = plan_of(selector)
    shared = np.asarray(shared_blocks(jnp.asarray(ids), BLOCK)) & row_blocks.allowed(n)
    kept = np.asarray(Attention(plan, ids).blocks(1, q, k))
    assert not (kept & ~shared[:, None]).any()
    own = shared.sum(-1)[:, None]
    expected = np.minimum(plan.counts[1], own)
    np.testing.assert_array_equal(kept.sum(-1), np.broadcast_to(expected, kept.sum(-1).shape))
    alone = np.asarray(plan.blocks(1, q, k)) & shared[:, None]
    assert kept.sum() > alone.sum()  # what the plan by itself would leave of its choice


def test_a_row_of_one_document_is_the_plan_itself():
    q, k = inputs(2)
    plan = plan_of("mean_query")
    kept = Attention(plan, np.zeros((2, T), int)).blocks(0, q, k)
    np.testing.assert_array_equal(kept, plan.blocks(0, q, k))


def test_a_plan_of_another_length_is_refused():
    q, k = inputs(3)
    short = Attention(plan_of("mean_query"), np.zeros((2, 40), int))
    with pytest.raises(ValueError, match=r"12 rows of blocks and the input 5: make it plan.at"):
        short.blocks(0, q[:, :40], k[:, :40])


def config(separate=True):
    model = dataclasses.replace(PRESETS["tiny"], context=1024)
    return Config(model=model, data=Data(separate=separate, length=T))


@pytest.mark.parametrize("selector", ["static", "gaussian"])
def test_the_visited_density_is_what_the_masks_list(selector):
    ids, (q, k) = packed(1), inputs(1)
    plan = plan_of(selector)
    found = [Attention(plan, ids)(layer, q, k).density() for layer in range(2)]
    assert visited_density(config(), plan, ids) == pytest.approx(np.mean(found), abs=1e-6)
    assert visited_density(config(), plan, ids) < plan.density


def test_dense_rows_visit_their_own_documents_and_one_text_visits_all():
    ids = np.repeat(np.arange(8), [200, 17, 300, 1, 130, 90, 250, 12])[None]
    rule = masks.causal() & masks.documents(jnp.asarray(ids))
    mask = BlockMask.from_rule(rule, (1000, 1000), batch=1)
    found = visited_density(config(), None, ids)
    assert found == pytest.approx(float(mask.density()), abs=1e-6)
    assert found < 1
    assert visited_density(config(separate=False), None, ids) == 1
