"""EasyDeL's block-sparse attention operation, on every platform.

    OperationMetadata ─ BlockSparseAttn(metadata) ─ registered as "blocksparse"
                             │
    query [B, T, N, H], … ───┴─ forward_native ─┬─ shard_map over metadata.mesh, if there is one
    MaskInfo: segments, positions, a mask       └─ ejkernel.blocksparse_attention ─ AttentionOutput

forward_cpu, forward_gpu, forward_cuda, forward_rocm and forward_tpu all call forward_native, in
which `dot_product_attention` chooses the backend. EasyDeL itself is not imported.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float

from xsake.attention import Tensor, check_qkv
from xsake.integrations.ejkernel import blocksparse_attention
from xsake.integrations.ejkernel.blocksparse import sinks_of_heads
from xsake.masks.integers import int_array
from xsake.masks.rule import Leaf

__all__ = [
    "AttentionOutput",
    "BlockSparseAttn",
    "MaskInfo",
    "OperationMetadata",
    "OperationRegistry",
]


@dataclasses.dataclass(frozen=True)
class OperationMetadata:
    """Settings of an operation.

    Attributes:
      runtime_dtype: query, key and value are cast to it, and the output has it; None: as they come.
      softmax_scale: for calls that give none; default 1/sqrt(H).
      blocksize_q: tokens of a row block. Default: chosen by `dot_product_attention`.
      blocksize_k: tokens of a kv block.
      mesh: devices that batch rows and heads are sharded over; None: a plain call.
      partition_spec: of [B, T, N, H] on the mesh; T and H stay whole.
    """

    runtime_dtype: Any = None
    softmax_scale: float | None = None
    blocksize_q: int | None = None
    blocksize_k: int | None = None
    mesh: Any = None  # jax.sharding.Mesh
    partition_spec: PartitionSpec | None = None

    def __post_init__(self) -> None:
        _, tokens, _, features = self._axes
        if tokens is not None or features is not None:
            raise ValueError(
                f"partition_spec {self.partition_spec} shards tokens or features of [B, T, N, H]; "
                "shard batch rows and heads: PartitionSpec(batch, None, heads, None)"
            )
        if self.mesh is None and self.partition_spec is not None:
            raise ValueError(f"partition_spec {self.partition_spec} needs the mesh that it names")

    @property
    def _axes(self) -> tuple[Any, ...]:
        given = () if self.partition_spec is None else tuple(self.partition_spec)
        return given + (None,) * (4 - len(given))

    @property
    def batch_axis(self) -> Any:
        """The mesh axis, or axes, of batch rows."""
        return self._axes[0]

    @property
    def heads_axis(self) -> Any:
        """The mesh axis, or axes, of heads."""
        return self._axes[2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MaskInfo:
    """Which keys a query sees: equal segment ids, and an attention mask; both apply.

    Attributes:
      attention_mask: bool or integers, [B, N|1, T, S]; 0 hides the key.
      q_segment_ids: int [B, T]; negative = padding.
      kv_segment_ids: int [B, S].
      q_positions: int [B, T], what causal and sliding_window compare; default arange.
      kv_positions: int [B, S].
    """

    attention_mask: Leaf = None
    q_segment_ids: Leaf = None
    kv_segment_ids: Leaf = None
    q_positions: Leaf = None
    kv_positions: Leaf = None

    @classmethod
    def from_segments(
        cls,
        q_segment_ids: Any,
        kv_segment_ids: Any = None,
        q_positions: Any = None,
        kv_positions: Any = None,
    ) -> MaskInfo:
        """Of segment ids; those of keys default to those of queries."""
        kv = q_segment_ids if kv_segment_ids is None else kv_segment_ids
        return cls(None, q_segment_ids, kv, q_positions, kv_positions)

    @classmethod
    def from_attention_mask(
        cls, attention_mask: Any, q_positions: Any = None, kv_positions: Any = None
    ) -> MaskInfo:
        """Of a mask [B, N|1, T, S] or [B, T, S], or of a padding mask [B, T], 0 = padding."""
        mask = jnp.asarray(attention_mask)
        if mask.ndim == 2:
            return cls.from_segments(jnp.where(mask != 0, 0, -1), None, q_positions, kv_positions)
        return cls(mask, None, None, q_positions, kv_positions)


MASK_FIELDS = tuple(field.name for field in dataclasses.fields(MaskInfo))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionOutput:
    """The result: outputs [B, T, N, Hv]. Weights are never held as a whole; there is no cache."""

    attention_weights: Leaf = None
    attention_outputs: Leaf = None
    cache_view: Leaf = None


Operation = TypeVar("Operation")


class OperationRegistry:
    """Operations by name."""

    _registry: ClassVar[dict[str, type[Any]]] = {}

    @classmethod
    def register(cls, operation: Operation) -> Operation:
        """A class decorator: registers under what `get_impl_name` returns."""
        registered: Any = operation
        names = registered.get_impl_name()
        for name in (names,) if isinstance(names, str) else names:
            cls._registry[name] = registered
        return operation

    @classmethod
    def get(cls, impl_name: str) -> type[Any]:
        """The class that is registered under a name."""
        if impl_name not in cls._registry:
            raise ValueError(f"operation {impl_name!r} is not one of {list(cls._registry)}")
        return cls._registry[impl_name]

    @classmethod
    def create(cls, impl_name: str, metadata: Any) -> Any:
        """An operation with its metadata."""
        return cls.get(impl_name)(metadata)


@OperationRegistry.register
class BlockSparseAttn:
    """Block-sparse attention as an operation; the same function on every platform.

    >>> import jax.numpy as jnp
    >>> from xsake.integrations.easydel import BlockSparseAttn, OperationMetadata
    >>> attend = BlockSparseAttn(OperationMetadata(runtime_dtype=jnp.bfloat16, blocksize_q=64))
    >>> query, key = jnp.ones((2, 48, 4, 16)), jnp.ones((2, 48, 2, 16))
    >>> attend(query, key, key, causal=True).attention_outputs.shape
    (2, 48, 4, 16)
    """

    def __init__(self, metadata: OperationMetadata) -> None:
        self.metadata = metadata

    @classmethod
    def get_impl_name(cls) -> str:
        """The name it is registered under: "blocksparse"."""
        return "blocksparse"

    def get_impl_metadata(self) -> OperationMetadata:
        """The metadata given to the constructor."""
        return self.metadata

    def forward_native(
        self,
        query: Float[Tensor, "B T N H"],
        key: Float[Tensor, "B S K H"],
        value: Float[Tensor, "B S K Hv"],
        softmax_aux: Float[Tensor, ...] | None = None,
        mask_info: Any = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        sliding_window: Any = None,
        causal: bool = True,
        fused_backward: bool = False,
        cache_metadata: Any = None,
        **others: Any,
    ) -> AttentionOutput:
        """Attention of query to key and value.

        One query and several keys are a step of decoding: unless q_positions are given, the query
        is at the position of the last key that mask_info shows it.

        Args:
          query: [B, T, N, H].
          key: [B, S, K, H]; K divides N.
          value: [B, S, K, Hv].
          softmax_aux: logits that join the softmax's denominator once: [M] for every head, or
            [K, M] or [N, M].
          mask_info: a MaskInfo, or an object with its attributes, such as ejkernel's.
          logits_soft_cap: cap · tanh(logits / cap).
          softmax_scale: default that of the metadata, or 1/sqrt(H).
          sliding_window: w or (left, right): keys q - left … q + right; -1 or None = no limit.
          causal: a query sees keys at its own position and before.
          fused_backward: as in `ejkernel.blocksparse_attention`.
          cache_metadata: refused; key and value must be the cached ones.
          **others: refused, unless None.
        """
        _refuse(cache_metadata=cache_metadata, **others)
        given = self.metadata
        if given.runtime_dtype is not None:
            query, key, value = (jnp.asarray(x, given.runtime_dtype) for x in (query, key, value))
        q, k, v, _ = check_qkv(query, key, value)
        N, K = q.shape[2], k.shape[2]
        arrays = _mask_arrays(mask_info)
        if softmax_aux is not None:
            arrays["softmax_aux"] = sinks_of_heads(softmax_aux, N, K)
        if q.shape[1] == 1 < k.shape[1] and "q_positions" not in arrays:
            arrays["q_positions"] = _last_seen(arrays, q.shape[0], k.shape[1])
        attend = functools.partial(
            _attend,
            logits_soft_cap=logits_soft_cap,
            softmax_scale=given.softmax_scale if softmax_scale is None else softmax_scale,
            sliding_window=sliding_window,
            causal=causal,
            fused_backward=fused_backward,
            q_blocksize=None if q.shape[1] == 1 else given.blocksize_q,
            kv_blocksize=given.blocksize_k,
        )
        if given.mesh is not None:
            attend = self._sharded(attend, arrays, N, K)
        return AttentionOutput(attention_outputs=attend(q, k, v, arrays))

    def _sharded(self, attend: Any, arrays: dict[str, Array], N: int, K: int) -> Any:
        """The function under shard_map over batch rows and heads."""
        given = self.metadata
        batch, heads = given.batch_axis, given.heads_axis
        names = heads if isinstance(heads, tuple) else (heads,)
        count = int(np.prod([given.mesh.shape[name] for name in names if name is not None]))
        if K % count:
            raise ValueError(
                f"{K} key/value heads cannot be sharded over {count} devices of mesh axis "
                f"{heads!r}; repeat them to {N} heads, or shard over fewer devices"
            )

        def spec(name: str, x: Array) -> PartitionSpec:
            if name == "softmax_aux":
                return PartitionSpec(heads, None)
            rows = None if x.shape[0] == 1 else batch
            if name != "attention_mask":
                return PartitionSpec(rows, None)
            return PartitionSpec(rows, None if x.shape[1] == 1 else heads, None, None)

        tokens = PartitionSpec(batch, None, heads, None)
        specs = {name: spec(name, x) for name, x in arrays.items()}
        return jax.shard_map(
            attend,
            mesh=given.mesh,
            in_specs=(tokens, tokens, tokens, specs),
            out_specs=tokens,
            check_vma=False,
        )

    def forward_cpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """`forward_native`."""
        return self.forward_native(*args, **kwargs)

    def forward_gpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """`forward_native`."""
        return self.forward_native(*args, **kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """`forward_native`."""
        return self.forward_native(*args, **kwargs)

    def forward_rocm(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """`forward_native`."""
        return self.forward_native(*args, **kwargs)

    def forward_tpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """`forward_native`."""
        return self.forward_native(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """The forward method of the platform that JAX runs on."""
        forward = getattr(self, f"forward_{jax.default_backend()}", self.forward_native)
        return forward(*args, **kwargs)


def _attend(q: Array, k: Array, v: Array, arrays: dict[str, Array], **settings: Any) -> Array:
    """[B, T, N, Hv] of [B, T, N, H], on one device."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    settings |= arrays
    return jnp.swapaxes(blocksparse_attention(q, k, v, **settings), 1, 2)


