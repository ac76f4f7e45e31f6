"""What a layer's attention may be: every choice is a function of one form, and the model has one.

    attend(layer, q, k, v, state) -> (out, state)

layer is the layer's number (traced when layers are scanned), q [B, T, N, H], k and v [B, T, K, H],
all normed and rotated; out is [B, T, N, H]. `state` is any pytree, handed from layer to layer: None
here, the cache in `generate`, what was seen so far in `Transformer.observe`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake import masks
from xsake.attention import dot_product_attention
from xsake.block_mask import BlockMask
from xsake.masks.rule import Rule
from xsake.model.config import Config

Attend = Callable[[Any, Array, Array, Array, Any], tuple[Array, Any]]


def by_mask(
    config: Config,
    mask: Any,
    batch: int,
    length: int,
    segment_ids: Any = None,
    implementation: str | None = None,
) -> Attend:
    """Attention of a whole row to itself: causal, in the layer's window, and as `mask` says.

    Args:
      config: whose heads and windows.
      mask: None; a Rule; a BlockMask, for all layers or, with a leading layers axis on every array,
        one for each; or a callable (layer, q, k) -> BlockMask. Each is narrowed to what causality,
        the window and the documents allow.
      batch: B.
      length: T.
      segment_ids: int [B, T]; only equal ids see each other.
      implementation: of `dot_product_attention`.
    """
    limits = masks.everything() if segment_ids is None else masks.documents(segment_ids)
    if mask is None or isinstance(mask, Rule):
        rule = limits if mask is None else mask & limits
        # made here, outside the loop over layers: they are the same for all of them
        ready = {
            windowed: BlockMask.from_rule(
                sight(config, windowed) & rule, (length, length), batch=batch, heads=config.heads
            )
            for windowed in {config.windowed(layer) for layer in range(config.layers)}
        }

        def block_mask(layer: Any, windowed: bool, q: Array, k: Array) -> BlockMask:
            return ready[windowed]

    else:
        made = _maker(config, mask)

        def block_mask(layer: Any, windowed: bool, q: Array, k: Array) -> BlockMask:
            return narrowed(made(layer, q, k), config, windowed, limits)

    def attend(layer: Any, q: Array, k: Array, v: Array, state: Any) -> tuple[Array, Any]:
        def see(windowed: bool, q: Array, k: Array, v: Array) -> Array:
            chosen = block_mask(layer, windowed, q, k)
            return dot_product_attention(q, k, v, mask=chosen, implementation=implementation)

        return by_window(config, layer, see, q, k, v), state

    return attend


def by_window(config: Config, layer: Any, see: Callable[..., Any], *operands: Any) -> Any:
    """see(windowed, *operands), where this layer's place among the windowed ones decides."""
    windowed = np.array([config.windowed(i) for i in range(config.layers)])
    if windowed.all() or not windowed.any():
        return see(bool(windowed[0]), *operands)
    if not isinstance(layer, jax.core.Tracer):
        return see(bool(windowed[int(layer)]), *operands)
    return lax.cond(
        jnp.asarray(windowed)[layer],
        lambda *given: see(True, *given),
        lambda *given: see(False, *given),
        *operands,
    )


def sight(config: Config, windowed: bool) -> Rule:
    """What a decoder's query may see: keys up to its own, or the last `window` of them."""
    if not windowed:
        return masks.causal()
    assert config.window is not None
    return masks.sliding_window(config.window - 1, 0)


def narrowed(mask: BlockMask, config: Config, windowed: bool, limits: Rule) -> BlockMask:
    """The mask without what causality, the window and `limits` forbid."""
    is_causal = mask.rule is not None and mask.rule.is_causal
    if windowed or not is_causal:
        limits = sight(config, windowed) & limits
    return mask if limits == masks.everything() else mask & limits


def _maker(config: Config, mask: Any) -> Callable[[Any, Array, Array], BlockMask]:
    """(layer, q, k) -> BlockMask for a mask that is one, a stack of them, or makes them."""
    if not isinstance(mask, BlockMask):
        if not callable(mask):
            raise TypeError(
                "mask must be a BlockMask, a rule of xsake.masks or a callable (layer, q, k) -> "
                f"BlockMask, got {type(mask).__name__}; masks.array(mask) lifts a bool array"
            )
        return lambda layer, q, k: _checked(mask(layer, q, k))
    if mask.kv_count.ndim == 3:
        return lambda layer, q, k: mask
    if mask.kv_count.ndim != 4 or mask.kv_count.shape[0] != config.layers:
        raise ValueError(
            f"a stacked mask needs a leading axis of layers = {config.layers} on every array, "
            f"but its kv_count is {list(mask.kv_count.shape)}"
        )
    return lambda layer, q, k: jax.tree.map(lambda x: x[layer], mask)


def _checked(mask: Any) -> BlockMask:
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask(layer, q, k) must return a BlockMask, got {type(mask).__name__}")
    return mask
