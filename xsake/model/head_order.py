"""A model whose heads are in another order: the same outputs, other heads on every device."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from xsake.model.transformer import Transformer
from xsake.parallel.balance import query_order


def with_head_order(model: Transformer, order: Any) -> Transformer:
    """A copy of the model with its heads permuted in every projection, once, at load time.

    Logits are the same up to the order of the sum over heads in the output projection. A plan of
    the model needs `plan.with_head_order(order)` beside it.

    Args:
      model: with stacked layers.
      order: int [layers, K] of kv heads, as `parallel.balance.balance_heads(…).order`: head
        order[l, i] becomes head i. Query heads move with their kv head.
    """
    config, order = model.config, np.asarray(order)
    shape = (config.layers, config.kv_heads)
    if order.shape != shape or (np.sort(order, 1) != np.arange(config.kv_heads)).any():
        raise ValueError(
            f"order must be a permutation of the kv heads of every layer, {list(shape)}, got shape "
            f"{list(order.shape)}"
        )
    if config.is_sparse or not model.is_stacked:
        raise ValueError(
            "with_head_order takes dense attention and stacked layers; permute before unstacked()"
        )
    by_axis = {"kv_heads": order, "heads": query_order(order, config.heads)}
    graph, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    moved = []
    for path, leaf in flat:
        axes = leaf.get_metadata().get("out_sharding", ())
        for name in set(axes) & set(by_axis):
            leaf = leaf.replace(_taken(leaf[...], by_axis[name], axes.index(name)))
        moved.append((path, leaf))
    return nnx.merge(graph, nnx.from_flat_state(moved))


def _taken(x: Any, order: np.ndarray, axis: int) -> Any:
    """x [layers, …] with the entries of an axis in each layer's order."""
    shape = [1] * x.ndim
    shape[0], shape[axis] = order.shape
    return jnp.take_along_axis(x, jnp.asarray(order.reshape(shape)), axis)
