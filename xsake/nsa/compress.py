"""The compressed branch: keys and values pooled over blocks of tokens, and attention to them.

    tokens of a sequence      0 ······· 16 ······· 32 ······· 48 ······· 64
    block 32, stride 16       └──── block 0 ────┘
                                         └──── block 1 ────┘
                                                    └──── block 2 ────┘
    block i holds tokens i · stride … i · stride + block - 1 of its sequence. It exists if all of
    them do, and a query sees it from its last token on.

Pooled blocks of all sequences of a batch row are stored one after another. Their keys have the
positions of the blocks' last tokens, so that attention to them is ordinary causal attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from xsake.attention import dot_product_attention
from xsake.backends import accumulator
from xsake.backends.options import Options
from xsake.nsa.sequences import Sequences
from xsake.nsa.split import Split

# [B, P, block, K, H] -> [B, P, K, H]: the tokens of P blocks, one vector for each block
Pooling = Callable[[Array], Array]
# "mean", one function for keys and values, or one for each
Compression = Literal["mean"] | Pooling | tuple[Pooling, Pooling]


class Pooled(NamedTuple):
    """Pooled keys and values in P slots; slots without a block come last."""

    k: Array  # [B, P, K, H]
    v: Array | None  # [B, P, K, Hv]
    end: Array  # int32 [B|1, P]: index of the block's last token; T where there is no block
    number: Array | None  # int32 [B|1, P]: of the block's sequence; -1 where there is no block
    before: Array | None  # int32 [B|1, T]: how many slots precede those of a token's sequence


class Slots(NamedTuple):
    """Where the blocks of a batch row lie; the fields are those of Pooled."""

    end: Array
    number: Array | None
    before: Array | None


def block_count(length: int, block: int, stride: int) -> int:
    """How many blocks a sequence has.

    >>> block_count(64, 32, 16), block_count(31, 32, 16)
    (3, 0)
    """
    return max(0, (length - block) // stride + 1)


@functools.partial(jax.jit, static_argnames=("length", "block", "stride"))
def slots_of(sequences: Sequences, length: int, block: int, stride: int) -> Slots:
    """The blocks of all sequences."""
    if sequences.number is None:
        count = block_count(length, block, stride)
        end = jnp.arange(count, dtype=jnp.int32) * stride + block - 1
        return Slots(end[None], None, None)
    capacity = length // stride  # a sequence has at most one block for every stride tokens
    position = sequences.positions(length)
    is_end = (position >= block - 1) & ((position - (block - 1)) % stride == 0)
    ends = jnp.cumsum(is_end, axis=1, dtype=jnp.int32)
    row = jnp.arange(len(is_end))[:, None]
    slot = jnp.where(is_end, ends - 1, capacity)  # past the end: dropped
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], slot.shape)
    end = jnp.full((len(is_end), capacity), length, jnp.int32).at[row, slot].set(index, mode="drop")
    number = jnp.where(end < length, sequences.number[row, jnp.minimum(end, length - 1)], -1)
    before = ends - is_end  # blocks that end before each token
    return Slots(end, number, before[row, sequences.first])


def compress(
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"] | None,
    sequences: Sequences,
    *,
    block: int,
    stride: int,
    compression: Compression = "mean",
    split: Split | None = None,
) -> Pooled:
    """Pools the keys, and the values if there are any, of every completed block; differentiable.

    With a split, key and value are this device's, and the result has the blocks of all devices.
    """
    slots = slots_of(sequences, key.shape[1] if split is None else split.length, block, stride)
    for_keys, for_values = functions_of(compression)
    pool = _pool if split is None else functools.partial(_pool_split, split)
    keys = pool("key", key, slots, block, stride, for_keys)
    values = None if value is None else pool("value", value, slots, block, stride, for_values)
    if split is not None and slots.before is not None:
        slots = slots._replace(before=split.own(slots.before))
    return Pooled(keys, values, *slots)


def check_compression(compression: Any, is_read: bool) -> None:
    """Raises unless it is a way of pooling, and the default where nothing reads it."""
    if functions_of(compression) != ("mean", "mean") and not is_read:
        raise ValueError(
            "compression pools blocks for a compressed branch or for score='nsa', and there is "
            "neither; leave it out"
        )


def functions_of(compression: Any) -> tuple[Any, Any]:
    """How keys and how values are pooled: "mean" or a function, each."""
    is_pair = isinstance(compression, (tuple, list))
    both = tuple(compression) if is_pair else (compression, compression)
    if len(both) != 2 or not all(x == "mean" or callable(x) for x in both):
        raise ValueError(
            "compression must be 'mean', a function [B, P, block, K, H] -> [B, P, K, H], or a pair "
            f"of those for keys and values, got {compression!r}"
        )
    return both


def _pool(name: str, x: Array, slots: Slots, block: int, stride: int, pooling: Any) -> Array:
    """x [B, T, K, H] pooled, [B, P, K, H] in x's dtype; 0 in slots without a block."""
    if pooling == "mean" and slots.number is None:
        return _running_mean(x, slots.end.shape[1], block, stride)
    found = pool_ending_at(name, x, slots.end, block, pooling)
    if slots.number is not None:
        found = jnp.where((slots.number >= 0)[:, :, None, None], found, 0)
    return found