def _refuse(**others: Any) -> None:
    for name, value in others.items():
        if value is None:
            continue
        if name == "cache_metadata":
            raise ValueError(
                "cache_metadata is not read here; give the cached key and value, and a mask_info "
                "that shows which of them are filled"
            )
        raise TypeError(
            f"{name} is not an argument of this operation, which would change nothing; leave it out"
        )


def _mask_arrays(info: Any) -> dict[str, Array]:
    """The arrays of a MaskInfo by name, 4-D masks and 2-D ids.

    ejkernel's MaskInfo derives what it was not given, and loses most masks on the way: what it was
    given has an underscore before its name.
    """
    if info is None:
        return {}
    if not any(hasattr(type(info), name) or hasattr(info, name) for name in MASK_FIELDS):
        raise TypeError(f"mask_info must be a MaskInfo, got {type(info).__name__}")
    found = {}
    for name in MASK_FIELDS:
        stored = f"_{name}" if hasattr(info, f"_{name}") else name
        x = getattr(info, stored, None)
        if x is None:
            continue
        if name == "attention_mask":
            x = jnp.asarray(x)
            found[name] = x[:, None] if x.ndim == 3 else x
        else:
            found[name] = int_array(f"mask_info.{name}", x, 2)
    return found


def _last_seen(arrays: dict[str, Array], B: int, S: int) -> Array:
    """int [B, 1]: the position of the last key that the mask and the segments show the query."""
    seen = jnp.ones((B, S), bool)
    if (mask := arrays.get("attention_mask")) is not None:
        seen = seen & (mask[:, :, 0] != 0).any(1)
    if (kv_ids := arrays.get("kv_segment_ids")) is not None:
        q_ids = arrays.get("q_segment_ids", kv_ids)
        seen = seen & (kv_ids == q_ids) & (kv_ids >= 0)
    at = arrays.get("kv_positions", jnp.arange(S, dtype=jnp.int32)[None])
    lowest = jnp.iinfo(at.dtype).min
    return jnp.where(seen, at, lowest).max(-1, keepdims=True)
