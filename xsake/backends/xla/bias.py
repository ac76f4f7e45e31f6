"""Reads a bias [B|1, N|1, T|1, S|1] by blocks, and sums its gradient by blocks."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from xsake.backends import Sizes
from xsake.backends.xla.chunks import Visit
from xsake.block_mask import BlockMask


class BiasBlocks:
    """A bias padded to whole blocks."""

    def __init__(self, bias: Array, mask: BlockMask, sizes: Sizes) -> None:
        self.shape, self.mask, self.dtype = bias.shape, mask, bias.dtype
        sides = zip(bias.shape[2:], mask.block, strict=True)
        self.block = tuple(block if d > 1 else 1 for d, block in sides)
        ends = [(0, -d % block) for d, block in zip(bias.shape[2:], self.block, strict=True)]
        self.padded = jnp.pad(bias, ((0, 0), (0, 0), *ends))
        self.is_own = has_own_bias(bias, sizes)

    def _starts(self, at: Visit) -> Array:
        """Where the blocks begin, int32 [R, W, 4]; axes of size 1 are shared."""
        steps = (1, 1, *self.block)
        given = (at.b[:, None], at.n[:, None], at.i, at.j)
        starts = [
            index * step if d > 1 else jnp.zeros_like(index)
            for index, step, d in zip(given, steps, self.shape, strict=True)
        ]
        return jnp.stack(jnp.broadcast_arrays(*starts), axis=-1)

    def at(self, visit: Visit) -> Array:
        """The bias of every token pair, [R, Q, S'] by broadcasting."""
        R, by_columns = visit.b.shape[0], visit.i.shape[1] > 1
        (tq, tk), (bq, bk) = self.block, self.mask.block
        # [R, W, tq, tk] by columns, else [R, tq, W, tk]
        numbers = lax.GatherDimensionNumbers(
            offset_dims=(2, 3) if by_columns else (1, 3),
            collapsed_slice_dims=(0, 1),
            start_index_map=(0, 1, 2, 3),
        )
        sizes, inside = (1, 1, tq, tk), lax.GatherScatterMode.CLIP
        x = lax.gather(self.padded, self._starts(visit), numbers, sizes, mode=inside)
        if by_columns:
            return jnp.broadcast_to(x, (*x.shape[:2], bq, tk)).reshape(R, -1, tk)
        return jnp.broadcast_to(x, (*x.shape[:3], bk)).reshape(R, tq, -1)

    def add(self, total: Array, visit: Visit, ds: Array) -> Array:
        """Adds the logit gradients of a visit by columns, [R, W·block_q, block_k], to a total.

        Where every token pair has its own bias, no two blocks add to the same entry, and a GPU
        needs no atomics; what is past the end of a list is then dropped instead of added as 0.
        """
        R, W = visit.i.shape
        (tq, tk), (bq, bk) = self.block, self.mask.block
        shares = ds.reshape(R, W, bq, bk)
        shares = shares.sum(2, keepdims=True) if tq == 1 else shares
        shares = shares.sum(3, keepdims=True) if tk == 1 else shares
        starts = self._starts(visit)
        if self.is_own and visit.live is not None:
            starts = jnp.where(visit.live[..., None], starts, jnp.iinfo(jnp.int32).max)
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=(2, 3),
            inserted_window_dims=(0, 1),
            scatter_dims_to_operand_dims=(0, 1, 2, 3),
        )
        drop = lax.GatherScatterMode.FILL_OR_DROP
        return lax.scatter_add(
            total, starts, shares, numbers, unique_indices=self.is_own, mode=drop
        )

    def whole(self, total: Array) -> Array:
        """The total, cut to the bias's shape and in its dtype."""
        return total[:, :, : self.shape[2], : self.shape[3]].astype(self.dtype)


def has_own_bias(bias: Array, sizes: Sizes) -> bool:
    """Whether every token pair has a bias of its own."""
    return bias.shape == (sizes.B, sizes.N, sizes.T, sizes.S)
