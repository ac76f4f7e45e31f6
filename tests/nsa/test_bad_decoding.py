"""Wrong caches, prompts and steps: each is refused in a sentence that says what to do."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

from tests.nsa.test_bad_input import UNREAD, ints, zeros
from xsake import nsa

N, K, H = 4, 2, 8


pytestmark = pytest.mark.usefixtures("as_users_call_it")


def cache(score="nsa", settings=None, **call):
    """A cache of 16 tokens, with the given arguments replaced."""
    made = nsa.Settings(score=score, **settings or {})
    sizes = {"batch": 1, "capacity": 16, "kv_heads": K, "head_size": H}
    return nsa.Cache.empty(made, **sizes | call)


def step(cache, *shape, **call):
    """A decode step of N query heads; shape: the axes before the heads."""
    kv = zeros(*shape, K, H)
    return nsa.decode_step(zeros(*shape, N, H), kv, kv, cache, **call)


REFUSED = {
    "a pooling in a cache of moba": (
        lambda: nsa.prefill(cache("moba"), zeros(1, 9, K, H), zeros(1, 9, K, H), compression=len),
        UNREAD,
    ),
    "a pooling in a step of moba": (
        lambda: step(cache("moba"), 1, 1, compression=len),
        UNREAD,
    ),
    "a cache for msa without its size": (
        lambda: cache("msa"),
        "score='msa' needs index_size, the head size of the indexer",
    ),
    "a cache for a name": (
        lambda: nsa.Cache.empty("nsa", batch=1, capacity=16, kv_heads=K, head_size=H),
        "settings must be nsa.Settings(…), got 'nsa'",
    ),
    "a prompt of integers": (
        lambda: nsa.prefill(cache(), ints(1, 9, K, H), zeros(1, 9, K, H)),
        "key must be floating, got int32",
    ),
    "a prompt of another dtype": (
        lambda: nsa.prefill(cache(dtype=jnp.bfloat16), zeros(1, 9, K, H), zeros(1, 9, K, H)),
        (
            "key is float32 but the cache has bfloat16; make it with nsa.Cache.empty(…, dtype=…), "
            "or cast key"
        ),
    ),
    "a step with an index key of another dtype": (
        lambda: step(
            cache("msa", index_size=4),
            *(1, 1),
            index_query=zeros(1, 1, K, 4),
            index_key=zeros(1, 1, 1, 4, dtype=np.float16),
        ),
        (
            "index_key is float16 but the cache has float32; make it with "
            "nsa.Cache.empty(…, dtype=…), or cast index_key"
        ),
    ),
    "an index size for a cache of nsa": (
        lambda: cache(index_size=4),
        "index_size is for score='msa', but score is 'nsa'; leave it out",
    ),
    "index heads of a cache": (
        lambda: cache("msa", index_size=4, index_heads=3),
        "index_heads must be 1 or kv_heads = 2, got 3",
    ),
    "a cache without heads": (
        lambda: cache(kv_heads=0),
        "kv_heads must be an integer from 1 to 2147483647, got 0",
    ),
    "a cache of a fraction": (
        lambda: cache(batch=1.5),
        "batch must be an integer from 0 to 2147483647, got 1.5",
    ),
    "a cache of integers": (
        lambda: cache(dtype=np.int32),
        "dtype must be float16, bfloat16, float32 or float64, got int32",
    ),
    "a compressed branch in a cache of moba": (
        lambda: cache("moba", compressed=True),
        (
            "with score='moba' the cache holds means of whole blocks, not those of a compressed "
            "branch; decode without it"
        ),
    ),
    "a step with a compressed branch that the cache does not have": (
        lambda: step(cache("msa", index_size=4), 1, 1, compressed=True),
        (
            "this cache holds no pooled blocks for a compressed branch; make it with "
            "nsa.Cache.empty(…, compressed=True)"
        ),
    ),
    "a stride of a compressed branch in a cache of msa": (
        lambda: cache("msa", {"compression_stride": 24}, index_size=4, compressed=True),
        "compression_block must be a multiple of compression_stride = 24, got 32",
    ),
    "a step without a batch axis": (
        lambda: step(cache(), 1),
        "query must be [B, 1, N, H], got shape [1, 4, 8]; add a batch axis",
    ),
    "a step with an index key of another size": (
        lambda: step(
            cache("msa", index_size=4),
            *(1, 1),
            index_query=zeros(1, 1, K, 5),
            index_key=zeros(1, 1, 1, 5),
        ),
        (
            "index_key must have a batch, heads and head size of [1, 1, 4], as the cache has, got "
            "shape [1, 1, 1, 5]"
        ),
    ),
    "two tokens in a decode step": (
        lambda: step(cache(), 1, 2),
        "query and key must have one token, got 2 and 2; nsa.prefill takes a prompt",
    ),
    "a step of another batch": (
        lambda: step(cache(), 2, 1),
        (
            "key must have a batch, heads and head size of [1, 2, 8], as the cache has, got shape "
            "[2, 1, 2, 8]"
        ),
    ),
    "lengths beyond the prompt": (
        lambda: nsa.prefill(cache(), zeros(1, 9, K, H), zeros(1, 9, K, H), lengths=np.array([10])),
        "lengths must be from 0 to T = 9, got [10]",
    ),
    "a prompt longer than the cache": (
        lambda: nsa.prefill(cache(), zeros(1, 17, K, H), zeros(1, 17, K, H)),
        "key has 17 tokens, but the cache's capacity is 16; make it larger",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, sentence = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=f"(?m)^{re.escape(sentence)}$"):
        call()
