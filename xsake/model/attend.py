"""Attention variants: each is a function of this form, which `Transformer.run` calls in a layer.

    attend(layer, q, k, v, state) -> (out, state)

    by_mask    a whole text attends to itself                  state: passed through
    by_chunk   a chunk of a prompt attends to all cached keys  state: the KVCache
    by_cache   new tokens attend to the cache                  state: (KVCache, the selected blocks)

layer is the layer's number (traced when layers are scanned), q [B, T, N, H], k and v [B, T, K, H],
all normed and rotated; out is [B, T, N, H]. In a model with sinks, the layer's [N] follow. `state`
is any pytree, handed from layer to layer.
`sparse/attend.py` has those of sparse attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jaxtyping import Int

from xsake import block_scores, masks
from xsake.attention import dot_product_attention
from xsake.block_mask import BlockMask
from xsake.block_mask.input_mask import InputMask, MaskFunction, as_input_mask
from xsake.decode import CacheReader, Chosen
from xsake.hads import Plan
from xsake.hads.chunks import Softmax
from xsake.masks.rule import Rule
from xsake.model.config import LARGEST, Config
from xsake.model.kv_cache import KVCache
from xsake.model.on_mesh import split_attention
from xsake.parallel import context_attention, context_mask, sharding

Order = Literal["contiguous", "zigzag", "balanced"]
# (layer, q, k, v, state), and the layer's SparseInputs or sinks in a model that has them
Attend = Callable[..., tuple[Array, Any]]

if TYPE_CHECKING:
    ModelMask = Rule | BlockMask | InputMask | MaskFunction | None
else:
    ModelMask = Any  # at run time `as_input_mask` raises for other types


def by_mask(
    config: Config,
    mask: ModelMask,
    batch: int,
    length: int,
    segment_ids: Any = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
    order: Order = "contiguous",
    count: Int[Array, " B"] | None = None,
) -> Attend:
    """Self-attention of whole texts, restricted by causality, the layer's window and `mask`.

    Args:
      config: of the model; its heads and windows are used.
      mask: None; a Rule; a BlockMask, for all layers or, with a leading layers axis on every array,
        one for each; an InputMask, such as a Plan; or a function (layer, q, k) -> BlockMask.
      batch: B.
      length: T.
      segment_ids: int [B, T]; only tokens with equal ids attend to each other.
      implementation: of `dot_product_attention`.
      mesh: batch rows, heads and sequences are split over it.
      order: of tokens that mesh.context splits, as in `Transformer`.
      count: how many of a text's tokens are its own; the others are padding, whose queries do not
        take part in an InputMask's selection. Not for texts that mesh.context splits.
    """
    if mesh is not None and mesh.shape["context"] > 1:
        return by_context(config, mask, segment_ids, implementation, mesh, order)
    ready = None
    if mask is None or isinstance(mask, Rule | BlockMask):
        ready = _block_masks(config, mask, batch, length, segment_ids)
    else:
        mask = as_input_mask(mask)
        mask.check(config.layers, config.heads)

    def attention(
        windowed: bool, q: Array, k: Array, v: Array, rest: Any, sinks: Array | None = None
    ) -> Array:
        if ready is not None:
            found = rest
        else:  # from the heads and batch rows of one device
            layer, by_input, ids, real = rest
            queries = _without_padding(q, real, by_input)
            found = narrowed(by_input.mask(layer, queries, k, segment_ids=ids), config, windowed)
        return dot_product_attention(
            q,
            k,
            v,
            mask=found,
            logits_soft_cap=config.soft_cap,
            sinks=sinks,
            implementation=implementation,
        )

    def attend(
        layer: Any, q: Array, k: Array, v: Array, state: Any, sinks: Array | None = None
    ) -> tuple[Array, Any]:
        def of_window(windowed: bool, q: Array, k: Array, v: Array) -> Array:
            rest = (layer, mask, segment_ids, count) if ready is None else ready(layer, windowed)
            run = functools.partial(attention, windowed)
            if mesh is None:
                return run(q, k, v, rest, sinks)
            return split_attention(run, mesh, q, k, v, rest, sinks=sinks)

        return by_window(config, layer, of_window, q, k, v), state

    return attend


def _without_padding(q: Array, count: Array | None, mask: InputMask) -> Array:
    """The queries that a mask selects by: of q's T tokens, count[b] are a sequence's own."""
    if count is None:
        return q
    fill = functools.partial(block_scores.filled, block=mask.row_block)
    return jax.vmap(fill)(q, count)


def by_context(
    config: Config,
    mask: ModelMask,
    segment_ids: Any,
    implementation: str | None,
    mesh: Mesh,
    order: Order = "contiguous",
) -> Attend:
    """As `by_mask`, for sequences that are split over the mesh's context axis.

    Rules and documents are applied by `context_attention`, which sends no more keys than they need.
    """
    if not (mask is None or isinstance(mask, Rule | BlockMask)):
        mask = as_input_mask(mask)
        mask.check(config.layers, config.heads)
        if order == "zigzag":
            raise ValueError(
                f"order 'zigzag' lays tokens out for causal attention, but mask is a "
                f"{type(mask).__name__}, which selects blocks of consecutive tokens; use "
                "order='balanced'"
            )
    is_stacked = isinstance(mask, BlockMask) and _is_stacked(config, mask)

    def attention(
        windowed: bool, q: Array, k: Array, v: Array, rest: Any, sinks: Array | None = None
    ) -> Array:
        layer, own, ids = rest
        limits = visible(config, windowed)
        how: dict[str, Any] = {
            "implementation": implementation,
            "logits_soft_cap": config.soft_cap,
            "sinks": sinks,
            "layout": "zigzag" if order == "zigzag" else "contiguous",
            "balance": order == "balanced",
        }
        if isinstance(own, InputMask):
            found = _selected(own, config, windowed, layer, q, k, ids)
            return context_attention(q, k, v, found, **how)
        given = limits if own is None else own & limits
        return context_attention(q, k, v, given, q_segment_ids=ids, **how)

    def attend(
        layer: Any, q: Array, k: Array, v: Array, state: Any, sinks: Array | None = None
    ) -> tuple[Array, Any]:
        own = jax.tree.map(lambda x: x[layer], mask) if is_stacked else mask

        def of_window(windowed: bool, q: Array, k: Array, v: Array) -> Array:
            run = functools.partial(attention, windowed)
            rest = (layer, own, segment_ids)
            return split_attention(run, mesh, q, k, v, rest, sinks=sinks)

        return by_window(config, layer, of_window, q, k, v), state

    return attend


def _selected(
    mask: InputMask, config: Config, windowed: bool, layer: Any, q: Array, k: Array, ids: Any
) -> BlockMask:
    """What an InputMask selects for the queries of one device, of which others have the rest.

    `past_query` scores a row block with the queries of the one before, which another device may
    have: then all devices select for the whole sequence.
    """
    if isinstance(mask, Plan) and mask.terms.selector == "past_query":
        fixed = lax.stop_gradient((q, k) if ids is None else (q, k, ids))
        q, k, *rest = (lax.all_gather(x, "context", axis=1, tiled=True) for x in fixed)
        found = mask.mask(layer, q, k, segment_ids=rest[0] if rest else None)
        return narrowed(found, config, windowed)
    found = context_mask(mask, layer, q, k, segment_ids=ids)
    if windowed:
        T = q.shape[1]
        rows = lax.axis_index("context") * T + jnp.arange(T)
        found = found & masks.at_positions(visible(config, windowed), rows[None])
    return found


def _block_masks(
    config: Config, mask: Rule | BlockMask | None, batch: int, length: int, segment_ids: Any
) -> Callable[[Any, bool], BlockMask]:
    """(layer, windowed) -> BlockMask, where it does not depend on q and k."""
    documents = masks.everything() if segment_ids is None else masks.documents(segment_ids)
    if mask is None or isinstance(mask, Rule):
        rule = documents if mask is None else mask & documents
        # built here, outside the loop over layers, which share them
        ready = {
            windowed: BlockMask.from_rule(
                visible(config, windowed) & rule, (length, length), batch=batch, heads=config.heads
            )
            for windowed in {config.windowed(layer) for layer in range(config.layers)}
        }
        return lambda layer, windowed: ready[windowed]
    is_stacked = _is_stacked(config, mask)

    def given(layer: Any, windowed: bool) -> BlockMask:
        own = jax.tree.map(lambda x: x[layer], mask) if is_stacked else mask
        return narrowed(own, config, windowed, documents)

    return given


def by_chunk(
    config: Config,
    mask: Rule | InputMask | None,
    positions: Int[Array, "B T"],
    count: Int[Array, " B"],
    span: int,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> Attend:
    """Chunked prefill: a chunk of every prompt attends to all cached keys; the state is the cache.

    Args:
      config: of the model; its heads and windows are used.
      mask: an InputMask is called with `first` and returns a mask of shape (T, span).
      positions: int [B, T], consecutive and the same for every sequence.
      count: int [B], how many of the T tokens are a sequence's own; the others are padding.
      span: slots of the cache that are read.
      implementation: of `dot_product_attention`.
      mesh: batch rows and heads are split over it.
    """
    B, T = positions.shape
    if isinstance(mask, InputMask):
        mask.check(config.layers, config.heads)

    def block_mask(layer: Any, windowed: bool, q: Array, k: Array) -> BlockMask:
        rule = visible(config, windowed)
        if isinstance(mask, InputMask):
            seen = sharding.everywhere((_without_padding(q, count, mask), k), mesh)
            found = mask.mask(layer, *seen, first=positions[0, 0])
            return found & masks.at_positions(rule, positions[:1])
        rule = masks.at_positions(rule if mask is None else rule & mask, positions[:1])
        return BlockMask.from_rule(rule, (T, span), batch=B, heads=config.heads)

    def attend(
        layer: Any, q: Array, k: Array, v: Array, cache: Any, sinks: Array | None = None
    ) -> tuple[Array, Any]:
        cache = cache.append(layer, k, v, count)

        def attention(
            q: Array, k: Array, v: Array, mask: BlockMask, sinks: Array | None = None
        ) -> Array:
            return dot_product_attention(
                q,
                k,
                v,
                mask=mask,
                logits_soft_cap=config.soft_cap,
                sinks=sinks,
                implementation=implementation,
            )

        def of_window(windowed: bool, q: Array, k: Array, v: Array) -> Array:
            found = block_mask(layer, windowed, q, k)
            if mesh is None:
                return attention(q, k, v, found, sinks)
            return split_attention(attention, mesh, q, k, v, found, sinks=sinks)

        keys, values = (jnp.swapaxes(x[layer, :, :, :span], 1, 2) for x in (cache.k, cache.v))
        return by_window(config, layer, of_window, q, keys, values), cache

    return attend


def by_cache(
    config: Config,
    reader: CacheReader,
    positions: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    reselect: bool = True,
) -> Attend:
    """Attention of new tokens to the cache, to which their keys and values are appended first.

    The state is (cache, the blocks that `reader` selected in every layer, or None).

    Args:
      config: of the model; its windows are used.
      reader: which part of the cache is read.
      positions: int [B, T] of the new tokens, all below reader.span.
      count: int [B], how many of the T tokens each sequence appends.
      reselect: select blocks by the attention of these tokens; else reuse those in the state.
    """

    def attend(
        layer: Any, q: Array, k: Array, v: Array, state: Any, sinks: Array | None = None
    ) -> tuple[Array, Any]:
        cache, chosen = state
        cache = cache.append(layer, k, v, count)

        def of_window(
            windowed: bool, q: Array, cache: KVCache, chosen: Chosen | None
        ) -> tuple[Array, Chosen | None]:
            return reader.read(
                q,
                cache.k,
                cache.v,
                positions,
                chosen,
                layer=layer,
                window=config.window if windowed else None,
                soft_cap=config.soft_cap,
                sinks=sinks,
                reselect=reselect,
            )

        out, chosen = by_window(config, layer, of_window, q, cache, chosen)
        return out, (cache, chosen)

    return attend


def by_window(config: Config, layer: Any, branch: Callable[..., Any], *operands: Any) -> Any:
    """branch(windowed, *operands), where `windowed` says whether this layer has the window."""
    windowed = np.array([config.windowed(i) for i in range(config.layers)])
    if windowed.all() or not windowed.any():
        return branch(bool(windowed[0]), *operands)
    if not isinstance(layer, jax.core.Tracer):
        return branch(bool(windowed[int(layer)]), *operands)
    return lax.cond(
        jnp.asarray(windowed)[layer],
        lambda *given: branch(True, *given),
        lambda *given: branch(False, *given),
        *operands,
    )


def visible(config: Config, windowed: bool) -> Rule:
    """What a decoder's query may see: keys up to its own, or the last `window` of them."""
    if not windowed:
        return masks.causal()
    assert config.window is not None
    return masks.sliding_window(config.window - 1, 0)


