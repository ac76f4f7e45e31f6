"""BlockSparseAttn: EasyDeL's operation "blocksparse", and the registry that it is in.

    BlockSparseAttn(metadata)(query [B, T, N, H], key, value, mask_info=…)
        └─ forward_native ─┬─ shard_map over batch rows and heads, if there is a mesh
                           └─ ejkernel.blocksparse_attention ─ AttentionOutput

forward_cpu, forward_gpu, forward_cuda, forward_rocm, forward_tpu and forward_tt all call
forward_native, in which `dot_product_attention` chooses the backend.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float

from xsake.arguments import Tensor, check_bias, check_qkv
from xsake.backends import Sizes
from xsake.integrations.easydel.mask_info import last_seen, mask_arrays
from xsake.integrations.easydel.metadata import OPERATION, OperationMetadata
from xsake.integrations.ejkernel import blocksparse_attention
from xsake.integrations.ejkernel.blocksparse import sinks_of_heads
from xsake.integrations.flax.attend import check_precision
from xsake.integrations.meshes import over_mesh
from xsake.masks.rule import Leaf

__all__ = ["AttentionOutput", "BlockSparseAttn", "OperationRegistry"]


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
        if impl_name not in list(cls._registry):
            raise ValueError(f"operation {impl_name!r} is not one of {list(cls._registry)}")
        return cls._registry[impl_name]

    @classmethod
    def create(cls, impl_name: str, metadata: Any, requires_cache: bool | None = None) -> Any:
        """An operation with its metadata, in which requires_cache is set if it is given."""
        if requires_cache is not None:
            given = OperationMetadata.of(metadata)
            metadata = dataclasses.replace(given, requires_cache=requires_cache)
        return cls.get(impl_name)(metadata)

    @classmethod
    def list_implementations(cls) -> list[str]:
        """The names."""
        return list(cls._registry)


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

    def __init__(self, metadata: Any) -> None:
        self.metadata = metadata
        self._settings = OperationMetadata.of(metadata)

    @classmethod
    def get_impl_name(cls) -> str:
        """The name it is registered under: "blocksparse"."""
        return OPERATION

    def get_impl_metadata(self) -> Any:
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
          softmax_aux: logits that join the softmax's denominator once: [N] or [K], one for each
            head or kv head; [N, M] or [K, M]; or any other number of them, [M], for every head.
          mask_info: a MaskInfo, or an object with its attributes, such as ejkernel's.
          logits_soft_cap: cap · tanh(logits / cap).
          softmax_scale: default that of the metadata, or 1/sqrt(H).
          sliding_window: w or (left, right): keys q - left … q + right; -1 or None = no limit.
          causal: a query sees keys at its own position and before.
          fused_backward: as in `ejkernel.blocksparse_attention`.
          cache_metadata: of EasyDeL's dense cache, of which nothing is needed: key and value must
            be the cached ones. That of pages is refused.
          **others: what EasyDeL's models pass to every operation. bias [B|1, N|1, T|1, S|1] is
            added, and init_bias() gives it where there is neither bias nor mask_info. Arguments
            that would change the result otherwise are refused.
        """
        init_bias = others.pop("init_bias", None)
        bias = others.pop("bias", None)
        _check_others({"cache_metadata": cache_metadata, **others})
        given = self._settings
        if given.runtime_dtype is not None:
            query, key, value = (jnp.asarray(x, given.runtime_dtype) for x in (query, key, value))
        q, k, v, is_unbatched = check_qkv(query, key, value)
        if is_unbatched:
            raise ValueError(f"query must be [B, T, N, H], got shape {list(q.shape[1:])}")
        sizes = Sizes.of(q, k, v)
        arrays: dict[str, Any] = mask_arrays(mask_info, sizes)
        if bias is None and mask_info is None and init_bias is not None:
            bias = init_bias()
        if bias is not None:
            arrays["bias"] = check_bias(sizes, bias)
        if softmax_aux is not None:
            arrays["softmax_aux"] = sinks_of_heads(softmax_aux, sizes.N, sizes.K)
        if sizes.T == 1 < sizes.S and "q_positions" not in arrays:
            arrays["q_positions"] = last_seen(arrays, sizes.B, sizes.S)
        attend: Any = functools.partial(
            _attend,
            logits_soft_cap=logits_soft_cap,
            softmax_scale=given.softmax_scale if softmax_scale is None else softmax_scale,
            sliding_window=sliding_window,
            causal=causal,
            fused_backward=fused_backward,
            **given.block_sizes(sizes.T),
        )
        if given.mesh is not None:
            attend = self._sharded(attend, arrays, sizes)
        return AttentionOutput(attention_outputs=attend(q, k, v, arrays))

    def _sharded(self, attend: Any, arrays: dict[str, Array], sizes: Sizes) -> Any:
        """The function under shard_map over batch rows and heads."""
        given = self._settings
        batch, heads = given.axes(sizes.B, sizes.T, sizes.K)
        for what, size, axes, remedy in (
            ("batch rows", sizes.B, batch, "pad them"),
            ("key/value heads", sizes.K, heads, f"repeat them to {sizes.N} heads"),
        ):
            if size % given.devices(axes):
                raise ValueError(
                    f"{size} {what} cannot be sharded over {given.devices(axes)} devices of mesh "
                    f"axis {axes!r}; {remedy}, or shard over fewer devices"
                )

        def spec(name: str, x: Array) -> PartitionSpec:
            if name == "softmax_aux":
                return PartitionSpec(heads, None)
            rows = None if x.shape[0] == 1 else batch
            if x.ndim == 2:
                return PartitionSpec(rows, None)
            return PartitionSpec(rows, None if x.shape[1] == 1 else heads, None, None)

        tokens = PartitionSpec(batch, None, heads, None)
        specs = {name: spec(name, x) for name, x in arrays.items()}
        return over_mesh(attend, given.mesh, (tokens, tokens, tokens, specs), tokens)

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

    def forward_tt(self, *args: Any, **kwargs: Any) -> AttentionOutput:
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


