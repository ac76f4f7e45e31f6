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
from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from xsake import nsa
from xsake.model.config import Config
from xsake.model.on_mesh import TOKENS, ids_spec, split_attention
from xsake.model.sparse.cache import SparseCache
from xsake.model.sparse.module import SparseInputs
from xsake.parallel import sharding


def by_blocks(
    config: Config,
    segment_ids: Any = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """Attention of whole texts by the config's settings; documents do not see each other."""
    how = dataclasses.asdict(config.settings) | {"axis": _axis(mesh)}

    def attention(q: Array, k: Array, v: Array, inputs: SparseInputs, ids: Any) -> Array:
        return nsa.native_sparse_attention(
            q,
            k,
            v,
            **how,
            **_branches(config, inputs),
            **_index(inputs),
            segment_ids=ids,
            implementation=implementation,
        )

    def attend(
        layer: Any, q: Array, k: Array, v: Array, state: Any, inputs: SparseInputs
    ) -> tuple[Array, Any]:
        if mesh is None:
            return attention(q, k, v, inputs, segment_ids), state
        return _split(attention, mesh, q, k, v, inputs, segment_ids), state

    return attend


def with_index_loss(
    config: Config,
    segment_ids: Any = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """As `by_blocks`, for msa: the state is a sum, to which each layer adds its indexer's loss."""
    how = dataclasses.asdict(config.settings)
    block = config.settings.block_size

    def attention(
        q: Array, k: Array, v: Array, inputs: SparseInputs, ids: Any
    ) -> tuple[Array, Array]:
        assert inputs.indexer is not None
        shared: dict[str, Any] = {
            "segment_ids": ids,
            "axis": _axis(mesh),
            "implementation": implementation,
        }
        blocks = chosen_blocks(config, q, k, inputs, **shared)
        out = nsa.native_sparse_attention(
            q, k, v, block_indices=blocks, **how, **_branches(config, inputs), **shared
        )
        return out, nsa.indexer_loss(q, k, *inputs.indexer, blocks, block_size=block, **shared)

    def on_device(*given: Any) -> tuple[Array, Array]:
        assert mesh is not None
        out, loss = attention(*given)
        # groups of devices have equal shares of the queries, over whose losses this is the mean
        return out, lax.pmean(loss, mesh.axis_names)

    def attend(
        layer: Any, q: Array, k: Array, v: Array, state: Any, inputs: SparseInputs
    ) -> tuple[Array, Any]:
        if mesh is None:
            out, loss = attention(q, k, v, inputs, segment_ids)
        else:
            specs = (sharding.spec(TOKENS, q.shape), P())
            out, loss = _split(on_device, mesh, q, k, v, inputs, segment_ids, specs)
        return out, state + loss

    return attend


def _axis(mesh: Mesh | None) -> str | None:
    """The mesh axis over which sequences are split, if they are."""
    return "context" if mesh is not None and mesh.shape["context"] > 1 else None


def _split(
    attention: Callable[..., Any],
    mesh: Mesh,
    q: Array,
    k: Array,
    v: Array,
    inputs: SparseInputs,
    segment_ids: Any,
    out_specs: Any = None,
) -> Any:
    """attention(q, k, v, inputs, segment_ids) with the arrays of each device."""
    is_mean = isinstance(inputs.compression, str)
    # "mean" is no array
    arrays: Any = inputs._replace(compression=()) if is_mean else inputs  # type: ignore[arg-type]

    def run(q: Array, k: Array, v: Array, rest: Any) -> Any:
        inputs, ids = rest
        inputs = inputs._replace(compression="mean") if is_mean else inputs
        return attention(q, k, v, inputs, ids)

    specs = (_specs(arrays, k.shape[2]), ids_spec(segment_ids))
    return split_attention(run, mesh, q, k, v, (arrays, segment_ids), specs, out_specs)


def _specs(inputs: SparseInputs, kv_heads: int) -> SparseInputs:
    """A PartitionSpec for every array of SparseInputs."""
    gates: Any = None
    if inputs.gates is not None:
        gates = sharding.spec(("batch", "sequence", "branches", "heads"), inputs.gates.shape)
    indexer: Any = None
    if inputs.indexer is not None:
        q, k = inputs.indexer
        keys = sharding.spec(("batch", "sequence", "kv_heads", "index_size"), q.shape)
        shared = sharding.spec(("batch", "sequence", "index_heads", "index_size"), k.shape)
        indexer = keys, (keys if k.shape[2] == kv_heads else shared)

    def pooling(x: Any) -> Any:
        """Weights [block, K] and positions [block, K, H] have kv heads; a network has none."""
        if len(jax.tree.leaves(x)) != 2:
            return jax.tree.map(lambda _: P(), x)
        return jax.tree.map(lambda leaf: sharding.spec(("block", "kv_heads")[: leaf.ndim]), x)

    compression: Any = inputs.compression
    if isinstance(compression, tuple):
        compression = tuple(map(pooling, compression))
    return SparseInputs(gates, compression, indexer)


def by_prompt(
    config: Config, count: Array, implementation: str | None = None, mesh: Mesh | None = None
) -> Any:
    """As `by_blocks`, for prompts of count[b] tokens, padded on the right; fills a SparseCache."""
    whole = by_blocks(config, implementation=implementation, mesh=mesh)

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
    axis: str | None = None,
) -> Array:
    """The blocks that a layer's queries select, int32 [B, T, K, c]; see `nsa.select_blocks`."""
    how = dataclasses.asdict(config.settings)
    del how["window_size"]
    how |= {"segment_ids": segment_ids, "axis": axis}
    if config.attention == "nsa":  # the others do not choose by pooled blocks
        how["compression"] = inputs.compression
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
