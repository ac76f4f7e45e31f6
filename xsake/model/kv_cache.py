"""KVCache: the keys and values of every token so far.

    k, v       [layers, B, K, capacity, H]       a head's keys are contiguous: a block is one read
    blocks      ├──64──┼──64──┼── … ──┤          slots past length[b] are never attended to
    length     [B]                               tokens of each sequence; they may differ

Appending under jit updates the arrays in place when the cache is donated or carried by a loop.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake.masks.rule import Leaf
from xsake.model.config import Config

BLOCK = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KVCache:
    """A pytree; `append` and `advance` return the next one."""

    k: Leaf  # [layers, B, K, capacity, H]
    v: Leaf  # [layers, B, K, capacity, H]
    length: Leaf  # int32 [B]
    block: int = dataclasses.field(metadata={"static": True})
    axes: ClassVar[dict[str, tuple[str, ...]]] = {  # logical names, for parallel.sharding
        "k": ("layers", "batch", "kv_heads", "capacity", "head_size"),
        "v": ("layers", "batch", "kv_heads", "capacity", "head_size"),
        "length": ("batch",),
    }

    @classmethod
    def empty(
        cls,
        config: Config,
        batch: int,
        capacity: int,
        *,
        dtype: Any = jnp.float32,
        block: int = BLOCK,
    ) -> KVCache:
        """Space for `capacity` tokens per sequence, rounded up to whole blocks."""
        if config.is_sparse:
            raise ValueError(
                f"KVCache is for dense attention, but the config has attention = "
                f"{config.attention!r}; use xsake.model.SparseCache"
            )
        for name, value in (("batch", batch), ("capacity", capacity), ("block", block)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        blocks = -(-capacity // block)
        lead = (config.layers, batch, config.kv_heads)
        tokens = (*lead, blocks * block, config.head_size)
        return cls(
            k=jnp.zeros(tokens, dtype),
            v=jnp.zeros(tokens, dtype),
            length=jnp.zeros(batch, jnp.int32),
            block=block,
        )

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can hold."""
        return self.k.shape[3]

    def check_capacity(self, tokens: int) -> None:
        """Raises unless `tokens` more fit in every sequence; reads the lengths from the device."""
        longest = int(jnp.max(self.length))
        if longest + tokens > self.capacity:
            raise ValueError(
                f"the cache holds {longest} of {self.capacity} tokens, which leaves no space for "
                f"{tokens} more; make it with a larger capacity"
            )

    def append(
        self,
        layer: Any,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        count: Int[Array, " B"],
    ) -> KVCache:
        """Writes the first count[b] of k and v [B, T, K, H] after sequence b's tokens in one layer.

        `length` does not change here: all layers share it, and `advance` increments it after all of
        them were written. Tokens that do not fit are dropped, so call `check_capacity` first.
        """
        B, T = k.shape[:2]
        row, token = jnp.arange(B)[:, None], jnp.arange(T)
        at = jnp.where(token < count[:, None], self.length[:, None] + token, self.capacity)
        cached_k, cached_v = (
            old.at[layer, row, :, at].set(new.astype(old.dtype), mode="drop")
            for old, new in ((self.k, k), (self.v, v))
        )
        return dataclasses.replace(self, k=cached_k, v=cached_v)

    def advance(self, count: Int[Array, " B"]) -> KVCache:
        """Sequence b is longer by count[b] tokens, which every layer has appended."""
        return dataclasses.replace(self, length=self.length + count)
