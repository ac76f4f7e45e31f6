"""Levanter's AttentionMask as a rule: causal with an offset, window, segments, explicit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from xsake import masks
from xsake.integrations.levanter.axes import Axes, names_of
from xsake.integrations.mask_values import visible
from xsake.masks.integers import integers, size_of
from xsake.masks.rule import Rule

__all__ = ["axes_of_rows", "rule_of"]


def axes_of_rows(mask: Any) -> set[str]:
    """Names of the axes of segment ids and offsets, for which batch rows may differ."""
    arrays = [getattr(mask, "causal_offset", None), *segments(mask)]
    return {axis.name for x in arrays if hasattr(x, "axes") for axis in x.axes}


def segments(mask: Any) -> tuple[Any, ...]:
    """(ids of queries, ids of keys) of a mask, or ()."""
    ids = getattr(mask, "segment_ids", None)
    if ids is None:
        return ()
    pair = tuple(ids) if isinstance(ids, (tuple, list)) else (ids, ids)
    if len(pair) != 2:
        raise ValueError(
            f"segment_ids must be one named array, or two, of queries and of keys, got {len(pair)}"
        )
    return pair


def rule_of(mask: Any, axes: Axes) -> Rule:
    """What an AttentionMask, a named array of bools, or a rule allows."""
    if mask is None:
        return masks.everything()
    if isinstance(mask, Rule):
        return mask
    if hasattr(mask, "array"):
        return masks.array(visible("mask", axes.of_pairs("mask", mask)))
    if not hasattr(mask, "is_causal"):
        raise TypeError(
            "mask must be an AttentionMask, a named array or a rule of xsake.masks, got "
            f"{type(mask).__name__}"
        )
    _check_fields(mask)
    offset, window, radius, explicit = (  # an earlier Levanter has not all of them
        getattr(mask, name, None)
        for name in ("causal_offset", "sliding_window", "bidirectional_window", "explicit_mask")
    )
    rule = _causal(offset, axes) if mask.is_causal else masks.everything()
    if radius is not None:
        radius = size_of("bidirectional_window", radius, 0)
        rule = rule & masks.sliding_window(radius, radius)
    if window is not None:  # the query itself counts, and later keys are hidden
        rule = rule & masks.sliding_window(size_of("sliding_window", window, 1) - 1, 0)
    if explicit is not None:
        shown = visible("explicit_mask", axes.of_pairs("explicit_mask", explicit))
        rule = rule & masks.array(shown)
    if ids := segments(mask):
        q_ids, kv_ids = (
            _ids(x, axes, position) for x, position in zip(ids, (axes.q, axes.k), strict=True)
        )
        rule = rule & masks.documents(q_ids, kv_ids)
    return rule


FIELDS = frozenset(
    "is_causal causal_offset sliding_window bidirectional_window explicit_mask segment_ids".split()
)


def _check_fields(mask: Any) -> None:
    """Raises for what a later Levanter may limit attention by, which would be dropped here."""
    if not dataclasses.is_dataclass(mask):
        return
    for field in dataclasses.fields(mask):
        value = getattr(mask, field.name)
        if field.name not in FIELDS and value is not None and value is not False:
            raise NotImplementedError(
                f"the mask has {field.name} = {value!r}, which is not known here; express it as a "
                "rule of xsake.masks or as explicit_mask"
            )


def _causal(offset: Any, axes: Axes) -> Rule:
    """k <= q + offset."""
    if offset is None:
        return masks.causal()
    shift = axes.broadcast("causal_offset", offset, axes.batch) if hasattr(offset, "axes") else None
    shift = integers("causal_offset", offset if shift is None else shift).reshape(-1, 1)
    positions = jnp.arange(axes.sizes[axes.q], dtype=jnp.int32)[None]
    return masks.at_positions(masks.causal(), positions + shift)


def _ids(ids: Any, axes: Axes, position: str) -> Array:
    """Segment ids int [B|1, T or S]; those of keys may have the queries' axis."""
    if position not in names_of("segment_ids", ids):
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
