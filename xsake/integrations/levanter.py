"""Levanter's attention: named axes and its AttentionMask, computed by `dot_product_attention`.

    query  {batch…, QPos, kv heads, heads of a kv head, Key} ─ [B, T, N, H] ─┐
    key, value {batch…, KPos, kv heads, Key} ──────────────── [B, S, K, H] ─┼─ dot_product_attention
    AttentionMask: causal, window, segments, explicit ─────── a rule ───────┘          │
    NamedArray {batch…, QPos, kv heads, heads of a kv head, Key} ◀─────────────────────┘

Axes may come in any order. Those that query, key and value share are batch axes, except for the
last one that the mask has no data for: the kv heads. Those that only query has are heads of a kv
head.
Levanter and Haliax are not imported: a named array is an object with `array` and `axes`, whose type
makes another from both, and an axis has `name` and `size`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from xsake import attention, masks
from xsake.attention import number
from xsake.block_mask import BlockMask
from xsake.integrations.flax.attend import check_precision
from xsake.masks.integers import integers, size_of
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
    dropout: float = 0.0,
    *,
    logits_soft_cap: float | None = None,
    scaling_factor: float | None = None,
    inference: bool = True,
    prng: Any = None,
    attn_sink: Any = None,
) -> Any:
    """Attention over blocks, with the arguments of Levanter's dot_product_attention.

    Args:
      QPos: axis of queries, or its name.
      KPos: axis of keys; another name than QPos.
      Key: axis of the features of a head.
      query: named array with QPos and Key.
      key: named array with KPos and Key.
      value: named array with KPos and one axis of features.
      mask: an AttentionMask, a named array of bools, or None.
      bias: named array, added to the logits; not together with a soft cap, inside which Levanter
        adds it.
      attention_dtype: logits and softmax are float32 in any case; a narrower dtype casts query, key
        and value.
      precision: any `jax.lax.Precision`: float32 products have the highest.
      use_flash: False holds all weights, T x S.
      attn_backend: Levanter's default or vanilla; the others are refused.
      flash_block_size: tokens of a block on both sides.
      dropout: refused unless 0 or in inference.
      logits_soft_cap: cap · tanh(logits / cap).
      scaling_factor: of the query; default 1/sqrt(size of Key).
      inference: whether dropout is off.
      prng: for dropout only.
      attn_sink: named array of the heads' axes: a logit that joins the softmax's denominator.

    Returns:
      A named array: query's axes, with value's features in place of Key.
    """
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
    axes = _Axes.of(QPos, KPos, Key, query, key, value, mask)
    q = axes.array("query", query, axes.batch, [axes.q], axes.heads, [axes.key])
    k = axes.array("key", key, axes.batch, [axes.k], axes.kv_heads, [axes.key])
    v = axes.array("value", value, axes.batch, [axes.k], axes.kv_heads, [axes.feature])
    if attention_dtype is not None and jnp.dtype(attention_dtype).itemsize < q.dtype.itemsize:
        q, k, v = (x.astype(attention_dtype) for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scaling_factor is None else scaling_factor
    out = attention.dot_product_attention(
        q,
        k,
        v,
        None if bias is None else axes.of_pairs("bias", bias),
        _in_blocks(_rule(mask, axes), axes, flash_block_size),
        scale=number("scaling_factor", scale),
        logits_soft_cap=logits_soft_cap,
        sinks=None if attn_sink is None else axes.array("attn_sink", attn_sink, axes.heads),
        implementation=_implementation(use_flash, attn_backend),
    )
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


# --------------------------------------------------------------------------------------------- axes


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The names of a call's axes by what they count, and their sizes."""

    q: str
    k: str
    key: str
    feature: str  # of value
    batch: list[str]
    kv_heads: list[str]  # one axis, or none
    groups: list[str]  # query heads of a kv head
    sizes: dict[str, int]

    @property
    def heads(self) -> list[str]:
        return self.kv_heads + self.groups

    @classmethod
    def of(
        cls, QPos: Any, KPos: Any, Key: Any, query: Any, key: Any, value: Any, mask: Any
    ) -> _Axes:
        q, k, features = (getattr(axis, "name", axis) for axis in (QPos, KPos, Key))
        if q == k:
            raise ValueError(f"QPos and KPos must have different names, got {q!r} twice")
        names = [[axis.name for axis in x.axes] for x in (query, key, value)]
        of_query, of_key, of_value = names
        shared = [name for name in of_query if name in of_key and name in of_value]
        shared = [name for name in shared if name not in (q, k, features)]
        for what, has, needed in (
            ("query", of_query, {q, features}),
            ("key", of_key, {k, features, *shared}),
            ("value", of_value, {k, *shared}),
        ):
            if missing := needed - set(has):
                raise ValueError(f"{what} has axes {has}, without {sorted(missing)}")
        only_value = [name for name in of_value if name not in (*shared, k)]
        only_key = [name for name in of_key if name not in (*shared, k, features)]
        if only_key or len(only_value) != 1:
            raise ValueError(
                f"key has axes {of_key} and value {of_value}, but besides {[k]} and the axes that "
                f"query shares, {shared}, key may have {features!r} and value one of features"
            )
        by_row = _axes_of_rows(mask)
        heads = [name for name in shared if name not in by_row][-1:]
        return cls(
            q,
            k,
            features,
            only_value[0],
            [name for name in shared if name not in heads],
            heads,
            [name for name in of_query if name not in (*shared, q, features)],
            {axis.name: axis.size for x in (value, key, query) for axis in x.axes},
        )

    def array(self, what: str, x: Any, *groups: list[str]) -> Array:
        """The array with one axis for each group of names."""
        wanted = [name for group in groups for name in group]
        own = [axis.name for axis in x.axes]
        if sorted(own) != sorted(wanted):
            raise ValueError(f"{what} must have axes {wanted}, got {own}")
        ordered = jnp.transpose(x.array, [own.index(name) for name in wanted])
        return ordered.reshape([math.prod(self.sizes[name] for name in group) for group in groups])

    def of_pairs(self, what: str, x: Any) -> Array:
        """[B|1, N|1, T|1, S|1] of an array with any of the axes."""
        return self.broadcast(what, x, self.batch, self.heads, [self.q], [self.k])

    def broadcast(self, what: str, x: Any, *groups: list[str]) -> Array:
        """The array with one axis for each group of names, 1 where it has none of them."""
        own = [axis.name for axis in x.axes]
        wanted = [name for group in groups for name in group]
        if unknown := [name for name in own if name not in wanted]:
            raise ValueError(f"{what} has axis {unknown[0]!r}, but may have {wanted}")
        present = [name for name in wanted if name in own]
        ordered = jnp.transpose(x.array, [own.index(name) for name in present])
        spread = ordered.reshape([self.sizes[name] if name in own else 1 for name in wanted])
        full = [
            self.sizes[name] if any(other in own for other in group) else 1
            for group in groups
            for name in group
        ]
        flat = [
            math.prod(self.sizes[name] for name in group) if set(group) & set(own) else 1
            for group in groups
        ]
        return jnp.broadcast_to(spread, full).reshape(flat)

    def named(self, out: Array, query: Any) -> Any:
        """out [B, T, N, Hv] with query's axes, its features those of value."""
        order = [*self.batch, self.q, *self.heads, self.feature]
        out = out.reshape([self.sizes[name] for name in order])
        by_name = {axis.name: axis for axis in query.axes}
        wanted = [self.feature if axis.name == self.key else axis.name for axis in query.axes]
        axis_type = type(query.axes[0])
        axes = [
            axis_type(name, self.sizes[name]) if name == self.feature else by_name[name]
            for name in wanted
        ]
        return type(query)(jnp.transpose(out, [order.index(name) for name in wanted]), tuple(axes))


