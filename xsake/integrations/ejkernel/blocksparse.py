"""blocksparse_attention: ejkernel's arguments become one mask and a call of the door.

    causal, sliding_window ─ at positions ─┐
    attention_mask, mask_builder ──────────┼─ rule ─┬─ BlockMask ─ dot_product_attention
    qkv_layouts, block sizes ──────────────┼────────┘                   │
    query, key, value [B, N, T, H] ────────┴─ [B, T, N, H] ─────────────┘

Everything that limits which keys a query sees is intersected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from xsake import masks
from xsake.arguments import Tensor, as_array, check_qkv, number, per_token
from xsake.attention import dot_product_attention, explain
from xsake.backends import Sizes
from xsake.backends.hopper.limits import FUSED_SIZE
from xsake.backends.options import BackwardTiling, Options
from xsake.block_mask import BlockMask
from xsake.integrations.ejkernel.block_sizes import DEFAULT, block_sizes
from xsake.integrations.ejkernel.builders import layouts_of, rule_of_heads
from xsake.integrations.ejkernel.sparse_mask import block_mask, window_rule
from xsake.integrations.mask_values import visible
from xsake.masks.rule import Grid, Rule

__all__ = ["blocksparse_attention", "sinks_of_heads", "token_mask"]


def blocksparse_attention(
    query: Float[Tensor, ...],
    key: Float[Tensor, ...],
    value: Float[Tensor, ...],
    q_segment_ids: Int[Tensor, ...] | None = None,
    kv_segment_ids: Int[Tensor, ...] | None = None,
    q_positions: Int[Tensor, ...] | None = None,
    kv_positions: Int[Tensor, ...] | None = None,
    softmax_aux: Float[Tensor, ...] | None = None,
    bias: Float[Tensor, ...] | None = None,
    attention_mask: Tensor | None = None,
    sequence_parallelism_mesh_axis_name: str | None = None,
    logits_soft_cap: float | None = None,
    qkv_layouts: Any = None,
    softmax_scale: float | None = None,
    fwd_params: Any = None,
    bwd_params: Any = None,
    mask_builder: Any = None,
    sliding_window: int | Sequence[int | None] | None = None,
    chunk_size: int | None = None,
    causal: bool = True,
    fused_backward: bool = False,
    *,
    q_blocksize: int | None = None,
    kv_blocksize: int | None = None,
) -> Float[Array, "B N T Hv"]:
    """Attention over blocks, with ejkernel's arguments. A query sees what all of them allow.

    Args:
      query: [B, N, T, H].
      key: [B, K, S, H]; K divides N.
      value: [B, K, S, Hv].
      q_segment_ids: int [B, T], in any order; only equal ids see each other, negative = padding.
      kv_segment_ids: int [B, S]; default q_segment_ids.
      q_positions: int [B, T], what causal and sliding_window compare; default arange.
      kv_positions: int [B, S].
      softmax_aux: logits that join the softmax's denominator once: [N] or [K], one for each head or
        kv head; [N, M] or [K, M]; or any other number of them, [M], for every head.
      bias: [B|1, N|1, T|1, S|1], added to the logits after the soft cap.
      attention_mask: bool or integers, [B, T, S] or [B, N|1, T, S]; 0 hides the key.
      sequence_parallelism_mesh_axis_name: inside `jax.shard_map`: the axis over whose devices T and
        S are sharded, in order. Keys and values are gathered; attention_mask, bias and layouts have
        this device's queries and all keys.
      logits_soft_cap: cap · tanh(logits / cap).
      qkv_layouts: one to three SparseMasks, as `create_sparsity_mask` returns them.
      softmax_scale: default 1/sqrt(H).
      fwd_params: q_blocksize and kv_blocksize.
      bwd_params: the same block sizes again.
      mask_builder: () -> SparseMask, or (q_len, kv_len, num_heads, head_idx, num_reps) -> Mask,
        called for every query head; a rule of `xsake.masks` is a Mask too.
      sliding_window: w or (left, right): keys q - left … q + right; -1 or None = no limit.
      chunk_size: tokens of a row block and of a kv block.
      causal: a query sees keys at its own position and before.
      fused_backward: True requires one kernel for all gradients, which only the backend `hopper`
        has, and is refused where that cannot run the call; False leaves the choice to the device.
      q_blocksize: tokens of a row block.
      kv_blocksize: tokens of a kv block.

    Returns:
      [B, N, T, Hv].

    >>> import jax.numpy as jnp
    >>> from xsake.integrations.ejkernel import blocksparse_attention
    >>> q = k = v = jnp.ones((2, 4, 96, 16))
    >>> blocksparse_attention(q, k, v, sliding_window=(20, -1), q_blocksize=32).shape
    (2, 4, 96, 16)
    """
    shards = _Shards(sequence_parallelism_mesh_axis_name)
    q, k, v, sizes = _by_token(query, key, value, shards)
    if kv_segment_ids is None and q.shape[1] * shards.count() == k.shape[1]:
        kv_segment_ids = q_segment_ids
    rules = [
        _limits(causal, sliding_window, q_positions, kv_positions, sizes, shards),
        masks.everything() if attention_mask is None else token_mask(attention_mask),
    ]
    block = block_sizes(fwd_params, bwd_params, chunk_size, q_blocksize, kv_blocksize)
    layouts, built = _built(mask_builder, qkv_layouts, sizes, shards)
    call: dict[str, Any] = dict(
        bias=bias,
        mask=_mask(rules[0] & rules[1] & built, layouts, block, sizes),
        scale=None if softmax_scale is None else number("softmax_scale", softmax_scale),
        logits_soft_cap=logits_soft_cap,
        sinks=None if softmax_aux is None else sinks_of_heads(softmax_aux, sizes.N, sizes.K),
        q_segment_ids=q_segment_ids,
        kv_segment_ids=None if kv_segment_ids is None else shards.gather(kv_segment_ids, -1),
    )
    if fused_backward:
        call |= _fused(q, k, v, sizes, call)
    return jnp.swapaxes(dot_product_attention(q, k, v, **call), 1, 2)


def _by_token(
    query: Any, key: Any, value: Any, shards: _Shards
) -> tuple[Array, Array, Array, Sizes]:
    """[B, T, N, H] of [B, N, T, H], with the keys and values of all devices."""
    by_token = []
    for name, x in (("query", query), ("key", key), ("value", value)):
        x = as_array(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, heads, tokens, H], got shape {list(x.shape)}")
        by_token.append(jnp.swapaxes(x, 1, 2))
    q, k, v = by_token
    q, k, v, _ = check_qkv(q, shards.gather(k, 1), shards.gather(v, 1))
    return q, k, v, Sizes.of(q, k, v)


@dataclasses.dataclass(frozen=True)
class _Shards:
    """The shards of a sequence over the devices of a mesh axis; None: there is one.

    `parallel.context_attention` would send less, but it takes neither a bias nor blocks that lie on
    two devices, and both are arguments here.
    """

    axis: str | None

    def count(self) -> int:
        if self.axis is None:
            return 1
        if not isinstance(self.axis, str):
            raise TypeError(
                "sequence_parallelism_mesh_axis_name must be the name of a mesh axis, got "
                f"{self.axis!r}"
            )
        try:
            return lax.axis_size(self.axis)
        except NameError:
            raise ValueError(
                f"sequence_parallelism_mesh_axis_name={self.axis!r} is not an axis of a "
                "surrounding jax.shard_map; call it there, or leave the argument out"
            ) from None

    def gather(self, x: Any, axis: int) -> Any:
        """The shards of all devices, in order."""
        if self.count() == 1:
            return x
        return lax.all_gather(x, self.axis, axis=axis % jnp.ndim(x), tiled=True)

    def rows(self, T: int) -> tuple[Any, int] | None:
        """(index of the first, number) of this device's queries; None: it has all of them."""
        return None if self.count() == 1 else (lax.axis_index(self.axis) * T, T)

    def q_indices(self, T: int) -> Array | None:
        """int [1, T], this device's queries in the whole sequence; None: arange."""
        rows = self.rows(T)
        return None if rows is None else (rows[0] + jnp.arange(T, dtype=jnp.int32))[None]


