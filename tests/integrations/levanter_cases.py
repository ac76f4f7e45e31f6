"""Calls of Levanter's attention, for fixtures/levanter.py and the tests that read what it wrote.

`named(array, *names)` makes a named array, of Haliax or of the tests' own.
"""

from __future__ import annotations

import numpy as np

B, K, G, T, S, H = 2, 2, 2, 9, 9, 4
QUERY = ("batch", "kv_head", "q_heads_per_group", "position", "head_size")
KEY = ("batch", "kv_head", "key_position", "head_size")


def arrays():
    rng = np.random.default_rng(0)
    sizes = dict(batch=B, kv_head=K, q_heads_per_group=G, position=T, key_position=S, head_size=H)
    q, k, v = (
        rng.standard_normal([sizes[name] for name in names]).astype(np.float32)
        for names in (QUERY, KEY, KEY)
    )
    return q, k, v


def cases(named):
    """{name: (fields of an AttentionMask or None, other arguments)}."""
    rng = np.random.default_rng(1)
    ids = np.sort(rng.integers(0, 3, (B, T)), axis=1)
    shown = rng.random((B, K, G, T, S)) < 0.6
    shown[..., 0] = True  # where a query sees nothing, Levanter returns a mean
    everywhere = ("batch", "kv_head", "q_heads_per_group", "position", "key_position")
    packed = named(ids, "batch", "position")

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "no mask": (None, {}),
        "causal": ({"is_causal": True}, {}),
        "offset": ({"is_causal": True, "causal_offset": named(np.array(2))}, {}),
        "offsets": ({"is_causal": True, "causal_offset": named(np.array([0, 3]), "batch")}, {}),
        "window": ({"is_causal": True, "sliding_window": 3}, {}),
        "window alone": ({"sliding_window": 4}, {}),
        "segments": ({"is_causal": True, "segment_ids": (packed, packed)}, {}),
        "segments of keys": (
            {"segment_ids": (packed, named(ids, "batch", "key_position")), "sliding_window": 5},
            {},
        ),
        "explicit": ({"explicit_mask": named(shown, *everywhere), "is_causal": True}, {}),
        "explicit for all heads": (
            {"explicit_mask": named(shown[0, 0, 0], "position", "key_position")},
            {},
        ),
        "soft cap": ({"is_causal": True}, {"logits_soft_cap": 0.5, "scaling_factor": 0.9}),
        "bias": (
            {"is_causal": True},
            {"bias": named(normal(K, T, S), "kv_head", "position", "key_position")},
        ),
        "sinks": (
            {"is_causal": True},
            {"attn_sink": named(normal(K, G), "kv_head", "q_heads_per_group")},
        ),
    }
