"""EasyDeL's block-sparse attention operation, on every platform.

    OperationMetadata, or EasyDeL's own          metadata.py ─┐
    MaskInfo: segments, positions, a mask       mask_info.py ─┼─ BlockSparseAttn   operation.py
    query, key, value [B, T, N, H] ───────────────────────────┘        │
    AttentionOutput ◀─ ejkernel.blocksparse_attention ◀─ shard_map over the mesh, if there is one

EasyDeL itself is not imported. docs/migrate-easydel.md lists what every setting does here.
"""

from xsake.integrations.easydel.mask_info import MaskInfo
from xsake.integrations.easydel.metadata import OperationMetadata
from xsake.integrations.easydel.operation import (
    AttentionOutput,
    BlockSparseAttn,
    OperationRegistry,
)

__all__ = [
    "AttentionOutput",
    "BlockSparseAttn",
    "MaskInfo",
    "OperationMetadata",
    "OperationRegistry",
]
