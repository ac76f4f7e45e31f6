"""Native Sparse Attention (NSA), and MoBA and MSA, which differ in what scores a block.

Modules:

    attention.py    native_sparse_attention: three branches and their gates
    compress.py     pooled keys and values; attention to them
    select.py       scores of blocks → the blocks of each query
    selected.py     attention to each query's own blocks; its backends
    indexer.py      the loss of MSA's indexer
    decode.py       one new token against a cache
    sequences.py    packed sequences
    settings.py     the numbers of a call;  checks.py: its arrays

`__all__` is what is public; the modules' other names may change.
"""

from xsake.nsa.attention import (
    apply_native_sparse_attention,
    native_sparse_attention,
    select_blocks,
)
from xsake.nsa.compress import mlp_pooling, weighted_pooling
from xsake.nsa.decode import Cache, decode_step, prefill
from xsake.nsa.indexer import indexer_loss
from xsake.nsa.selected import explain
from xsake.nsa.settings import Settings

__all__ = [
    "Cache",
    "Settings",
    "apply_native_sparse_attention",
    "decode_step",
    "explain",
    "indexer_loss",
    "mlp_pooling",
    "native_sparse_attention",
    "prefill",
    "select_blocks",
    "weighted_pooling",
]
