"""Positions of tokens in their documents, for the position embedding."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jaxtyping import Int

from xsake.parallel import token_order


def document_positions(batch: int, length: int, segment_ids: Any = None) -> Int[Array, "B T"]:
    """0, 1, 2 … for every row, [B, T], from 0 again wherever the segment id changes.

    >>> document_positions(1, 5, jnp.array([[7, 7, 7, 2, 2]]))
    Array([[0, 1, 2, 0, 1]], dtype=int32)
    """
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if segment_ids is None:
        return index
    ids = jnp.asarray(segment_ids)
    begins = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    return index - lax.cummax(jnp.where(begins, index, 0), axis=1)


def positions_in_order(
    batch: int, length: int, segment_ids: Any, mesh: Mesh | None, order: str
) -> Int[Array, "B T"]:
    """`document_positions` of tokens and ids that lie in an order of `Transformer`."""
    if mesh is None or order != "zigzag":
        return document_positions(batch, length, segment_ids)
    at = token_order(length, mesh.shape["context"], order)
    ids = None if segment_ids is None else jnp.asarray(segment_ids)[:, np.argsort(at)]
    return document_positions(batch, length, ids)[:, at]
