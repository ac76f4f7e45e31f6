"""A sequence that is split over the devices of a mesh axis, for calls inside `jax.shard_map`.

device 0          device 1          device 2
tokens 0 … T-1    T … 2T-1          2T … 3T-1        q, k, v, gates, ids: each has its own

segment ids       gathered: 4 bytes a token
pooled blocks     pooled where they end, then gathered: 1/stride of keys and values
indexer's keys    gathered
selected blocks   those that a query here selected, one kv head after the other
window            `parallel.context_attention`: the keys within its reach
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from xsake.arguments import per_token
from xsake.nsa.sequences import ONE_SEQUENCE, SOUND, Sequences, Sound, describe
from xsake.parallel.context import axis_size
from xsake.parallel.context.halo import tokens_before
from xsake.parallel.context.pages import Pages


@dataclasses.dataclass(frozen=True)
class Split:
    """How the tokens lie: device d of the axis has tokens d · local … (d + 1) · local - 1."""

    axis: str
    devices: int
    local: int

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return self.devices * self.local

    @property
    def first(self) -> Array:
        """The index of this device's first token, int32 []."""
        return lax.axis_index(self.axis).astype(jnp.int32) * self.local

    def gathered(self, x: Array) -> Array:
        """x [B, T, …] of all devices, [B, length, …]."""
        return lax.all_gather(x, self.axis, axis=1, tiled=True)

    def own(self, x: Array) -> Array:
        """This device's part [B, T, …] of x [B, length, …]."""
        return lax.dynamic_slice_in_dim(x, self.first, self.local, axis=1)

    def before(self, x: Array, count: int) -> Array:
        """The `count` tokens before this device's first; 0 where there are none."""
        return tokens_before(x, count, self.axis)

    def pages(self, indices: Array, first: Array, last: Array, block: int) -> Pages:
        """The parts of the text that hold the blocks which these queries selected.

        Args:
          indices: int32 [B, T, C] of one kv head, as in SelectedCall.
          first: int32 [B|1, T], where a query's sequence begins.
          last: int32 [B|1, T], the last key that it sees.
          block: keys of a block.
        """
        size = math.gcd(self.local, block)  # blocks of packed sequences begin anywhere
        count = self.length // size
        begin = first[:, :, None] + indices * block
        end = jnp.minimum(begin + block - 1, last[:, :, None])
        listed = indices >= 0
        row = jnp.arange(len(indices))[:, None, None]
        # +1 where a block begins and -1 after its end: the running sum counts blocks
        edges = jnp.zeros_like(indices, shape=(len(indices), count + 1))
        edges = edges.at[row, jnp.where(listed, begin // size, count + 1)].add(1, mode="drop")
        edges = edges.at[row, jnp.where(listed, end // size + 1, count + 1)].add(-1, mode="drop")
        return Pages.request(jnp.cumsum(edges, axis=1)[:, :count] > 0, self.axis)


class Text(NamedTuple):
    """The sequences of all keys and of this device's queries: the same unless they are split."""

    keys: Sequences = ONE_SEQUENCE
    queries: Sequences = ONE_SEQUENCE
    split: Split | None = None
    sound: Sound = SOUND

    @classmethod
    def of(
        cls,
        batch: int,
        tokens: int,
        axis: str | None,
        *,
        segment_ids: Any,
        cu_seqlens: Any,
        token_indices: Any,
    ) -> Text:
        """Of a call with so many tokens on this device.

        With an axis, cu_seqlens and token_indices describe the whole sequence, and segment_ids this
        device's part.
        """
        others: dict[str, Any] = {"cu_seqlens": cu_seqlens, "token_indices": token_indices}
        if axis is None:
            found, sound = describe(batch, tokens, segment_ids=segment_ids, **others)
            return cls(found, found, sound=sound)
        split = Split(axis, axis_size(axis), tokens)
        ids = per_token("segment_ids", segment_ids, batch, tokens)
        ids = None if ids is None else split.gathered(ids)
        keys, sound = describe(batch, split.length, segment_ids=ids, **others)
        if not keys.are_packed:
            index = split.first + jnp.arange(tokens, dtype=jnp.int32)[None]
            return cls(keys, Sequences(None, jnp.zeros_like(index), index), split)
        return cls(keys, Sequences(*(split.own(x) for x in keys if x is not None)), split, sound)

    @property
    def length(self) -> int | None:
        """Tokens of a split sequence; None: as many as there are keys."""
        return None if self.split is None else self.split.length
