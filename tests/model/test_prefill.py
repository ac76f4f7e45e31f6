"""Prefill with a plan: padding has no part in the selection of blocks."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.draws import FAST_COMPILATION
from tests.model.families import LLAMA, random_model, random_tokens
from xsake import block_scores
from xsake.hads import Plan, row_blocks
from xsake.hads.terms import Terms
from xsake.model import KVCache

# By name, because xsake.model.generate is also the name of a function.
module = importlib.import_module("xsake.model.generate")

BLOCK, LENGTHS = 16, (150, 69)  # short last row blocks: of 6 and 5 tokens
ROUNDING = 1e-4  # of float32 logits of size about 10, by another order of operations


@functools.cache
def model():
    return random_model(dataclasses.replace(LLAMA, eos=()), implementation="reference")


def plan(selector="mean_query"):
    """A third of the blocks, for texts of 12 row blocks."""
    config, n = model().config, 12
    counts = np.maximum(row_blocks.floors(n), row_blocks.ceilings(n) // 3)
    counts = np.broadcast_to(counts, (config.layers, config.heads, n)).astype(np.int32)
    scores = None
    if selector == "static":
        scores = np.random.default_rng(3).random((*counts.shape, n), np.float32)
    return Plan(counts, scores, Terms(0.36, "uniform", selector, BLOCK, n * BLOCK))


@functools.partial(jax.jit, compiler_options=FAST_COMPILATION)
def whole_pass(model, tokens, mask):
    return model(tokens, mask=mask)


def expected(texts, mask):
    """Logits after each text by a pass over it alone, with the counts for the longest."""
    found, here = [], mask.at(max(map(len, texts)))
    for text in texts:
        n = row_blocks.count_blocks(len(text), BLOCK)
        own = dataclasses.replace(here, counts=here.counts[..., :n])
        found.append(np.asarray(whole_pass(model(), np.array([text]), own))[0, -1])
    return np.stack(found)


@pytest.mark.parametrize("chunk", [pytest.param(256, marks=pytest.mark.slow), 64])
def test_a_padded_prompt_selects_the_blocks_of_the_prompt_alone(chunk):
    """Two prompts of different length, padded to whole blocks or whole chunks."""
    texts = [random_tokens(model().config, n, seed=n).tolist() for n in LENGTHS]
    cache = KVCache.empty(model().config, 2, 256)
    mask = plan()
    _, hidden = module.prefill(model(), cache, texts, mask=mask, chunk=chunk)
    wanted = expected(texts, mask)
    np.testing.assert_allclose(model().logits(hidden), wanted, atol=ROUNDING)
    dense = np.asarray(whole_pass(model(), np.array(texts[:1]), None))[0, -1]
    assert np.abs(wanted[0] - dense).max() > 100 * ROUNDING


def test_prompts_of_several_lengths_have_plans_of_one_shape():
    """So they share a compiled program; the density is that of the prompt, not of its padding."""
    found = [plan("static").padded(length, 256) for length in (100, 150, 256)]
    assert {(x.counts.shape, x.scores.shape) for x in found} == {((2, 4, 16), (2, 4, 16, 16))}
    assert {(str(x.counts.dtype), str(x.scores.dtype)) for x in found} == {("int32", "float32")}
    np.testing.assert_array_equal(found[1].counts[..., :10], plan("static").at(150).counts)
    assert (found[1].counts[..., 10:] == 2).all()


@pytest.mark.parametrize("count", [1, 27, 37, 48])
def test_filled_queries_keep_the_mean_of_every_row_block(count):
    q = jnp.asarray(np.random.default_rng(0).standard_normal((48, 2, 4)), jnp.float32)
    found = np.asarray(block_scores.filled(q.at[count:].set(1e6), count, 16))
    np.testing.assert_array_equal(found[:count], q[:count])
    last = (count - 1) // 16 * 16
    mean = np.asarray(q[last:count]).mean(0)
    np.testing.assert_allclose(found[last : last + 16].mean(0), mean, atol=1e-6)
    size = count - last
    copies = found[last : last + 16 // size * size].reshape(-1, size, 2, 4)
    np.testing.assert_array_equal(copies, np.broadcast_to(copies[:1], copies.shape))


def test_prompts_that_a_plan_cannot_read_together_are_refused_by_the_call_itself():
    """Not by the first token, when the cache is there already; `prefill` alone refuses them too."""
    terms = dataclasses.replace(plan().terms, end_weight=16.0)
    weighted, prompts = dataclasses.replace(plan(), terms=terms), [[1] * 20, [1] * 70]
    message = r"\[2, 5\] row blocks of 16 tokens, .* separate calls"
    with pytest.raises(ValueError, match=message):
        module.stream(model(), prompts, mask=weighted)
    cache = KVCache.empty(model().config, 2, 256)
    with pytest.raises(ValueError, match=message):
        module.prefill(model(), cache, prompts, mask=weighted)
