"""dot_product_attention with Levanter's arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from xsake import attention
from xsake.arguments import block_for, floating_dtype, number
from xsake.block_mask import BlockMask
from xsake.integrations.flax.attend import check_precision
from xsake.integrations.levanter.axes import Axes
from xsake.integrations.levanter.mask import axes_of_rows, rule_of
from xsake.integrations.levanter.sharding import Sharding
from xsake.masks.integers import size_of
from xsake.masks.rule import Rule

__all__ = ["dot_product_attention", "dot_product_attention_with_sink"]

# AttentionBackend of Levanter, by value -> implementation of `xsake.dot_product_attention`
BACKENDS = {"default": None, "vanilla": "reference"}


def dot_product_attention(
    QPos: Any,
    KPos: Any,
    Key: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    bias: Any = None,
    attention_dtype: Any = None,
    precision: Any = None,
    use_flash: bool | None = None,
    attn_backend: Any = None,
    flash_block_size: int | None = None,
    dropout: float | None = 0.0,
    *,
    logits_soft_cap: float | None = None,
    scaling_factor: float | None = None,
    inference: bool = True,
    prng: Any = None,
    attn_sink: Any = None,
    mesh: Any = None,
    axis_mapping: Mapping[str, Any] | None = None,
) -> Any:
    """Attention over blocks, with the arguments of Levanter's dot_product_attention.

    Args:
      QPos: axis of queries, or its name.
      KPos: axis of keys; another name than QPos.
      Key: axis of the features of a head.
      query: named array with QPos and Key.
      key: named array with KPos and Key.
      value: named array with KPos and one axis of features.
      mask: an AttentionMask, a named array of bools, a rule of `xsake.masks`, or None.
      bias: named array, added to the logits; not together with a soft cap, inside which Levanter
        adds it.
      attention_dtype: logits and softmax are float32 in any case; a narrower dtype casts query, key
        and value.
      precision: any `jax.lax.Precision`: float32 products have the highest.
      use_flash: False holds all weights, T x S, as attn_backend vanilla does.
      attn_backend: Levanter's default or vanilla; the others are refused.
      flash_block_size: tokens of a block on both sides.
      dropout: refused unless 0 or in inference.
      logits_soft_cap: cap · tanh(logits / cap).
      scaling_factor: of the query; default 1/sqrt(size of Key).
      inference: whether dropout is off.
      prng: for dropout only.
      attn_sink: named array of the heads' axes: a logit that joins the softmax's denominator. Its
        axes tell which of those that query and key share are heads.
      mesh: not Levanter's: devices to run on under shard_map.
      axis_mapping: the mesh axis, or axes, of each named axis that is sharded: of batch rows and of
        the kv heads. Levanter's compute mapping has this form.

    Returns:
      A named array: query's axes, with value's features in place of Key.
    """
    dropout = 0.0 if dropout is None else number("dropout", dropout)
    if dropout > 0 and not inference:
        raise NotImplementedError(
            f"dropout={dropout} would drop attention weights, which XSAKE does not support; pass "
            "dropout=0, and apply dropout to the output"
        )
    if bias is not None and logits_soft_cap is not None:
        raise NotImplementedError(
            "Levanter adds bias before the soft cap and XSAKE after it; leave one of them out"
        )
    check_precision(precision)
    axes = Axes.of(QPos, KPos, Key, query, key, value, axes_of_rows(mask), attn_sink)
    q = axes.array("query", query, axes.batch, [axes.q], axes.heads, [axes.key])
    k = axes.array("key", key, axes.batch, [axes.k], axes.kv_heads, [axes.key])
    v = axes.array("value", value, axes.batch, [axes.k], axes.kv_heads, [axes.feature])
    if attention_dtype is not None:
        dtype = floating_dtype("attention_dtype", attention_dtype)
        if dtype.itemsize < q.dtype.itemsize:
            q, k, v = (x.astype(dtype) for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scaling_factor is None else scaling_factor
    how: dict[str, Any] = {
        "scale": number("scaling_factor", scale),
        "logits_soft_cap": logits_soft_cap,
        "implementation": _implementation(use_flash, attn_backend),
    }
    arrays: dict[str, Any] = {
        "bias": None if bias is None else axes.of_pairs("bias", bias),
        "sinks": None if attn_sink is None else axes.array("attn_sink", attn_sink, axes.heads),
    }
    rule = rule_of(mask, axes)
    if mesh is None and axis_mapping is None:
        blocks = rule if flash_block_size is None else _in_blocks(rule, axes, flash_block_size)
        out = attention.dot_product_attention(q, k, v, mask=blocks, **arrays, **how)
    else:
        spread = Sharding.of(mesh, axis_mapping, axes)
        out = spread.attend(q, k, v, _in_blocks(rule, axes, flash_block_size), arrays, how)
    return axes.named(out.astype(query.array.dtype), query)


def dot_product_attention_with_sink(
    QPos: Any,
    KPos: Any,
    Key: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_sink: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`dot_product_attention` with attn_sink, in the order of an earlier Levanter."""
    kwargs["attn_sink"] = attn_sink
    return dot_product_attention(QPos, KPos, Key, query, key, value, *args, **kwargs)


def _in_blocks(rule: Rule, axes: Axes, size: int | None) -> BlockMask:
    shape = (axes.sizes[axes.q], axes.sizes[axes.k])
    block = (block_for(shape[0]), block_for(shape[1]))
    if size is not None:
        block = (size_of("flash_block_size", size, 1),) * 2
    batch, heads = axes.size(axes.batch), axes.size(axes.heads)
    return BlockMask.from_rule(rule, shape, batch=batch, heads=heads, block=block)


def _implementation(use_flash: bool | None, attn_backend: Any) -> str | None:
    if attn_backend is None:
        attn_backend = "vanilla" if use_flash is False else "default"
    name = getattr(attn_backend, "value", attn_backend)
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(
            f"attn_backend {name!r} has no meaning here; leave it out, or name one of "
            f"{list(BACKENDS)}"
        )
    if use_flash is not None and use_flash is (name == "vanilla"):
        raise ValueError(
            f"use_flash={use_flash} contradicts attn_backend {name!r}: only vanilla holds all "
            "weights; leave one of them out"
        )
    return BACKENDS[name]
