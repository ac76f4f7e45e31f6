"""Native Sparse Attention (NSA), and MoBA and MSA, which differ in what scores a block.

Modules:

attention.py    native_sparse_attention: three branches and their gates
compress.py     pooled keys and values; attention to them
select.py       scores of blocks → the blocks of each query
selected.py     attention to each query's own blocks; its backends
sequences.py    packed sequences
"""

from xsake.nsa.attention import apply_native_sparse_attention, native_sparse_attention
from xsake.nsa.compress import mlp_pooling, weighted_pooling

__all__ = [
    "apply_native_sparse_attention",
    "mlp_pooling",
    "native_sparse_attention",
    "weighted_pooling",
]
