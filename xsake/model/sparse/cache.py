"""SparseCache: keys, values, pooled blocks and indexer keys of every token so far, layer by layer.

layers[i]   nsa.Cache of layer i, [B, capacity, K, H] …      apart, so that a step copies none
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xsake import nsa
from xsake.model.config import Config

ROUNDED_TO = 64  # capacities, so that few programs are compiled


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SparseCache:
    """A pytree; a step returns the next one."""

    layers: tuple[nsa.Cache, ...]

    @classmethod
    def empty(
        cls, config: Config, batch: int, capacity: int, *, dtype: Any = jnp.float32
    ) -> SparseCache:
        """Space for `capacity` tokens per sequence, rounded up."""
        for name, value in (("batch", batch), ("capacity", capacity)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

        def layer() -> nsa.Cache:
            return nsa.Cache.empty(
                config.settings,
                batch=batch,
                capacity=-(-capacity // ROUNDED_TO) * ROUNDED_TO,
                kv_heads=config.kv_heads,
                head_size=config.head_size,
                index_size=config.index_size if config.attention == "msa" else None,
                index_heads=config.sparse.index_heads,
                compressed="g_cmp" in config.branches,
                dtype=dtype,
            )

        return cls(tuple(layer() for _ in range(config.layers)))

    def map(self, function: Callable[[nsa.Cache], nsa.Cache]) -> SparseCache:
        """function of every layer's cache."""
        return SparseCache(tuple(map(function, self.layers)))

    @property
    def length(self) -> Any:
        """Tokens of each sequence, int32 [B]; those of a sequence that has ended count too."""
        return self.layers[0].length

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can hold."""
        return self.layers[0].k.shape[1]

    def check_capacity(self, tokens: int) -> None:
        """Raises unless `tokens` more fit in every sequence."""
        self.layers[0].check_capacity(tokens)

    def with_layer(self, number: int, cache: nsa.Cache) -> SparseCache:
        """The same with another cache of one layer."""
        return SparseCache((*self.layers[:number], cache, *self.layers[number + 1 :]))