def _axes_of_rows(mask: Any) -> set[str]:
    """Names of the axes of segment ids and offsets, for which batch rows may differ."""
    arrays = [getattr(mask, "causal_offset", None), *_segments(mask)]
    return {axis.name for x in arrays if hasattr(x, "axes") for axis in x.axes}


# -------------------------------------------------------------------------------------------- masks


def _segments(mask: Any) -> tuple[Any, ...]:
    """(ids of queries, ids of keys) of a mask, or ()."""
    ids = getattr(mask, "segment_ids", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (tuple, list)) else (ids, ids)


def _rule(mask: Any, axes: _Axes) -> Rule:
    """What an AttentionMask, or a named array of bools, allows."""
    if mask is None:
        return masks.everything()
    if hasattr(mask, "array"):
        return masks.array(axes.of_pairs("mask", mask).astype(bool))
    if not hasattr(mask, "is_causal"):
        raise TypeError(
            f"mask must be an AttentionMask or a named array, got {type(mask).__name__}"
        )
    rule = _causal(mask.causal_offset, axes) if mask.is_causal else masks.everything()
    if mask.sliding_window is not None:  # the query itself counts, and later keys are hidden
        rule = rule & masks.sliding_window(size_of("sliding_window", mask.sliding_window, 1) - 1, 0)
    if mask.explicit_mask is not None:
        shown = axes.of_pairs("explicit_mask", mask.explicit_mask)
        rule = rule & masks.array(shown.astype(bool))
    if ids := _segments(mask):
        q_ids, kv_ids = (
            _ids(x, axes, position) for x, position in zip(ids, (axes.q, axes.k), strict=True)
        )
        rule = rule & masks.documents(q_ids, kv_ids)
    return rule


