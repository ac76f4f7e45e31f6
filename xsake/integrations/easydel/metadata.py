"""OperationMetadata: the settings of an operation, and what is read of EasyDeL's own.

    kept          runtime_dtype, softmax_scale, block sizes, mesh with partition_spec or
                  partition_axis, operation_configs["blocksparse"], requires_cache
    refused       dropout_prob above 0, a softmax dtype other than float32
    no meaning    platform, backend, sequence_axis_name, scan_ring_attention, blocksize_b

A setting without meaning here changes no result: it selects among EasyDeL's kernels, or belongs to
another operation. It is accepted, so that a config of EasyDeL can be passed on as it is.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from xsake.arguments import floating_dtype, number

__all__ = ["OperationMetadata"]

OPERATION = "blocksparse"  # its name in EasyDeL's registry


@dataclasses.dataclass(frozen=True)
class OperationMetadata:
    """Settings of an operation.

    Attributes:
      runtime_dtype: query, key and value are cast to it, and the output has it; None: as they come.
      runtime_softmax_dtype: float32, in which the softmax always is; another one is refused.
      softmax_scale: for calls that give none; default 1/sqrt(H).
      dropout_prob: 0; XSAKE does not drop attention weights.
      blocksize_q: tokens of a row block. Default: chosen by `dot_product_attention`.
      blocksize_k: tokens of a kv block.
      mesh: devices that batch rows and heads are sharded over; None: a plain call.
      partition_spec: of [B, T, N, H] on the mesh; T and H stay whole.
      partition_axis: instead of a partition_spec, an object with `batch_axis` and `head_axis`, such
        as EasyDeL's PartitionAxis. A mesh axis that does not divide B or K is left out.
      operation_configs: {"blocksparse": an object with fwd_params and bwd_params}, as those of
        `ejkernel.blocksparse_attention`.
      base_config: a model's config, for what is not given here: attn_dtype, attn_softmax_dtype,
        mesh, partition_axis, operation_configs.
      requires_cache: for EasyDeL's inference engine; nothing here reads it.
      platform: without meaning here, as are the following.
      backend: of EasyDeL; `xsake.explain_calls` shows which of XSAKE's backends runs.
      sequence_axis_name: of EasyDeL's ring attention.
      scan_ring_attention: likewise.
      blocksize_b: batch rows of a block.
    """

    runtime_dtype: Any = None
    runtime_softmax_dtype: Any = None
    softmax_scale: float | None = None
    dropout_prob: float = 0.0
    blocksize_q: int | None = None
    blocksize_k: int | None = None
    mesh: Any = None  # jax.sharding.Mesh
    partition_spec: Any = None  # PartitionSpec
    partition_axis: Any = None
    operation_configs: Any = None
    base_config: Any = None
    requires_cache: bool | None = None
    platform: Any = None
    backend: Any = None
    sequence_axis_name: Any = None
    scan_ring_attention: Any = None
    blocksize_b: Any = None

    def __post_init__(self) -> None:
        if self.base_config is not None:
            self._take_from_config()
        _check_dtypes(self.runtime_dtype, self.runtime_softmax_dtype)
        if self.softmax_scale is not None:
            number("softmax_scale", self.softmax_scale)
        if self.dropout_prob:
            raise NotImplementedError(
                f"dropout_prob={self.dropout_prob} would drop attention weights, which XSAKE does "
                "not support; leave it 0, and apply dropout to the output"
            )
        if self.mesh is not None and not hasattr(self.mesh, "shape"):
            raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(self.mesh).__name__}")
        self._check_partition()

    def _take_from_config(self) -> None:
        """What is not given, by the names that a model's config has for it."""
        names = {
            "runtime_dtype": "attn_dtype",
            "runtime_softmax_dtype": "attn_softmax_dtype",
            "operation_configs": "operation_configs",
        }
        if self.partition_spec is None:
            names |= {"mesh": "mesh", "partition_axis": "partition_axis"}
        for name, theirs in names.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.base_config, theirs, None))

    def _check_partition(self) -> None:
        spec = self.partition_spec
        if spec is None:
            return
        if not isinstance(spec, PartitionSpec) or len(spec) > 4:
            raise ValueError(
                f"partition_spec must be a PartitionSpec of up to 4 axes, those of [B, T, N, H], "
                f"got {spec!r}"
            )
        batch, tokens, heads, features = [*spec, None, None, None, None][:4]
        if tokens is not None or features is not None:
            raise ValueError(
                f"partition_spec {spec} shards tokens or features of [B, T, N, H]; "
                "shard batch rows and heads: PartitionSpec(batch, None, heads, None)"
            )
        if self.mesh is None:
            raise ValueError(f"partition_spec {spec} needs the mesh that it names")
        for axis in (*_names(batch), *_names(heads)):
            if axis not in self.mesh.shape:
                raise ValueError(
                    f"partition_spec {spec} names the axis {axis!r}, but the mesh has "
                    f"{list(self.mesh.shape)}"
                )

    @classmethod
    def from_config(cls, config: Any) -> OperationMetadata:
        """Of a model's config, such as EasyDeL's: what `base_config` gives."""
        if not hasattr(config, "attn_dtype"):
            raise TypeError(
                "config must be a model's config with attn_dtype, as EasyDeL's are, got "
                f"{type(config).__name__}"
            )
        return cls(base_config=config)

    @classmethod
    def of(cls, metadata: Any) -> OperationMetadata:
        """These settings as they are, or those of EasyDeL's own OperationMetadata."""
        if isinstance(metadata, cls):
            return metadata
        if not hasattr(metadata, "runtime_dtype"):
            raise TypeError(
                "metadata must be an OperationMetadata, of XSAKE or of EasyDeL, got "
                f"{type(metadata).__name__}"
            )
        fields: dict[str, Any] = {x.name: getattr(metadata, x.name, None) for x in FIELDS}
        fields["dropout_prob"] = fields["dropout_prob"] or 0.0
        return cls(**fields)

    def axes(self, B: int, T: int, K: int) -> tuple[Any, Any]:
        """The mesh axes, a name, several or None, of batch rows and of heads."""
        if self.partition_spec is not None:
            batch, _, heads, _ = [*self.partition_spec, None, None, None, None][:4]
            return batch, heads
        if self.partition_axis is None:
            return None, None
        decode = "decode_" if T == 1 else ""
        given = [self._named_axes(f"{decode}{name}") for name in ("batch_axis", "head_axis")]
        return tuple(map(self._dividing, given, (B, K)))  # type: ignore[return-value]

    def _named_axes(self, name: str) -> tuple[str, ...]:
        """Mesh axes that partition_axis, an object or a dict, has under a name.

        Names that begin with decode_ default to those without.
        """
        axis = self.partition_axis
        read = axis.get if isinstance(axis, dict) else lambda x: getattr(axis, x, None)
        found = _names(read(name) or read(name.removeprefix("decode_")))
        return tuple(x for x in found if x in self.mesh.shape)

    def _dividing(self, axes: tuple[str, ...], size: int) -> tuple[str, ...] | None:
        """The axes, without those over whose devices `size` cannot be divided."""
        kept: tuple[str, ...] = ()
        for axis in axes:
            if size % self.devices((*kept, axis)) == 0:
                kept = (*kept, axis)
        return kept or None

    def devices(self, axes: Any) -> int:
        """How many devices the mesh has along some axes."""
        return math.prod(self.mesh.shape[name] for name in _names(axes))

    def block_sizes(self, T: int) -> dict[str, Any]:
        """Arguments of `ejkernel.blocksparse_attention`; one query has no row blocks."""
        configs = self.operation_configs
        if configs is not None and not isinstance(configs, dict):
            raise TypeError(
                f"operation_configs must be a dict by operation, got {type(configs).__name__}"
            )
        config = (configs or {}).get(OPERATION)
        sizes = {"q_blocksize": self.blocksize_q, "kv_blocksize": self.blocksize_k}
        for name in ("fwd_params", "bwd_params"):
            sizes[name] = getattr(config, name, None)
        return sizes if T > 1 else {"kv_blocksize": self.blocksize_k}


FIELDS = dataclasses.fields(OperationMetadata)


def _names(axes: Any) -> tuple[str, ...]:
    """Names of mesh axes, of an entry of a PartitionSpec."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _check_dtypes(runtime: Any, softmax: Any) -> None:
    for name, dtype in (("runtime_dtype", runtime), ("runtime_softmax_dtype", softmax)):
        if dtype is None:
            continue
        found = floating_dtype(name, dtype)
        if name == "runtime_softmax_dtype" and found != np.float32:
            raise ValueError(
                f"{name} is {found}, but the softmax is always in float32; give float32 or None"
            )
