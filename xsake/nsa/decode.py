"""Decode: one new token of every sequence against a cache of keys, values and pooled blocks.

    cache.k, cache.v          slot s holds the token at position s of its batch row
    cache.pooled_k, pooled_v  slot i holds the block that ended at position i · stride + block - 1;
                              it is written by the step that completes the block
    cache.index_k             the indexer's keys, for score="msa"
    cache.length [B]          tokens so far; sequences of a batch may differ

    cache = nsa.Cache.empty(settings, batch=B, capacity=S, …)
    cache = nsa.prefill(cache, key, value)               the prompt
    out, cache = nsa.decode_step(q, k, v, cache)         [B, 1, …] each, as often as needed

A step reads what scores the blocks (the pooled keys; for "msa" all index keys), the selected
blocks, the window, and the pooled values if there is a compressed branch. Its output equals that of
`native_sparse_attention` over the whole sequence at that position.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from xsake.arguments import Tensor, check_qkv
from xsake.backends import accumulator
from xsake.backends.products import operand, product
from xsake.masks.integers import integers, size_of
from xsake.masks.rule import Leaf
from xsake.nsa.attention import choose, combine
from xsake.nsa.checks import check_gates, check_indexer, check_scale
from xsake.nsa.compress import (
    Compression,
    Pooled,
    block_count,
    check_compression,
    compress,
    functions_of,
    pool_ending_at,
)
from xsake.nsa.sequences import ONE_SEQUENCE, Sequences
from xsake.nsa.settings import Settings, check_compressed
from xsake.nsa.split import Text

# Why a cache does not serve a compressed branch, by score; that of "nsa" always does.
NO_POOLED_VALUES = {
    "moba": (
        "with score='moba' the cache holds means of whole blocks, not those of a compressed "
        "branch; decode without it"
    ),
    "msa": (
        "this cache holds no pooled blocks for a compressed branch; make it with "
        "nsa.Cache.empty(…, compressed=True)"
    ),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Cache:
    """What decoding remembers of B sequences. S is the capacity in tokens, P in pooled blocks."""

    k: Leaf  # [B, S, K, H]
    v: Leaf  # [B, S, K, Hv]
    pooled_k: Leaf  # [B, P, K, H]; for score="moba" the means of whole blocks; None: not read
    pooled_v: Leaf  # [B, P, K, Hv]; None: there is no compressed branch
    index_k: Leaf  # [B, S, K|1, Hi] for score="msa", else None
    length: Leaf  # int32 [B]
    settings: Settings = dataclasses.field(metadata={"static": True})
    axes: ClassVar[dict[str, tuple[str, ...]]] = {  # logical names, for parallel.sharding
        "k": ("batch", "capacity", "kv_heads", "head_size"),
        "v": ("batch", "capacity", "kv_heads", "head_size"),
        "pooled_k": ("batch", "capacity", "kv_heads", "head_size"),
        "pooled_v": ("batch", "capacity", "kv_heads", "head_size"),
        "index_k": ("batch", "capacity", "index_heads", "index_size"),
        "length": ("batch",),
    }

    @classmethod
    def empty(
        cls,
        settings: Settings,
        *,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_size: int,
        value_size: int | None = None,
        index_size: int | None = None,
        index_heads: int = 1,
        compressed: bool | None = None,
        dtype: Any = jnp.float32,
    ) -> Cache:
        """A cache without tokens.

        Args:
          settings: of the attention that reads it.
          batch: B.
          capacity: S, the most tokens of a sequence.
          kv_heads: K.
          head_size: H.
          value_size: Hv; default H.
          index_size: Hi, needed for score="msa".
          index_heads: heads of the indexer's keys, K or 1.
          compressed: for score="msa", whether steps have a compressed branch, whose pooled blocks
            the cache then holds. "nsa" always has them, because they select; "moba" never.
          dtype: of keys, values and index keys; others are refused.
        """
        if not isinstance(settings, Settings):
            raise TypeError(f"settings must be nsa.Settings(…), got {settings!r}")
        value_size = head_size if value_size is None else value_size
        sizes = {"capacity": capacity, "kv_heads": kv_heads, "head_size": head_size}
        for name, size in (sizes | {"value_size": value_size}).items():
            size_of(name, size, 1)
        size_of("batch", batch, 0)
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2:
            raise TypeError(
                f"dtype must be float16, bfloat16, float32 or float64, got {jnp.dtype(dtype)}"
            )
        _check_index_sizes(settings, index_size, index_heads, kv_heads)
        check_compressed(compressed)
        if compressed and settings.score == "moba":
            raise ValueError(NO_POOLED_VALUES["moba"])
        has_pooled = settings.score == "nsa" or bool(compressed)
        settings.check(selects=True, compresses=has_pooled)
        blocks = block_count(capacity, *_pooled_sizes(settings))

        def zeros(length: int, *shape: int) -> Array:
            return jnp.zeros((batch, length, *shape), dtype)

        has_means = has_pooled or settings.score == "moba"
        return cls(
            k=zeros(capacity, kv_heads, head_size),
            v=zeros(capacity, kv_heads, value_size),
            pooled_k=zeros(blocks, kv_heads, head_size) if has_means else None,
            pooled_v=zeros(blocks, kv_heads, value_size) if has_pooled else None,
            index_k=None if index_size is None else zeros(capacity, index_heads, index_size),
            length=jnp.zeros(batch, jnp.int32),
            settings=settings,
        )

    def check_fits(self, key: Array, value: Array, index_key: Array | None = None) -> None:
        """Raises if batch, number of heads, size or dtype of the arrays are not the cache's.

        Or if they differ in their number of tokens.
        """
        given = [("key", key, self.k), ("value", value, self.v)]
        if self.index_k is not None and index_key is not None:
            given.append(("index_key", index_key, self.index_k))
        for name, x, own in given:
            wanted = (own.shape[0], *own.shape[2:])
            if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != wanted:
                raise ValueError(
                    f"{name} must have a batch, heads and head size of {list(wanted)}, as the "
                    f"cache has, got shape {list(x.shape)}"
                )
            if x.dtype != own.dtype:
                raise TypeError(
                    f"{name} is {x.dtype} but the cache has {own.dtype}; make it with "
                    f"nsa.Cache.empty(…, dtype=…), or cast {name}"
                )
            if x.shape[1] != key.shape[1]:
                raise ValueError(
                    f"{name} must have as many tokens as key, {key.shape[1]}, got {x.shape[1]}"
                )

    def check_capacity(self, more: int) -> None:
        """Raises if `more` tokens do not fit, where the lengths can be read."""
        if isinstance(self.length, jax.core.Tracer):
            return
        longest, capacity = int(np.asarray(self.length).max(initial=0)), self.k.shape[1]
        if longest + more > capacity:
            raise ValueError(
                f"the cache has {longest} of {capacity} tokens, so {more} more do not fit; make it "
                "with a larger capacity"
            )


def prefill(
    cache: Cache,
    key: Float[Tensor, "B T K H"],
    value: Float[Tensor, "B T K Hv"],
    *,
    lengths: Int[Tensor, " B"] | None = None,
    compression: Compression = "mean",
    index_key: Float[Tensor, "B T J Hi"] | None = None,
) -> Cache:
    """An empty cache with the keys and values of prompts.

    It computes no attention: `native_sparse_attention` gives the output of the prompts. A prompt is
    prefilled whole, at once.

    Args:
      cache: without tokens. Under jit, where that cannot be read, a sequence that has some becomes
        full, so that its steps give NaN; and so does one whose length is not from 0 to T.
      key: of the prompts, padded on the right to T tokens.
      value: like key.
      lengths: int [B], tokens of each prompt; default T.
      compression: as in `native_sparse_attention`, and the same as in the steps that follow.
      index_key: the indexer's keys, for score="msa".
    """
    k, v = jnp.asarray(key), jnp.asarray(value)
    index = None if index_key is None else jnp.asarray(index_key)
    for name, x in (("key", k), ("value", v), ("index_key", index)):
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating, got {x.dtype}")
    cache.check_fits(k, v, index)
    if cache.index_k is None and index is not None:
        raise ValueError(
            f"index_key is for score='msa', but the cache has score={cache.settings.score!r}"
        )
    (B, T), capacity = k.shape[:2], cache.k.shape[1]
    if capacity < T:
        raise ValueError(
            f"key has {T} tokens, but the cache's capacity is {capacity}; make it larger"
        )
    count = jnp.full(B, T, jnp.int32) if lengths is None else integers("lengths", lengths)
    if count.shape != (B,):
        raise ValueError(f"lengths must have shape [{B}], got {list(count.shape)}")
    fits, is_new = (count >= 0) & (count <= T), cache.length == 0
    if not isinstance(fits, jax.core.Tracer) and not fits.all():
        raise ValueError(f"lengths must be from 0 to T = {T}, got {count.tolist()}")
    if not isinstance(is_new, jax.core.Tracer) and not is_new.all():
        raise ValueError(
            f"cache must be empty, but its sequences have {cache.length.tolist()} tokens; prefill "
            "takes a whole prompt once, and nsa.decode_step adds a token"
        )
    count = jnp.where(fits & is_new, count, capacity)
    new: dict[str, Any] = {"k": k, "v": v}
    check_compression(compression, is_read=cache.pooled_v is not None)
    if cache.pooled_k is not None:
        block, stride = _pooled_sizes(cache.settings)
        values = None if cache.pooled_v is None else v
        pooled = compress(
            k, values, ONE_SEQUENCE, block=block, stride=stride, compression=compression
        )
        new |= {"pooled_k": pooled.k} | ({} if values is None else {"pooled_v": pooled.v})
    if cache.index_k is not None:
        if index is None:
            raise ValueError("score='msa' needs index_key")
        new["index_k"] = index
    new = {name: getattr(cache, name).at[:, : x.shape[1]].set(x) for name, x in new.items()}
    return dataclasses.replace(cache, **new, length=count)


def decode_step(
    query: Float[Tensor, "B 1 N H"],
    key: Float[Tensor, "B 1 K H"],
    value: Float[Tensor, "B 1 K Hv"],
    cache: Cache,
    *,
    g_cmp: Float[Tensor, ...] | None = None,
    g_slc: Float[Tensor, ...] | None = None,
    g_swa: Float[Tensor, ...] | None = None,
    compressed: bool | None = None,
    compression: Compression = "mean",
    index_query: Float[Tensor, "B 1 K Hi"] | None = None,
    index_key: Float[Tensor, "B 1 J Hi"] | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "B 1 N Hv"], Cache]:
    """Attention of one new token of every sequence, and the cache with its key and value.

    Arguments are as in `native_sparse_attention`; the rest of its arguments is in cache.settings.
    `compression` is that of the `prefill`. Where the cache is full the output is NaN; eagerly that
    raises.
    """
    q, k, v, is_unbatched = check_qkv(query, key, value)
    if is_unbatched:
        raise ValueError(
            f"query must be [B, 1, N, H], got shape {list(q.shape[1:])}; add a batch axis"
        )
    if q.shape[1] != 1 or k.shape[1] != 1:
        raise ValueError(
            f"query and key must have one token, got {q.shape[1]} and {k.shape[1]}; "
            "nsa.prefill takes a prompt"
        )
    cache.check_fits(k, v, None if index_key is None else jnp.asarray(index_key))
    cache.check_capacity(1)
    settings, scale = cache.settings, check_scale(q, scale)
    gates = check_gates(q, v, g_cmp=g_cmp, g_slc=g_slc, g_swa=g_swa)
    branches = settings.branches(gates, compressed, has_indices=False)
    if "g_cmp" in branches and cache.pooled_v is None:
        raise ValueError(NO_POOLED_VALUES[settings.score])
    index = check_indexer(settings, index_query, index_key, (len(q), 1, k.shape[2]))
    check_compression(compression, is_read=cache.pooled_v is not None)
    position = cache.length
    cache = _append(cache, k, v, index, compression)

    found: dict[str, Array] = {}
    block, stride = _pooled_sizes(settings)
    pooled = logsumexp = None
    if cache.pooled_k is not None:
        end = jnp.arange(cache.pooled_k.shape[1], dtype=jnp.int32)[None] * stride + block - 1
        pooled = Pooled(cache.pooled_k, cache.pooled_v, end, None, None)
    if "g_cmp" in branches or ("g_slc" in branches and settings.score == "nsa"):
        seen = (end <= position[:, None])[:, None]
        found["g_cmp"], logsumexp = _attend(q, cache.pooled_k, cache.pooled_v, seen, scale)
    if "g_slc" in branches:
        sequences = Sequences(first=jnp.zeros_like(position)[:, None], last=position[:, None])
        by_index = None if index is None else (index[0], cache.index_k)
        text = Text(sequences, sequences)
        blocks = choose(
            settings, q, cache.k, pooled, logsumexp, by_index, text, scale, means=pooled
        )[:, 0]  # [B, K, c]
        slot = blocks[..., None] * settings.block_size
        slot = slot + jnp.arange(settings.block_size, dtype=jnp.int32)[None, None, None]
        slot = slot.reshape(*blocks.shape[:2], blocks.shape[2] * settings.block_size)
        found["g_slc"] = _attend_slots(q, cache, slot, position, scale)
    if "g_swa" in branches:
        back = jnp.arange(settings.window_size, dtype=jnp.int32)[None, None]
        slot = jnp.broadcast_to(position[:, None, None] - back, (len(q), k.shape[2], back.shape[2]))
        found["g_swa"] = _attend_slots(q, cache, slot, position, scale)
    out = combine({name: found[name] for name in branches}, gates, q.dtype)
    fits = position < cache.k.shape[1]
    return jnp.where(fits[:, None, None, None], out, jnp.nan), cache


# -------------------------------------------------------------------------------------------- parts


def _pooled_sizes(settings: Settings) -> tuple[int, int]:
    """Block and stride of the pooled blocks that a cache holds."""
    if settings.score == "moba":
        return settings.block_size, settings.block_size
    return settings.compression_block, settings.compression_stride


def _check_index_sizes(settings: Settings, size: Any, heads: Any, kv_heads: int) -> None:
    """Raises unless the indexer's sizes are given for score="msa", and only for it."""
    if settings.score != "msa":
        if size is not None:
            raise ValueError(
                f"index_size is for score='msa', but score is {settings.score!r}; leave it out"
            )
        return
    if size is None:
        raise ValueError("score='msa' needs index_size, the head size of the indexer")
    size_of("index_size", size, 1)
    if size_of("index_heads", heads, 1) not in (1, kv_heads):
        raise ValueError(f"index_heads must be 1 or kv_heads = {kv_heads}, got {heads}")


