"""SparseAttention: the parameters of a layer's sparse attention beside its q, k and v.

    h [B, T, width] ─┬─ gates ─ sigmoid ──────────── [B, T, branches, N]     more than one branch
                     └─ index_query, index_key ─ rope ─ [B, T, K|1, Hi]      msa
    pool_key, pool_value                                                     learned compression

The indexer reads h as a constant: it learns from its own loss, and the model from the model's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from xsake import nsa
from xsake.model import rope
from xsake.model.config import Config
from xsake.model.modules import Axes, Linear, constant
from xsake.nsa.compress import Compression, Pooling


class SparseInputs(NamedTuple):
    """What a layer's attention takes beside q, k and v."""

    gates: Float[Array, "B T branches N"] | None  # in the order of the config's branches
    compression: Compression
    indexer: tuple[Array, Array] | None  # the indexer's queries [B, T, K, Hi], keys [B, T, K|1, Hi]


class SparseAttention(nnx.Module):
    """Gates, learned pooling and the indexer of one layer, or with `stack` of all layers."""

    def __init__(self, config: Config, rngs: nnx.Rngs, stack: Axes) -> None:
        embed, options, branches = {"embed": config.width}, config.sparse, config.branches
        gates = {"branches": len(branches), "heads": config.heads}
        self.gates = Linear(rngs, embed, gates, stack=stack) if len(branches) > 1 else None
        self.pool_key = _pooling(config, rngs, stack)
        self.pool_value = _pooling(config, rngs, stack)
        size, has_index = {"index_size": config.index_size}, config.attention == "msa"
        queries, keys = {"kv_heads": config.kv_heads} | size, {"index_heads": options.index_heads}
        self.index_query = Linear(rngs, embed, queries, stack=stack) if has_index else None
        self.index_key = Linear(rngs, embed, keys | size, stack=stack) if has_index else None

    def __call__(self, h: Float[Array, "B T width"], angles: Any) -> SparseInputs:
        """The inputs of a layer with normed hidden states h; `angles` by head size, for RoPE."""
        gates = None if self.gates is None else jax.nn.sigmoid(self.gates(h))
        compression: Compression = "mean"
        if self.pool_key is not None and self.pool_value is not None:
            compression = (self.pool_key.function(), self.pool_value.function())
        index = None
        if self.index_query is not None and self.index_key is not None:
            fixed = lax.stop_gradient(h)
            q, k = self.index_query(fixed), self.index_key(fixed)
            if angles is not None:
                q, k = (rope.rotate(x, *angles[x.shape[-1]]) for x in (q, k))
            index = q, k
        return SparseInputs(gates, compression, index)


def _pooling(config: Config, rngs: nnx.Rngs, stack: Axes) -> WeightedPooling | MlpPooling | None:
    """The module of the config's compression; None for the mean, which has no parameters."""
    if config.sparse.compression == "weights":
        return WeightedPooling(config, stack)
    return MlpPooling(config, rngs, stack) if config.sparse.compression == "mlp" else None


class WeightedPooling(nnx.Module):
    """A weight and a position embedding for every token of a block and kv head; at first a mean."""

    def __init__(self, config: Config, stack: Axes) -> None:
        block = config.sparse.compression_block
        axes = stack | {"block": block, "kv_heads": config.kv_heads}
        self.weights = constant(axes, 1 / block)
        self.positions = constant(axes | {"head_size": config.head_size}, 0.0)

    def function(self) -> Pooling:
        """How `xsake.nsa` pools a block: a pytree of its parameters."""
        return jax.tree_util.Partial(_pool_weighted, self.weights[...], self.positions[...])


class MlpPooling(nnx.Module):
    """A network with one hidden layer from a block's tokens to its vector, for all kv heads."""

    def __init__(self, config: Config, rngs: nnx.Rngs, stack: Axes) -> None:
        block, size = config.sparse.compression_block, {"head_size": config.head_size}
        width = config.sparse.compression_width or config.head_size
        tokens, hidden = {"block": block} | size, {"pool_width": width}
        self.positions = constant(stack | tokens, 0.0)
        by_input = 1 / math.sqrt(block * config.head_size)
        self.hidden = Linear(rngs, tokens, hidden, bias=True, deviation=by_input, stack=stack)
        by_hidden = 1 / math.sqrt(width)
        self.out = Linear(rngs, hidden, size, bias=True, deviation=by_hidden, stack=stack)

    def function(self) -> Pooling:
        """How `xsake.nsa` pools a block: a pytree of its parameters."""
        assert self.hidden.bias is not None
        assert self.out.bias is not None
        return jax.tree_util.Partial(
            _pool_mlp,
            self.hidden.kernel[...],
            self.out.kernel[...],
            self.hidden.bias[...],
            self.out.bias[...],
            self.positions[...],
        )


def _pool_weighted(weights: Array, positions: Array, blocks: Array) -> Array:
    return nsa.weighted_pooling(weights, positions)(blocks)


def _pool_mlp(
    w_in: Array, w_out: Array, b_in: Array, b_out: Array, positions: Array, blocks: Array
) -> Array:
    return nsa.mlp_pooling(w_in, w_out, b_in, b_out, positions)(blocks)
