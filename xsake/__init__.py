"""XSAKE: attention for JAX that visits only the blocks that matter."""

from xsake import masks, nsa
from xsake.attention import (
    Explanation,
    dot_product_attention,
    explain,
    explain_calls,
    observed_attention,
)
from xsake.backends.options import Options
from xsake.block_mask import BlockMask
from xsake.nsa import apply_native_sparse_attention, native_sparse_attention

__all__ = [
    "BlockMask",
    "Explanation",
    "Options",
    "apply_native_sparse_attention",
    "dot_product_attention",
    "explain",
    "explain_calls",
    "masks",
    "native_sparse_attention",
    "nsa",
    "observed_attention",
]
__version__ = "0.1.0"