def _causal(offset: Any, axes: _Axes) -> Rule:
    """k <= q + offset."""
    if offset is None:
        return masks.causal()
    shift = axes.broadcast("causal_offset", offset, axes.batch) if hasattr(offset, "axes") else None
    shift = integers("causal_offset", offset if shift is None else shift).reshape(-1, 1)
    positions = jnp.arange(axes.sizes[axes.q], dtype=jnp.int32)[None]
    return masks.at_positions(masks.causal(), positions + shift)


def _ids(ids: Any, axes: _Axes, position: str) -> Array:
    """Segment ids int [B|1, T or S]; those of keys may have the queries' axis."""
    own = {axis.name for axis in ids.axes}
    if position not in own:
        ids = _renamed(ids, axes.q, position)
    return integers("segment_ids", axes.broadcast("segment_ids", ids, axes.batch, [position]))


@dataclasses.dataclass(frozen=True)
class _Renamed:
    """An array with other names for its axes."""

    array: Any
    axes: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Name:
    name: str
    size: int


def _renamed(x: Any, before: str, after: str) -> _Renamed:
    names = [after if axis.name == before else axis.name for axis in x.axes]
    return _Renamed(x.array, tuple(map(_Name, names, x.array.shape)))


def _in_blocks(rule: Rule, axes: _Axes, size: int | None) -> BlockMask | Rule:
    if size is None:
        return rule
    batch, heads = (
        math.prod(axes.sizes[name] for name in names) for names in (axes.batch, axes.heads)
    )
    shape = (axes.sizes[axes.q], axes.sizes[axes.k])
    block = size_of("flash_block_size", size, 1)
    return BlockMask.from_rule(rule, shape, batch=batch, heads=heads, block=block)


def _implementation(use_flash: bool | None, attn_backend: Any) -> str | None:
    name = getattr(attn_backend, "value", attn_backend) or "default"
    if name not in BACKENDS:
        raise ValueError(
            f"attn_backend {name!r} is one of Levanter's own; leave it out, or name one of "
            f"{list(BACKENDS)}"
        )
    return "reference" if use_flash is False else BACKENDS[name]
