"""ejkernel's block-sparse and native sparse attention: its names, arguments and shapes.

    blocksparse_attention(query [B, N, T, H], …)        blocksparse.py ─┐
      FwdParams, BwdParams, chunk_size                  block_sizes.py ─┤
      SparseMask, create_sparsity_mask, qkv_layouts     sparse_mask.py ─┼─ dot_product_attention
      mask_builder                                      builders.py ────┘
    native_sparse_attention(query [B, T, N, H], …)      native_sparse.py ── xsake.nsa

An argument does what ejkernel's documentation says, or is refused. docs/migrate-ejkernel.md lists
what differs. ejkernel itself is not imported.
"""

from xsake.integrations.ejkernel.block_sizes import BwdParams, FwdParams
from xsake.integrations.ejkernel.blocksparse import blocksparse_attention
from xsake.integrations.ejkernel.native_sparse import (
    apply_native_sparse_attention,
    native_sparse_attention,
)
from xsake.integrations.ejkernel.sparse_mask import SparseMask, create_sparsity_mask

__all__ = [
    "BwdParams",
    "FwdParams",
    "SparseMask",
    "apply_native_sparse_attention",
    "blocksparse_attention",
    "create_sparsity_mask",
    "native_sparse_attention",
]
