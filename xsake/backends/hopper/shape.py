"""The static sizes of one call of the Hopper kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from xsake.backends import Sizes
from xsake.backends.hopper import limits
from xsake.backends.hopper.layouts import round_up


@dataclasses.dataclass(frozen=True)
class Shape:
    """B, T, S, N, K, H and Hv, the mask's block, and the bytes of one element."""

    sizes: Sizes
    block: tuple[int, int]
    itemsize: int

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, lists: Any, block: tuple[int, int]) -> Shape:
        """The sizes of a call; raises where k, the lists or the block do not fit them."""
        sizes = Sizes.of(q, k, v)
        B, T, S, _, K, H, Hv = sizes
        if k.shape != (B, S, K, H):
            raise ValueError(f"key is {k.shape}; this query and value need {(B, S, K, H)}")
        is_tall = block[0] == limits.TALL and max(H, Hv) <= limits.TALL_HEAD_SIZE
        check_sizes(block[1:] if is_tall else block, H, Hv)
        shape = cls(sizes, tuple(block), k.dtype.itemsize)
        if lists.kv_count.shape[-1] != shape.row_blocks:
            raise ValueError(
                f"the lists have {lists.kv_count.shape[-1]} row blocks, {T} queries in blocks of "
                f"{block[0]} have {shape.row_blocks}"
            )
        return shape

    @property
    def row_blocks(self) -> int:
        """Blocks of queries of one head."""
        return self.padded_rows // self.block[0]

    @property
    def kv_blocks(self) -> int:
        """Blocks of keys of one head."""
        return self.padded_keys // self.block[1]

    @property
    def padded_rows(self) -> int:
        """T rounded up to whole row blocks."""
        return round_up(self.sizes.T, self.block[0])

    @property
    def padded_keys(self) -> int:
        """S rounded up to whole kv blocks."""
        return round_up(self.sizes.S, self.block[1])

    @property
    def has_short_block(self) -> bool:
        """Whether the last kv block reaches past the last key."""
        return self.padded_keys != self.sizes.S

    @property
    def group(self) -> int:
        """Query heads of one kv head."""
        return self.sizes.N // self.sizes.K

    @property
    def largest_head(self) -> int:
        """The larger of H and Hv."""
        return max(self.sizes.H, self.sizes.Hv)

    @property
    def kv_bytes(self) -> int:
        """K and V of one kv head of one batch row."""
        return self.sizes.S * (self.sizes.H + self.sizes.Hv) * self.itemsize

    @property
    def head_bytes(self) -> int:
        """Q and d_out of one query head of one batch row, and its dq in float32."""
        H, Hv = self.sizes.H, self.sizes.Hv
        return self.sizes.T * ((H + Hv) * self.itemsize + H * 4)


def check_sizes(block: Iterable[int], *head_sizes: int) -> None:
    """Raises for a block size or a head size that the kernels do not have."""
    for tokens in block:
        if tokens not in limits.BLOCKS:
            raise ValueError(f"a block of {tokens} tokens is not supported; use {limits.BLOCKS}")
    for size in head_sizes:
        if size not in limits.HEAD_SIZES:
            raise ValueError(
                f"a head size of {size} is not supported; pad it to one of {limits.HEAD_SIZES}"
            )