def _pool_split(
    split: Split, name: str, x: Array, slots: Slots, block: int, stride: int, pooling: Any
) -> Array:
    """As `_pool`: a device pools the blocks that end in its tokens, and receives the others.

    Ends are at least `stride` apart, so that every `stride` tokens have at most one.
    """
    T, end = split.local, slots.end
    count = -(-T // stride)  # of one device
    if pooling == "mean" and slots.number is None and T % stride == 0:
        near = jnp.concatenate([split.before(x, block - stride), x], axis=1)
        found = _running_mean(near, count, block, stride)
    else:
        near = jnp.concatenate([split.before(x, block - 1), x], axis=1)
        offset = end - split.first
        slot = jnp.where((offset >= 0) & (offset < T), offset // stride, count)
        own = jnp.zeros_like(end, shape=(len(end), count))  # slots without a block: any tokens
        own = own.at[jnp.arange(len(end))[:, None], slot].set(offset + block - 1, mode="drop")
        found = pool_ending_at(name, near, own, block, pooling)
    every = split.gathered(found)
    is_block = end < split.length
    at = jnp.where(is_block, end // T * count + end % T // stride, 0)
    found = every[jnp.arange(len(every))[:, None], jnp.broadcast_to(at, (len(every), at.shape[1]))]
    return jnp.where(is_block[:, :, None, None], found, 0)


def pool_ending_at(name: str, x: Array, end: Array, block: int, pooling: Any) -> Array:
    """The blocks of x [B, T, K, H] whose last tokens are end [B|1, P], pooled: [B, P, K, H]."""
    B, T, K, H = x.shape
    P = end.shape[1]
    token = end[:, :, None] - (block - 1) + jnp.arange(block, dtype=jnp.int32)[None, None]
    token = jnp.clip(jnp.broadcast_to(token, (B, P, block)), 0, T - 1)
    blocks = x[jnp.arange(B)[:, None, None], token]
    if pooling == "mean":
        found = blocks.astype(accumulator(x.dtype)).mean(2)
    else:
        found = pooling(blocks)
        what = list(found.shape) if isinstance(found, (Array, np.ndarray)) else repr(found)
        if what != [B, P, K, H]:
            raise ValueError(
                f"compression must turn {name} blocks {list(blocks.shape)} into {[B, P, K, H]}, "
                f"got {what}; a pair of functions pools keys and values apart"
            )
    return found.astype(x.dtype)


def _running_mean(x: Array, count: int, block: int, stride: int) -> Array:
    """The mean of `count` blocks; blocks that overlap share sums of `stride` tokens."""
    B, _, K, H = x.shape
    parts = block // stride
    if count == 0:
        return jnp.zeros((B, 0, K, H), x.dtype)
    used = x[:, : (count - 1) * stride + block].astype(accumulator(x.dtype))
    sums = used.reshape(B, -1, stride, K, H).sum(2)
    total = sums[:, :count]
    for part in range(1, parts):
        total = total + sums[:, part : part + count]
    return (total / block).astype(x.dtype)


def attend_compressed(
    query: Float[Array, "B T N H"],
    pooled: Pooled,
    sequences: Sequences,
    *,
    scale: float,
    is_split: bool = False,
    implementation: str | None = None,
    options: Options | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Attention of every query to the completed blocks before it, and the logsumexp.

    A query before the end of its sequence's first block gets 0 and -inf. `is_split`: the queries
    are some of the text's.
    """
    assert pooled.v is not None
    has_index = sequences.are_packed and not is_split  # a query's index is its place in the row
    return dot_product_attention(
        query,
        pooled.k,
        pooled.v,
        scale=scale,
        is_causal=True,
        q_positions=None if has_index else sequences.last,
        kv_positions=pooled.end,
        implementation=implementation,
        options=options,
        return_residual=True,
        q_segment_ids=sequences.number,
        kv_segment_ids=pooled.number,
    )


# -------------------------------------------------------------------------------- learned pooling


def weighted_pooling(
    weights: Float[Array, " block"] | Float[Array, "block K"],
    positions: Float[Array, "block H"] | Float[Array, "block K H"] | None = None,
) -> Pooling:
    """Pools a block into Σ_i weights[i] · (x[i] + positions[i]).

    Args:
      weights: of the tokens of a block, shared by the heads or for each kv head; 1 / block is the
        mean.
      positions: an embedding of the position in the block.

    >>> by_mean = weighted_pooling(jnp.full(32, 1 / 32))  # for compression_block=32
    >>> by_mean(jnp.ones((1, 7, 32, 2, 8))).shape
    (1, 7, 2, 8)
    """

    def pool(blocks: Array) -> Array:
        block, K, _ = blocks.shape[2:]
        w = _parameter("weights", weights, {"[block]": (block,), "[block, K]": (block, K)})
        x = _with_positions(blocks, positions)
        spec = "bplkh,l->bpkh" if w.ndim == 1 else "bplkh,lk->bpkh"
        return jnp.einsum(spec, x, w.astype(x.dtype), precision=jax.lax.Precision.HIGHEST)

    return pool


def mlp_pooling(
    w_in: Float[Array, "block H M"],
    w_out: Float[Array, "M H"],
    b_in: Float[Array, " M"] | None = None,
    b_out: Float[Array, " H"] | None = None,
    positions: Float[Array, "block H"] | Float[Array, "block K H"] | None = None,
) -> Pooling:
    """Pools a block by a network with one hidden layer, the same for all kv heads.

        w_out · gelu(Σ_i w_in[i] · (x[i] + positions[i]) + b_in) + b_out

    Args:
      w_in: from all tokens of a block to M hidden units.
      w_out: from those to the pooled vector.
      b_in: added before the activation.
      b_out: added to the result.
      positions: an embedding of the position in the block.
    """

    def pool(blocks: Array) -> Array:
        (block, _, H), M = blocks.shape[2:], jnp.shape(w_out)[:1]
        parameters = {
            "w_out": _parameter("w_out", w_out, {"[M, H]": (*M, H)}),
            "w_in": _parameter("w_in", w_in, {"[block, H, M]": (block, H, *M)}),
        }
        for name, bias, form, size in (("b_in", b_in, "[M]", M), ("b_out", b_out, "[H]", (H,))):
            if bias is not None:
                parameters[name] = _parameter(name, bias, {form: size})
        x = _with_positions(blocks, positions)
        p = {name: value.astype(x.dtype) for name, value in parameters.items()}
        exact = jax.lax.Precision.HIGHEST
        hidden = jnp.einsum("bplkh,lhm->bpkm", x, p["w_in"], precision=exact)
        hidden = jax.nn.gelu(hidden + p["b_in"][None, None, None] if "b_in" in p else hidden)
        found = jnp.einsum("bpkm,mh->bpkh", hidden, p["w_out"], precision=exact)
        return found + p["b_out"][None, None, None] if "b_out" in p else found

    return pool


def _with_positions(blocks: Array, positions: Array | None) -> Array:
    """blocks [B, P, block, K, H] plus an embedding [block, H] or [block, K, H], not rounded."""
    x = blocks.astype(accumulator(blocks.dtype))
    if positions is None:
        return x
    block, K, H = blocks.shape[2:]
    forms = {"[block, H]": (block, H), "[block, K, H]": (block, K, H)}
    e = _parameter("positions", positions, forms)
    by_head = e[:, None] if e.ndim == 2 else e
    return x + by_head[None, None].astype(x.dtype)


def _parameter(name: str, x: Any, forms: dict[str, tuple[int, ...]]) -> Array:
    """A parameter of a pooling as an array that has one of the shapes `forms`."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating, got {x.dtype}")
    if x.shape not in forms.values():
        wanted = " or ".join(f"{form} = {list(shape)}" for form, shape in forms.items())
        raise ValueError(
            f"{name} must be {wanted}, got shape {list(x.shape)}; block is compression_block, and "
            "keys and values of different sizes take a pair of poolings"
        )
    return x
