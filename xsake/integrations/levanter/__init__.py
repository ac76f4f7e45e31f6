"""Levanter's attention: named axes and its AttentionMask, computed by `dot_product_attention`.

    query  {batch…, QPos, kv heads, heads of a kv head, Key} ─ [B, T, N, H] ─┐
    key, value {batch…, KPos, kv heads, Key} ──────────────── [B, S, K, H] ─┼─ dot_product_attention
    AttentionMask: causal, window, segments, explicit ─────── a rule ───────┘          │
    NamedArray {batch…, QPos, kv heads, heads of a kv head, Key} ◀─────────────────────┘

Axes may come in any order. Those that query, key and value share are batch axes, except for the
last one that the mask has no data for: the kv heads. Those that only query has are heads of a kv
head.
    call.py       dot_product_attention, with Levanter's arguments
    axes.py       which named axis counts what
    mask.py       an AttentionMask as a rule
    sharding.py   the call under shard_map

Levanter and Haliax are not imported: a named array is an object with `array` and `axes`, whose type
makes another from both, and an axis has `name` and `size`.

Over several devices, `mesh` and `axis_mapping` run the call under shard_map, over the axes of batch
rows and kv heads that the mapping names: functools.partial(dot_product_attention, mesh=…, …).
"""

from xsake.integrations.levanter.call import (
    dot_product_attention,
    dot_product_attention_with_sink,
)

__all__ = ["dot_product_attention", "dot_product_attention_with_sink"]
