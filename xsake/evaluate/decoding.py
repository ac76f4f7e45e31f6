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
from xsake.model.attend import Reading
from xsake.model.generate import REFRESH, advance, check_budget, entries_of, prefill
from xsake.model.kv_cache import KVCache


def budget_of(plan: Plan, density: float) -> np.ndarray:
    """The share of the cache that each head may read, [layers, N], `density` in the mean.

    In proportion to the counts of the plan's last row, as far as a head has blocks.
    """
    wanted = np.asarray(plan.counts)[..., -1].astype(np.float64)
    small, large = 0.0, 1 / wanted.min()
    for _ in range(100):
        middle = (small + large) / 2
        too_much = np.minimum(middle * wanted, 1).mean() > density
        small, large = (small, middle) if too_much else (middle, large)
    return np.minimum(large * wanted, 1).astype(np.float32)


def compare_decoding(
    model: Transformer, tokens: Any, new: int, budget: Any, refresh: int = REFRESH
) -> Predictions:
    """The last `new` tokens of tokens [T] fed one by one, with a budget and with the whole cache.

    `budget` and `refresh` as `model.generate` takes them; the prompt before is read dense.
    """
    tokens = np.asarray(tokens)
    prompt, rest = tokens[:-new], jnp.asarray(tokens[-new:])
    wanted = check_budget(model.config, budget)
    cache = KVCache.empty(model.config, 1, len(tokens), dtype=model.dtype)
    cache, _ = prefill(model, cache, [prompt.tolist()])
    dense = _follow(model, cache, rest, None, refresh)
    sparse = _follow(model, cache, rest, wanted, refresh)
    return compare_predictions(dense, sparse, rest, model.logits, at_once=64)


def _follow(
    model: Transformer, cache: KVCache, tokens: Array, budget: np.ndarray | None, refresh: int
) -> Array:
    """Hidden states [new, width] of tokens read one a step."""
    entries = entries_of(budget, cache.capacity, cache.block, refresh)
    found = []
    for first in range(0, len(tokens), refresh):
        part = tokens[first : first + refresh]
        cache, hidden = _follow_choice(model, cache, part, budget, entries=entries)
        found.append(hidden)
    return jnp.concatenate(found)


@functools.partial(jax.jit, static_argnames="entries")
def _follow_choice(
    model: Transformer, cache: KVCache, tokens: Array, budget: Any, *, entries: int
) -> tuple[KVCache, Array]:
    """Tokens that read the blocks which the first of them chooses."""
    reading = None if budget is None else Reading(jnp.asarray(budget), entries, len(tokens))
    one = jnp.ones(1, jnp.int32)

    def step(state: Any, token: Array, anew: bool = False) -> tuple[Any, Array]:
        held, lists = state
        hidden, held, lists = advance(
            model, held, lists, token[None], one, cache.capacity, reading, anew=anew
        )
        return (held, lists), hidden[0]

    lists = None if reading is None else reading.nothing(1)
    state, first = step((cache, lists), tokens[0], anew=True)
    (cache, _), others = lax.scan(step, state, tokens[1:])
    return cache, jnp.concatenate([first[None], others])
