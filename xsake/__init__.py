"""XSAKE: attention for JAX that visits only the blocks that matter."""

from xsake import masks
from xsake.attention import Explanation, dot_product_attention, explain
from xsake.backends.options import Options
from xsake.block_mask import BlockMask

__all__ = ["BlockMask", "Explanation", "Options", "dot_product_attention", "explain", "masks"]
__version__ = "0.1.0"
