"""A decoder for GPT-2 and the Llama family: masks by layer, checkpoint loading, generation."""

from xsake.model.config import PRESETS, Config
from xsake.model.generate import Completion, GenerateOptions, Sampling, generate, stream
from xsake.model.kv_cache import KVCache
from xsake.model.rope import Rope
from xsake.model.sparse.cache import SparseCache
from xsake.model.sparse.options import Sparse
from xsake.model.transformer import Observation, Transformer, parameter_axes, parameter_shapes

__all__ = [
    "PRESETS",
    "Completion",
    "Config",
    "GenerateOptions",
    "KVCache",
    "Observation",
    "Rope",
    "Sampling",
    "Sparse",
    "SparseCache",
    "Transformer",
    "generate",
    "parameter_axes",
    "parameter_shapes",
    "stream",
]
