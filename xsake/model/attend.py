"""What a layer's attention may be: every choice is a function of one form, and the model has one.

    attend(layer, q, k, v, state) -> (out, state)

layer is the layer's number (traced when layers are scanned), q [B, T, N, H], k and v [B, T, K, H],
all normed and rotated; out is [B, T, N, H]. `state` is any pytree, handed from layer to layer: None
here, the cache in `generate`, what was seen so far in `Transformer.observe`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake import decode, masks
from xsake.attention import dot_product_attention
from xsake.block_mask import BlockMask
from xsake.masks.rule import Rule
from xsake.model.config import Config
from xsake.model.kv_cache import KVCache

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


def by_chunk(
    config: Config,
    mask: Any,
    positions: Array,
    count: Array,
    span: int,
    implementation: str | None = None,
) -> Attend:
    """Attention of a part of a prompt to all of it so far, which is in the cache: the state.

    Args:
      config: whose heads and windows.
      mask: None, a Rule, or a callable (layer, q, k, first=…) -> BlockMask of shape (T, span).
      positions: int [B, T], a run of them, the same in every row.
      count: int [B], how many of the T tokens are a row's own; the others are padding.
      span: slots of the cache that are looked at.
      implementation: of `dot_product_attention`.
    """
    B, T = positions.shape

    def block_mask(layer: Any, windowed: bool, q: Array, k: Array) -> BlockMask:
        rule = sight(config, windowed)
        if is_made(mask):
            made = _checked(mask(layer, q, k, first=positions[0, 0]))
            return made & masks.at_positions(rule, positions[:1])
        rule = masks.at_positions(rule if mask is None else rule & mask, positions[:1])
        return BlockMask.from_rule(rule, (T, span), batch=B, heads=config.heads)

    def attend(layer: Any, q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
        cache = cache.append(layer, k, v, count)

        def see(windowed: bool, q: Array, k: Array, v: Array) -> Array:
            chosen = block_mask(layer, windowed, q, k)
            return dot_product_attention(q, k, v, mask=chosen, implementation=implementation)

        keys, values = (jnp.swapaxes(x[layer, :, :, :span], 1, 2) for x in (cache.k, cache.v))
        return by_window(config, layer, see, q, keys, values), cache

    return attend


class Reading(NamedTuple):
    """How new tokens read the cache when they do not read all of it."""

    budget: Array  # [layers, L] of each list: blocks, or shares of the blocks so far
    entries: int  # blocks of a row's lists together, at most
    reach: int = 1  # tokens that a choice is for

    def nothing(self, batch: int) -> decode.Chosen:
        """Lists of all layers, [layers, B, E] each, for a state that nothing was chosen in yet."""
        size = (len(self.budget), batch, self.entries)
        number = jnp.zeros(size, jnp.int32)
        return decode.Chosen(number, number, jnp.zeros(size, bool))


def by_cache(
    config: Config,
    positions: Array,
    count: Array,
    span: int,
    reading: Reading | None = None,
    *,
    anew: bool = True,
) -> Attend:
    """Attention of new tokens to the cache, which is appended to, then read.

    The state is the cache, or with `reading` (cache, lists of the blocks that are read).

    Args:
      config: whose heads and windows.
      positions: int [B, T] of the new tokens, all below span.
      count: int [B], how many of the T each row appends.
      span: slots of the cache that may be looked at.
      reading: None: all slots.
      anew: choose blocks by the attention of these tokens; else read what the state lists.
    """
    if reading is None:

        def attend(layer: Any, q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
            cache = cache.append(layer, k, v, count)

            def see(windowed: bool, q: Array, cache: KVCache) -> Array:
                window = config.window if windowed else None
                kv = cache.k, cache.v, positions
                return decode.dense(q, *kv, layer=layer, span=span, window=window)

            return by_window(config, layer, see, q, cache), cache

        return attend
    return _by_lists(config, positions, count, span, reading, anew)


def _by_lists(
    config: Config, positions: Array, count: Array, span: int, reading: Reading, anew: bool
) -> Attend:
    lists = reading.budget.shape[1]

    def attend(layer: Any, q: Array, k: Array, v: Array, state: Any) -> tuple[Array, Any]:
        cache, every = state
        cache = cache.append(layer, k, v, count)
        block = cache.block

        def choose(windowed: bool, q: Array, cache: KVCache) -> decode.Chosen:
            window = config.window if windowed else None
            mass = decode.block_mass(
                q,
                cache.k,
                positions,
                layer=layer,
                span=span,
                lists=lists,
                block=block,
                window=window,
            )
            return decode.choose(
                mass,
                positions,
                _counts(reading, layer, positions, block),
                block=block,
                entries=reading.entries,
                reach=reading.reach,
                window=window,
            )

        def see(windowed: bool, q: Array, cache: KVCache, chosen: decode.Chosen) -> Array:
            window = config.window if windowed else None
            kv = cache.k, cache.v, positions
            return decode.sparse(
                q, *kv, chosen, layer=layer, lists=lists, block=block, window=window
            )

        if anew:
            chosen = by_window(config, layer, choose, q, cache)
            every = jax.tree.map(lambda all_, new: all_.at[layer].set(new), every, chosen)
        else:
            chosen = jax.tree.map(lambda all_: all_[layer], every)
        return by_window(config, layer, see, q, cache, chosen), (cache, every)

    return attend


def _counts(reading: Reading, layer: Any, positions: Array, block: int) -> Array:
    """Blocks that each list may visit, int32 [B, L]."""
    wanted = reading.budget[layer][None]
    if jnp.issubdtype(wanted.dtype, jnp.floating):
        wanted = jnp.ceil(wanted * (positions.max(1)[:, None] // block + 1))
    return jnp.broadcast_to(wanted, (positions.shape[0], wanted.shape[1])).astype(jnp.int32)


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


def is_made(mask: Any) -> bool:
    """Whether a mask is made at run time, from q and k."""
    return mask is not None and not isinstance(mask, Rule | BlockMask)


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