def _append(
    cache: Cache, k: Array, v: Array, index: tuple[Array, Array] | None, compression: Any
) -> Cache:
    """The cache with one more token, and with the pooled block that it completes."""
    row, position = jnp.arange(len(k)), cache.length
    new: dict[str, Any] = {"length": position + 1}
    added = {"k": k, "v": v} | ({} if index is None else {"index_k": index[1]})
    for name, x in added.items():
        old = getattr(cache, name)
        new[name] = old.at[row, position].set(x[:, 0], mode="drop")
    functions = functions_of(compression)
    if cache.pooled_k is None:
        return dataclasses.replace(cache, **new)
    block, stride = _pooled_sizes(cache.settings)
    since_first = position - (block - 1)
    completes = (since_first >= 0) & (since_first % stride == 0)
    slot = jnp.where(completes, since_first // stride, cache.pooled_k.shape[1])  # or dropped
    for name, pooling in zip(("k", "v"), functions, strict=True):
        old = getattr(cache, f"pooled_{name}")
        if old is not None:
            made = pool_ending_at(name, new[name], position[:, None], block, pooling)[:, 0]
            new[f"pooled_{name}"] = old.at[row, slot].set(made, mode="drop")
    return dataclasses.replace(cache, **new)


def _attend_slots(q: Array, cache: Cache, slot: Array, position: Array, scale: float) -> Array:
    """Attention of q [B, 1, N, H] to the slots [B, K, L] from 0 to its position."""
    (B, K, _), last = slot.shape, cache.k.shape[1] - 1
    seen = (slot >= 0) & (slot <= position[:, None, None])
    at = jnp.arange(B)[:, None, None], jnp.clip(slot, 0, last), jnp.arange(K)[None, :, None]
    k, v = (x[at].transpose(0, 2, 1, 3) for x in (cache.k, cache.v))  # [B, L, K, H]
    return _attend(q, k, v, seen, scale)[0]


def _attend(q: Array, k: Array, v: Array, seen: Array, scale: float) -> tuple[Array, Array]:
    """(out [B, 1, N, Hv], logsumexp [B, 1, N]) over keys [B, L, K, H] that are seen [B, K|1, L]."""
    B, _, N, H = q.shape
    K, dtype = k.shape[2], accumulator(q.dtype)
    grouped = operand(q.reshape(B, K, N // K, H))
    s = product("bkgh,blkh->bkgl", grouped, operand(k), dtype) * scale
    s = jnp.where(seen[:, :, None], s, -jnp.inf)
    m = s.max(-1, keepdims=True, initial=-jnp.inf)
    p = jnp.exp(s - jnp.where(m == -jnp.inf, 0, m))
    l = p.sum(-1, keepdims=True)
    v = jnp.where(seen.transpose(0, 2, 1)[..., None], v, 0)  # in padding it may be NaN
    out = product("bkgl,blkh->bkgh", p.astype(grouped.dtype), operand(v), dtype)
    lse = jnp.where(l > 0, m + jnp.log(jnp.where(l > 0, l, 1)), -jnp.inf)
    out = out / jnp.where(l > 0, l, 1)
    return out.reshape(B, 1, N, v.shape[3]), lse.reshape(B, 1, N)
