"""A plan's budget is spent within documents."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.hads import Plan, row_blocks
from xsake.hads.documents import shared_blocks
from xsake.hads.terms import Terms

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
def test_each_row_block_spends_its_budget_within_its_own_documents(selector):
    """As many as the plan says or as there are: none is lost to another document's block."""
    ids, (q, k) = packed(1), inputs(1)
    plan = plan_of(selector)
    shared = np.asarray(shared_blocks(jnp.asarray(ids), BLOCK)) & row_blocks.allowed(n)
    kept = np.asarray(plan.blocks(1, q, k, segment_ids=ids))
    assert not (kept & ~shared[:, None]).any()
    own = shared.sum(-1)[:, None]
    expected = np.minimum(plan.counts[1], own)
    np.testing.assert_array_equal(kept.sum(-1), np.broadcast_to(expected, kept.sum(-1).shape))
    alone = np.asarray(plan.blocks(1, q, k)) & shared[:, None]
    assert kept.sum() > alone.sum()  # alone: other documents are masked after the selection


def test_a_sequence_of_one_document_gives_the_plain_plan():
    q, k = inputs(2)
    plan = plan_of("mean_query")
    kept = plan.blocks(0, q, k, segment_ids=np.zeros((2, T), int))
    np.testing.assert_array_equal(kept, plan.blocks(0, q, k))


def test_a_plan_of_another_length_is_refused_under_jit():
    q, k = inputs(3)
    blocks = jax.jit(lambda plan, q, k, ids: plan.blocks(0, q, k, segment_ids=ids))
    with pytest.raises(ValueError, match=r"12 row blocks and the input has 5: call plan.at\(40\)"):
        blocks(plan_of("mean_query"), q[:, :40], k[:, :40], np.zeros((2, 40), int))


@pytest.mark.parametrize("selector", ["static", "mean_query"])
def test_the_mask_keeps_documents_apart_and_lists_the_blocks(selector):
    """The mask is: selected blocks and causal and the same document."""
    ids, (q, k) = packed(2), inputs(2)
    plan = plan_of(selector)
    mask = plan.mask(1, q, k, segment_ids=ids)
    kept = np.asarray(plan.blocks(1, q, k, segment_ids=ids))
    np.testing.assert_array_equal(np.asarray(mask.blocks()) > 0, kept)
    tokens = np.repeat(np.repeat(kept, BLOCK, 2), BLOCK, 3)[:, :, :T, :T]
    own = np.tri(T, dtype=bool) & (ids[:, :, None] == ids[:, None, :])
    np.testing.assert_array_equal(mask.to_dense(), tokens & own[:, None])


def test_ids_need_not_rise_as_long_as_a_document_is_in_one_piece():
    ids, (q, k) = packed(1), inputs(1)
    names = np.random.default_rng(0).permutation(T)[ids]
    plan = plan_of("mean_query")
    one, other = (plan.blocks(0, q, k, segment_ids=x) for x in (ids, names))
    np.testing.assert_array_equal(one, other)


def test_the_mask_of_a_chunk_has_the_documents_of_the_whole_text():
    """Row blocks of a chunk are those of the whole text, blocks and tokens."""
    S = T // BLOCK * BLOCK
    ids, (q, k) = packed(1)[:, :S], (x[:, :S] for x in inputs(1))
    plan = plan_of("mean_query").at(S)

    @jax.jit
    def tokens(q, k, first=0):
        return plan.mask(0, q, k, segment_ids=ids, first=first).to_dense()

    first, last = 3 * BLOCK, 6 * BLOCK
    whole, part = tokens(q, k), tokens(q[:, first:last], k, first)
    np.testing.assert_array_equal(part, whole[:, :, first:last])


def test_top_p_stops_within_documents():
    ids, (q, k) = packed(1), inputs(1)
    full = plan_of("mean_query")
    terms = dataclasses.replace(full.terms, top_p=0.6)
    few = dataclasses.replace(full, terms=terms).blocks(1, q, k, segment_ids=ids)
    every = full.blocks(1, q, k, segment_ids=ids)
    assert not (few & ~every).any()
    assert few.sum() < every.sum()