# Arguments that EasyDeL's models pass to every operation and that change no result here: how its
# kernels work, what XLA recomputes, and the random numbers of a dropout that is off.
WITHOUT_MEANING = ("prevent_cse", "optimized", "policy", "vmem_limit_bytes", "dropout_rng")


def _check_others(others: dict[str, Any]) -> None:
    """Raises for arguments of other operations that would change the result."""
    others = {x: y for x, y in others.items() if y is not None and x not in WITHOUT_MEANING}
    for name in ("cache_metadata", "cache_view"):
        _check_cache(name, others.pop(name, None))
    check_precision(others.pop("precision", None))
    is_off = others.pop("deterministic", False)
    if (rate := others.pop("dropout_prob", 0)) and not is_off:
        raise NotImplementedError(
            f"dropout_prob={rate} would drop attention weights, which XSAKE does not support; pass "
            "deterministic=True, and apply dropout to the output"
        )
    if others.pop("normalize_output", True) is not True:
        raise NotImplementedError(
            "normalize_output=False asks for sums that the softmax has not divided; leave it True"
        )
    for name in others:
        if name.startswith("cum_seqlens"):
            raise TypeError(
                f"{name} is not read here; give packed sequences as segments: "
                "mask_info=MaskInfo.from_segments(…)"
            )
        remedy = "sinks go to softmax_aux" if name == "sinks" else "leave it out"
        raise TypeError(
            f"{name} is not an argument of this operation, which would change nothing; {remedy}"
        )


def _check_cache(name: str, cache: Any) -> None:
    """EasyDeL's dense cache needs nothing more than key, value and mask_info; pages would."""
    if cache is not None and not (hasattr(cache, "indexs") and hasattr(cache, "starts")):
        raise ValueError(
            f"{name} is {type(cache).__name__}, and pages of a cache are not read here; give the "
            "cached key and value, and a mask_info that shows which of them are filled"
        )
