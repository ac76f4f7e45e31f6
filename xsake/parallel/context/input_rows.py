"""context_mask: a mask that is computed from q and k, for the queries of one device."""

from __future__ import annotations

from typing import Any

from jax import Array, lax
from jaxtyping import Int

from xsake.arguments import Tensor, per_token
from xsake.block_mask import BlockMask
from xsake.block_mask.input_mask import InputMask, MaskFunction, as_input_mask
from xsake.parallel.context.local_mask import gathered


def context_mask(
    mask: InputMask | MaskFunction,
    layer: Any,
    q: Array,
    k: Array,
    *,
    axis: str = "context",
    segment_ids: Int[Tensor, ...] | None = None,
) -> BlockMask:
    """The BlockMask of this device's queries and all keys, for `context_attention`.

    Keys are gathered from all devices, because selection looks at them: half the bytes of gathering
    keys and values. The values stay where they are.

    Args:
      mask: a `Plan`, another InputMask that takes `first`, or such a function wrapped by
        `InputMask.of(function, chunked=True)`.
      layer: the layer's number; may be traced.
      q: [B, T, N, H] of this device; T is a multiple of the mask's block.
      k: [B, T, K, H] of this device.
      axis: the mesh axis; the layout is contiguous.
      segment_ids: int [B, T] of this device.
    """
    found = as_input_mask(mask, others="an InputMask")
    if not found.chunked:
        raise ValueError(
            "mask is a function of (layer, q, k), which needs all queries; if it accepts `first`, "
            "wrap it with InputMask.of(mask, chunked=True)"
        )
    q, k = lax.stop_gradient((q, k))
    keys = lax.all_gather(k, axis, axis=1, tiled=True)
    ids = per_token("segment_ids", segment_ids, q.shape[0], q.shape[1])
    ids = None if ids is None else gathered(ids, axis)
    first = lax.axis_index(axis) * q.shape[1]
    return found.mask(layer, q, keys, segment_ids=ids, first=first)
