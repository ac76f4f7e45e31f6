"""Quality loss of decode with a budget of blocks, measured by teacher forcing.

    prompt ─ prefill, dense ─ cache ─┬─ tokens of the text, one a step, reading all ─── logits ─┐
                                     └─ the same tokens, reading a budget of blocks ─── logits ─┴ KL

Both runs are fed the text's own tokens, so that their caches hold the same past.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake.decode import REFRESH, CacheReader
from xsake.evaluate.quality import Predictions, compare_predictions
from xsake.model import GenerateOptions, Transformer
from xsake.model.generate import AnyCache, decode_step, prefill
from xsake.model.kv_cache import KVCache


def compare_decoding(
    model: Transformer, tokens: Any, new: int, budget: Any, refresh: int = REFRESH
) -> Predictions:
    """Compares next-token predictions with a budget and with the whole cache.

    The last `new` of tokens [T] are decoded one by one; the prompt before them is prefilled with
    dense attention. `budget` and `refresh` are those of `GenerateOptions`.
    """
    tokens = np.asarray(tokens)
    prompt, rest = tokens[:-new], jnp.asarray(tokens[-new:])
    readers = [
        GenerateOptions(budget=given, refresh=refresh).reader(model.config)
        for given in (None, budget)
    ]
    cache: AnyCache = KVCache.empty(
        model.config, 1, len(tokens), dtype=model.dtype, block=readers[0].block
    )
    cache, _ = prefill(model, cache, [prompt.tolist()])
    dense, sparse = (_fed(model, cache, rest, reader.over(cache.capacity)) for reader in readers)
    return compare_predictions(dense, sparse, rest, model.logits, at_once=64)


def _fed(model: Transformer, cache: AnyCache, tokens: Array, reader: CacheReader) -> Array:
    """Hidden states [new, width] of tokens that are fed one a step."""
    found = []
    for first in range(0, len(tokens), reader.refresh):
        part = tokens[first : first + reader.refresh]
        own = dataclasses.replace(reader, refresh=len(part))
        cache, hidden = _fed_with_one_selection(model, cache, part, own)
        found.append(hidden)
    return jnp.concatenate(found)


@jax.jit
def _fed_with_one_selection(
    model: Transformer, cache: AnyCache, tokens: Array, reader: CacheReader
) -> tuple[AnyCache, Array]:
    """Feeds a group of tokens, which all read the blocks that the first one selects."""
    one = jnp.ones(1, jnp.int32)

    def step(state: Any, token: Array, reselect: bool = False) -> tuple[Any, Array]:
        hidden, state = decode_step(model, reader, state, token[None], one, reselect=reselect)
        return state, hidden[0]

    state, first = step((cache, reader.nothing_chosen(1)), tokens[0], reselect=True)
    (cache, _), others = lax.scan(step, state, tokens[1:])
    return cache, jnp.concatenate([first[None], others])
