"""How a layer with sparse attention attends: functions that `Transformer.run` calls in a layer.

    attend(layer, q, k, v, state, inputs) -> (out, state)

    by_blocks        a whole text attends to itself        state: passed through
    with_index_loss  the same                              state: + the loss of the layer's indexer
    by_prompt        the same                              state: SparseCache, filled
    by_sparse_cache  one new token attends to the cache    state: SparseCache, one token longer

`inputs` are the layer's SparseInputs. The last two need the layer's number as an int: their model
runs with scan=False.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import Array

from xsake import nsa
from xsake.model.config import Config
from xsake.model.sparse.cache import SparseCache
from xsake.model.sparse.module import SparseInputs


def by_blocks(config: Config, segment_ids: Any = None, implementation: str | None = None) -> Any:
    """Attention of whole texts by the config's settings; documents do not see each other."""
    how = dataclasses.asdict(config.settings)

    def attend(
        layer: Any, q: Array, k: Array, v: Array, state: Any, inputs: SparseInputs
    ) -> tuple[Array, Any]:
        out = nsa.native_sparse_attention(
            q,
            k,
            v,
            **how,
            **_branches(config, inputs),
            **_index(inputs),
            segment_ids=segment_ids,
            implementation=implementation,
        )
        return out, state

    return attend


def with_index_loss(
    config: Config, segment_ids: Any = None, implementation: str | None = None
) -> Any:
    """As `by_blocks`, for msa: the state is a sum, to which each layer adds its indexer's loss."""
    how = dataclasses.asdict(config.settings)
    block = config.settings.block_size
    shared: dict[str, Any] = {"segment_ids": segment_ids, "implementation": implementation}

    def attend(
        layer: Any, q: Array, k: Array, v: Array, state: Any, inputs: SparseInputs
    ) -> tuple[Array, Any]:
        assert inputs.indexer is not None
        blocks = chosen_blocks(config, q, k, inputs, **shared)
        out = nsa.native_sparse_attention(
            q, k, v, block_indices=blocks, **how, **_branches(config, inputs), **shared
        )
        loss = nsa.indexer_loss(q, k, *inputs.indexer, blocks, block_size=block, **shared)
        return out, state + loss

    return attend


def by_prompt(config: Config, count: Array, implementation: str | None = None) -> Any:
    """As `by_blocks`, for prompts of count[b] tokens, padded on the right; fills a SparseCache."""
    whole = by_blocks(config, implementation=implementation)

    def attend(
        layer: Any, q: Array, k: Array, v: Array, state: SparseCache, inputs: SparseInputs
    ) -> tuple[Array, SparseCache]:
        out, _ = whole(layer, q, k, v, None, inputs)
        index_key = None if inputs.indexer is None else inputs.indexer[1][:, : state.capacity]
        filled = nsa.prefill(
            state.layers[layer],
            # what lies behind the capacity is padding
            k[:, : state.capacity],
            v[:, : state.capacity],
            lengths=count,
            compression=inputs.compression,
            index_key=index_key,
        )
        return out, state.with_layer(layer, filled)

    return attend


def by_sparse_cache(config: Config) -> Any:
    """Attention of one new token of every sequence, which joins the cache."""

    def attend(
        layer: Any, q: Array, k: Array, v: Array, state: SparseCache, inputs: SparseInputs
    ) -> tuple[Array, SparseCache]:
        own = state.layers[layer]
        out, longer = nsa.decode_step(q, k, v, own, **_branches(config, inputs), **_index(inputs))
        return out, state.with_layer(layer, longer)

    return attend


def chosen_blocks(
    config: Config,
    q: Array,
    k: Array,
    inputs: SparseInputs,
    segment_ids: Any = None,
    implementation: str | None = None,
) -> Array:
    """The blocks that a layer's queries select, int32 [B, T, K, c]; see `nsa.select_blocks`."""
    how = dataclasses.asdict(config.settings)
    del how["window_size"]
    how |= {"compression": inputs.compression, "segment_ids": segment_ids}
    return nsa.select_blocks(q, k, **how, **_index(inputs), implementation=implementation)


def _branches(config: Config, inputs: SparseInputs) -> dict[str, Any]:
    """The gates by name, and how blocks are pooled."""
    found: dict[str, Any] = {
        "compressed": "g_cmp" in config.branches,
        "compression": inputs.compression,
    }
    if inputs.gates is not None:
        found |= {name: inputs.gates[:, :, i] for i, name in enumerate(config.branches)}
    return found


def _index(inputs: SparseInputs) -> dict[str, Any]:
    if inputs.indexer is None:
        return {}
    return {"index_query": inputs.indexer[0], "index_key": inputs.indexer[1]}
