"""MaskInfo: which keys a query sees; of XSAKE, or an object with its attributes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake.arguments import as_array, per_token
from xsake.backends import Sizes
from xsake.integrations.mask_values import visible
from xsake.masks.rule import Leaf

__all__ = ["MaskInfo", "last_seen", "mask_arrays"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MaskInfo:
    """Which keys a query sees: equal segment ids, and an attention mask; both apply.

    Attributes:
      attention_mask: bool or integers, [B, N|1, T, S]; 0 hides the key.
      q_segment_ids: int [B, T]; negative = padding.
      kv_segment_ids: int [B, S].
      q_positions: int [B, T], what causal and sliding_window compare; default arange.
      kv_positions: int [B, S].
    """

    attention_mask: Leaf = None
    q_segment_ids: Leaf = None
    kv_segment_ids: Leaf = None
    q_positions: Leaf = None
    kv_positions: Leaf = None

    @classmethod
    def from_segments(
        cls,
        q_segment_ids: Any,
        kv_segment_ids: Any = None,
        q_positions: Any = None,
        kv_positions: Any = None,
    ) -> MaskInfo:
        """Of segment ids; those of keys default to those of queries."""
        kv = q_segment_ids if kv_segment_ids is None else kv_segment_ids
        return cls(None, q_segment_ids, kv, q_positions, kv_positions)

    @classmethod
    def from_attention_mask(
        cls, attention_mask: Any, q_positions: Any = None, kv_positions: Any = None
    ) -> MaskInfo:
        """Of a mask [B, N|1, T, S] or [B, T, S], or of a padding mask [B, T], 0 = padding."""
        mask = as_array("attention_mask", attention_mask)
        if mask.ndim == 2:
            shown = visible("attention_mask", attention_mask)
            return cls.from_segments(jnp.where(shown, 0, -1), None, q_positions, kv_positions)
        return cls(mask, None, None, q_positions, kv_positions)


MASK_FIELDS = tuple(field.name for field in dataclasses.fields(MaskInfo))


def mask_arrays(info: Any, sizes: Sizes) -> dict[str, Array]:
    """The arrays of a MaskInfo by name, 4-D masks and 2-D ids, that fit the call.

    ejkernel's MaskInfo derives what it was not given, and loses most masks on the way: what it was
    given has an underscore before its name.
    """
    if info is None:
        return {}
    if not any(hasattr(type(info), name) or hasattr(info, name) for name in MASK_FIELDS):
        raise TypeError(f"mask_info must be a MaskInfo, got {type(info).__name__}")
    found: dict[str, Any] = {}
    for name in MASK_FIELDS:
        stored = f"_{name}" if hasattr(info, f"_{name}") else name
        x = getattr(info, stored, None)
        if x is None:
            continue
        said = f"mask_info.{name}"
        if name == "attention_mask":
            found[name] = _token_mask(said, x, sizes)
        else:
            length = sizes.T if name.startswith("q_") else sizes.S
            found[name] = per_token(said, x, sizes.B, length)
    return found


def _token_mask(name: str, x: Any, sizes: Sizes) -> Array:
    """[B|1, N|1, T|1, S|1] of a mask with three or four axes."""
    mask = as_array(name, x)
    wide = mask[:, None] if mask.ndim == 3 else mask
    full = (sizes.B, sizes.N, sizes.T, sizes.S)
    if wide.ndim != 4 or any(d not in (1, f) for d, f in zip(wide.shape, full, strict=True)):
        raise ValueError(
            f"{name} must be [B, N|1, T, S] or [B, T, S] with [B, N, T, S] = {list(full)}, "
            f"got shape {list(mask.shape)}"
        )
    # read here: on a mesh the mask is traced, and an additive one would not be noticed
    return visible(name, wide) if jnp.issubdtype(wide.dtype, jnp.integer) else wide


def last_seen(arrays: dict[str, Array], B: int, S: int) -> Array:
    """int [B, 1]: the position of the last key that the mask and the segments show the query."""
    seen = jnp.ones((B, S), bool)
    if (mask := arrays.get("attention_mask")) is not None:
        seen = seen & (mask[:, :, 0] != 0).any(1)
    if (kv_ids := arrays.get("kv_segment_ids")) is not None:
        q_ids = arrays.get("q_segment_ids", kv_ids)
        seen = seen & (kv_ids == q_ids) & (kv_ids >= 0)
    at = arrays.get("kv_positions", jnp.arange(S, dtype=jnp.int32)[None])
    lowest = jnp.iinfo(at.dtype).min
    return jnp.where(seen, at, lowest).max(-1, keepdims=True)
