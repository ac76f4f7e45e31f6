"""What a budget of blocks costs when tokens come one by one, read from the cache.

    prompt ─ prefill, dense ─ cache ─┬─ tokens of the text, one a step, reading all ─── logits ─┐
                                     └─ the same tokens, reading a budget of blocks ─── logits ─┴ KL

The text itself is fed, not what the model would say, so that both read the same past.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake.evaluate.quality import Predictions, compare_predictions
from xsake.hads.plan import Plan
from xsake.model import Transformer
from xsake.model.attend import Reading, by_cache
from xsake.model.generate import check_budget, entries_of, prefill
from xsake.model.kv_cache import KVCache


def budget_of(plan: Plan) -> np.ndarray:
    """The share of the cache that each head may read, [layers, N]: that of the plan's last row."""
    counts = np.asarray(plan.counts)
    return (counts[..., -1] / counts.shape[-1]).astype(np.float32)


def compare_decoding(
    model: Transformer, tokens: Any, new: int, budget: Any, score: str = "mean"
) -> Predictions:
    """The last `new` tokens of tokens [T] fed one by one, with a budget and with the whole cache.

    `budget` and `score` as `model.generate` takes them; the prompt before is read dense.
    """
    tokens = np.asarray(tokens)
    prompt, rest = tokens[:-new], jnp.asarray(tokens[-new:])
    wanted = check_budget(model.config, budget)
    cache = KVCache.empty(model.config, 1, len(tokens), dtype=model.dtype)
    cache, _ = prefill(model, cache, [prompt.tolist()])
    entries = entries_of(wanted, cache.capacity // cache.block)
    dense = _follow(model, cache, rest, None, 0, score)
    sparse = _follow(model, cache, rest, wanted, entries, score)
    return compare_predictions(dense, sparse, rest, model.logits, at_once=64)


@functools.partial(jax.jit, static_argnames=("entries", "score"))
def _follow(
    model: Transformer, cache: KVCache, tokens: Array, budget: Any, entries: int, score: str
) -> Array:
    """Hidden states [new, width] of tokens read one a step."""
    reading = None if budget is None else Reading(jnp.asarray(budget), entries, score)
    one = jnp.ones(1, jnp.int32)

    def step(cache: Any, token: Array) -> tuple[Any, Array]:
        attend = by_cache(model.config, cache.length[:, None], one, cache.capacity, reading)
        hidden, cache = model.run(token[None, None], cache.length[:, None], attend, cache)
        return cache.advance(one), hidden[0, 0]

    return lax.scan(step, cache, tokens)[1]
