"""SelfAttention: a Linen module that attends over blocks.

    x [B, T, width] ─┬─ query ─┐
                     ├─ key ───┼─ dot_product_attention, mask ─ out ─ [B, T, width]
                     └─ value ─┘

Its parameters have the names and shapes of linen.MultiHeadDotProductAttention, so that checkpoints
of one load into the other.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import linen
from jax import Array

from xsake.attention import dot_product_attention
from xsake.block_mask import BlockMask
from xsake.block_mask.input_mask import InputMask, as_input_mask
from xsake.masks.rule import Rule

__all__ = ["SelfAttention"]


class SelfAttention(linen.Module):
    """Causal self-attention that skips the blocks which `mask` drops.

    Attributes:
      num_heads: query heads; they divide the width if there is no head_size.
      num_kv_heads: key/value heads, which divide num_heads; default num_heads.
      head_size: default width / num_heads.
      mask: a rule of `xsake.masks`, a BlockMask, or a Plan or another InputMask.
      layer: which layer of the plan.
      is_causal: a token sees itself and earlier ones.
      logits_soft_cap: cap · tanh(logits / cap).
      use_bias: of the projections.
      dtype: of the computation; default that of x and the parameters.
      param_dtype: of the parameters.
      implementation: a backend by name.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_size: int | None = None
    mask: Any = None
    layer: int | None = None
    is_causal: bool = True
    logits_soft_cap: float | None = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jax.numpy.float32
    implementation: str | None = None

    @linen.compact
    def __call__(self, x: Array, segment_ids: Any = None, positions: Any = None) -> Array:
        """Attention of x [B, T, width] to itself.

        Args:
          x: [B, T, width].
          segment_ids: int [B, T]; only equal ids see each other, negative = padding.
          positions: int [B, T], what causality and windows compare; default arange.
        """
        width = x.shape[-1]
        kv_heads = self.num_kv_heads or self.num_heads
        if self.head_size is None and width % self.num_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} does not divide the width {width}; give head_size"
            )
        size = self.head_size or width // self.num_heads
        how = {"use_bias": self.use_bias, "dtype": self.dtype, "param_dtype": self.param_dtype}

        def projected(name: str, heads: int) -> Array:
            return linen.DenseGeneral((heads, size), axis=-1, name=name, **how)(x)

        q = projected("query", self.num_heads)
        k, v = projected("key", kv_heads), projected("value", kv_heads)
        mask = self.mask
        if not (mask is None or isinstance(mask, Rule | BlockMask)):
            mask = self._of_input(mask, q, k, segment_ids)
        out = dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=self.is_causal,
            logits_soft_cap=self.logits_soft_cap,
            q_segment_ids=segment_ids,
            q_positions=positions,
            kv_positions=positions,
            implementation=self.implementation,
        )
        return linen.DenseGeneral(width, axis=(-2, -1), name="out", **how)(out)

    def _of_input(self, mask: Any, q: Array, k: Array, segment_ids: Any) -> Any:
        """The BlockMask that a plan selects from q and k."""
        by_input: InputMask = as_input_mask(mask)
        if self.layer is None:
            raise ValueError(
                f"{type(mask).__name__} selects blocks by layer: SelfAttention(…, layer=…) needs "
                "the number of the layer that this module is"
            )
        return by_input.mask(self.layer, q, k, segment_ids=segment_ids)