def softmax_of(config: Config, layer: Any, sinks: Array | None = None) -> Softmax:
    """The layer's soft cap, window and sinks, for HADS."""
    cap = None if config.soft_cap is None else jnp.float32(config.soft_cap)
    if config.window is None:
        return Softmax(cap, None, sinks)
    sizes = [config.window if config.windowed(i) else LARGEST for i in range(config.layers)]
    return Softmax(cap, jnp.asarray(sizes, jnp.int32)[layer], sinks)


def narrowed(
    mask: BlockMask, config: Config, windowed: bool, documents: Rule | None = None
) -> BlockMask:
    """The mask without what causality, the window and `documents` forbid."""
    limits = masks.everything() if documents is None else documents
    is_causal = mask.rule is not None and mask.rule.is_causal
    if windowed or not is_causal:
        limits = visible(config, windowed) & limits
    return mask if limits == masks.everything() else mask & limits


def _is_stacked(config: Config, mask: BlockMask) -> bool:
    """Whether a BlockMask holds one mask for each layer, on a leading axis of every array."""
    if mask.kv_count.ndim == 3:
        return False
    if mask.kv_count.ndim != 4 or mask.kv_count.shape[0] != config.layers:
        raise ValueError(
            f"a stacked mask needs a leading axis of layers = {config.layers} on every array, "
            f"but its kv_count is {list(mask.kv_count.shape)}"
        )
    return True
