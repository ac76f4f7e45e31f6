"""How the two compute warpgroups of the fused backward share the dq of a step: dq += ds k.

Both warpgroups have written dsT of their 64 keys to shared memory. A warpgroup then computes

    ByRows             64 of the step's 128 queries, all 64 columns of the head
    ByColumns          all 64 queries of the step, 64 of 128 columns of the head
    AlternatingSteps   all of dq (64 queries, 64 columns), in every other step
    OwnSteps           all of dq of its own steps, 64 columns at a time (kv blocks of 64: it has all
                       keys of those steps)

The product is added to dq by TMA, in float32. Except for AlternatingSteps it is issued before dk's
product, so that both are in flight together.
"""

from jax.experimental import pallas as pl

from xsake.backends.hopper.layouts import PANEL, ROWS


class ByRows:
    """Steps of 128 queries: each warpgroup has 64 of them."""

    before_dk = True

    @staticmethod
    def ds(kernel, wg, ds_smem, slot):
        """The left operand: ds of the step whose dsT is in that slot."""
        return ds_smem.at[slot].at[kernel.opaque(wg)].transpose((1, 0))

    @staticmethod
    def k(kernel, wg, k_smem, column):
        """The right operand, from column `column` of k."""
        return k_smem

    @staticmethod
    def target(kernel, wg, first_query, column):
        """(queries, columns) of dq that the product is added to."""
        return pl.ds(first_query + wg * ROWS, ROWS), pl.ds(column, PANEL)


class AlternatingSteps:
    """Steps of 64 queries with a head of 64: each warpgroup has every other step."""

    before_dk = False

    @staticmethod
    def ds(kernel, wg, ds_smem, slot):
        """The left operand: ds of the step whose dsT is in that slot."""
        return ds_smem.at[slot].at[0].transpose((1, 0))

    @staticmethod
    def k(kernel, wg, k_smem, column):
        """The right operand, from column `column` of k."""
        return k_smem

    @staticmethod
    def target(kernel, wg, first_query, column):
        """(queries, columns) of dq that the product is added to."""
        return pl.ds(first_query, ROWS), pl.ds(column, PANEL)


class ByColumns(AlternatingSteps):
    """Steps of 64 queries with a head of 128: each warpgroup has 64 columns."""

    before_dk = True

    @staticmethod
    def k(kernel, wg, k_smem, column):
        """The right operand, from column `column` of k."""
        return k_smem.at[:, kernel.half(wg)]

    @staticmethod
    def target(kernel, wg, first_query, column):
        """(queries, columns) of dq that the product is added to."""
        queries = pl.ds(first_query, ROWS)
        return queries, kernel.half(wg)


class OwnSteps(AlternatingSteps):
    """kv blocks of 64, whose steps the warpgroups compute in alternation anyway."""

    before_dk = True

    @staticmethod
    def ds(kernel, wg, ds_smem, slot):
        """The left operand: the warpgroup's own half of the only dsT tile."""
        return ds_smem.at[0, 0, kernel.half(wg)].transpose((1, 0))

    @staticmethod
    def k(kernel, wg, k_smem, column):
        """The right operand, from column `column` of k."""
        return k_smem.at[:, pl.ds(column, PANEL)]