# -------------------------------------------------------------------------------------------- masks


def _limits(
    causal: bool, window: Any, q_positions: Any, kv_positions: Any, sizes: Sizes, shards: _Shards
) -> Rule:
    """What compares positions."""
    rule = window_rule(window) & (masks.causal() if causal else masks.everything())
    q = per_token("q_positions", q_positions, sizes.B, sizes.T)
    if kv_positions is not None:
        kv_positions = shards.gather(kv_positions, -1)
    kv = per_token("kv_positions", kv_positions, sizes.B, sizes.S)
    return masks.at_positions(rule, shards.q_indices(sizes.T) if q is None else q, kv)


def token_mask(mask: Any) -> Rule:
    """A rule of a bool or integer array, [B, T, S] or [B, N|1, T, S]; 0 hides the key."""
    mask = as_array("attention_mask", mask)
    if not (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise TypeError(
            f"attention_mask must be bool or integer (an additive mask goes to bias), got "
            f"{mask.dtype}"
        )
    if mask.ndim not in (3, 4):
        raise ValueError(
            f"attention_mask must be [B, T, S] or [B, N|1, T, S], got shape {list(mask.shape)}"
        )
    shown = visible("attention_mask", mask)
    return masks.array(shown if mask.ndim == 4 else shown[:, None])


def _built(builder: Any, layouts: Any, sizes: Sizes, shards: _Shards) -> tuple[Any, Rule]:
    """(layouts, rule): what a mask builder returns is one or the other."""
    if builder is None:
        return layouts, masks.everything()
    if layouts is not None:
        raise ValueError(
            "mask_builder and qkv_layouts are both given, and each says which blocks to visit; "
            "leave one out"
        )
    layouts = layouts_of(builder)
    if layouts is not None:
        return layouts, masks.everything()
    lengths = (sizes.T * shards.count(), sizes.S)
    rule = rule_of_heads(builder, lengths, sizes.N, sizes.N // sizes.K, shards.rows(sizes.T))
    return None, masks.at_positions(rule, shards.q_indices(sizes.T))


def _mask(
    rule: Rule, layouts: Any, block: tuple[int, int] | None, sizes: Sizes
) -> BlockMask | Rule:
    """The mask in the blocks asked for; without any, the rule, for which the door has a size."""
    if 0 in (sizes.B, sizes.T, sizes.S) or (layouts is None and block is None):
        return rule
    shape = (sizes.T, sizes.S)
    block = block or (DEFAULT, DEFAULT)
    if layouts is not None:
        return block_mask(layouts, rule, Grid(shape, block, sizes.B, sizes.N))
    return BlockMask.from_rule(rule, shape, batch=sizes.B, heads=sizes.N, block=block)


# ----------------------------------------------------------------------------------- other settings


def sinks_of_heads(softmax_aux: Any, N: int, K: int) -> Array:
    """[N, M]. Of one axis: N or K numbers are one sink for each head, others serve every head.

    This is how ejkernel's XLA and CUDA kernels read them, and its TPU kernel [N]; its Triton
    kernel takes one axis for every head always.
    """
    aux = as_array("softmax_aux", softmax_aux)
    if not jnp.issubdtype(aux.dtype, jnp.floating):
        raise TypeError(f"softmax_aux must be floating, got {aux.dtype}")
    if aux.ndim == 1 and aux.shape[0] in (N, K):
        aux = aux[:, None]
    elif aux.ndim == 1 and aux.size:
        return jnp.broadcast_to(aux, (N, aux.shape[0]))
    if aux.ndim == 2 and aux.shape[0] in (N, K) and aux.size:
        return jnp.repeat(aux, N // aux.shape[0], axis=0)
    raise ValueError(
        f"softmax_aux must be [N], [K], [N, M] or [K, M] with N = {N} and K = {K}, or [M] for "
        f"every head, got shape {list(aux.shape)}"
    )


def _fused(q: Array, k: Array, v: Array, sizes: Sizes, call: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the door for one kernel for all gradients, which only `hopper` has."""
    if max(sizes.H, sizes.Hv) > FUSED_SIZE:
        raise ValueError(
            f"fused_backward=True takes head sizes up to {FUSED_SIZE}, got {sizes.H} of query and "
            f"{sizes.Hv} of value; leave it False"
        )
    if call["bias"] is not None:
        raise ValueError(
            "fused_backward=True takes no bias, whose gradient has a kernel of its own; leave it "
            "False"
        )
    if reason := explain(q, k, v, **call).reasons["hopper"]:
        raise ValueError(
            f"fused_backward=True needs the backend hopper, which {reason}; leave it False"
        )
    options = Options(hopper_backward=BackwardTiling(fused=True))
    return {"options": options, "implementation": "hopper"}
