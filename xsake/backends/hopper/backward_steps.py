"""The steps of one work tile of the backward over kv blocks, on one compute warpgroup.

sT = k qT ─ pT ─ dv += pT d_out
dpT = v d_outT ─ dsT ─┬─ dk += dsT q
                      └─ fused: dq += ds k (backward_dq.py)
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper import backward_dq, barriers
from xsake.backends.hopper.bias_tile import add_rows
from xsake.backends.hopper.layouts import COLUMN, COMPUTE_WGS, PANEL, ROW, ROWS, slot_of

DS_STAGES = 2  # dsT tiles of the fused form; a single one would need two barriers per step


class ColumnSteps:
    """The steps of one work tile on one compute warpgroup; `done` steps came before."""

    def __init__(self, kernel, wg, work_tile, done, context):
        self.kernel, self.wg, self.work_tile, self.done = kernel, wg, work_tile, done
        self.index, self.rule_refs, self.bias_ref, self.outs, self.scratch = context
        self.lse_smem, self.delta_smem = kernel.statistics(self.scratch)
        count = kernel.step_count(work_tile, self.index, self.rule_refs)
        self.steps, self.last_is_short = count
        self.first_key = kernel.first_row(work_tile, wg)
        self.column_values = self.load_columns(kernel.rule, self.rule_refs)
        self.decides = kernel.rule.decides(self.rule_refs, work_tile, self.first_key)
        # A bias per key is the same in all steps.
        self.bias = self.load_bias_at(jnp.int32(0)) if kernel.bias.per_key else None

    def accumulate(self, *accumulators):
        """dk and dv, or one of them, over all steps."""
        kernel, scratch = self.kernel, self.scratch
        plgpu.barrier_wait(scratch.k_ready)
        if kernel.has_dk:
            plgpu.barrier_wait(scratch.v_ready)
        refs = dict(zip(kernel.sizes, accumulators, strict=True))
        add = functools.partial(self.add_products, refs)
        given = self.wg, self.work_tile, self.done, self.decides, self.p_and_ds, add
        kernel.run_steps(*given, self.steps, self.last_is_short)
        plgpu.barrier_arrive(scratch.k_free)
        return tuple(ref[...] for ref in refs.values())

    def q_slot(self, t):
        """The slot of step t in the ring of Q and lse."""
        return slot_of(self.done + t, self.kernel.stages)

    def d_out_slot(self, t):
        """The slot of step t in the ring of d_out and delta."""
        return slot_of(self.done + t, self.kernel.d_out_stages)

    def first_query(self, t):
        """The first query of step t."""
        return self.kernel.first_token(self.index, self.work_tile, t)

    # pT and dsT

    def p_and_ds(self, t, masked, width=None):
        """([(pT, dsT), ...], first query) of step t, one pair for each 64 queries.

        width: how many queries are computed, the first ones; None: all. 64 queries at a time need
        fewer registers. A pT or dsT that no product needs is None; so is the first query, unless it
        is loaded early.
        """
        kernel, scratch = self.kernel, self.scratch
        width = width or kernel.step
        dtype = scratch.d_out_smem.dtype
        first_query = self.first_query(t) if kernel.loads_index_early else None
        loaded = self.load_early(t, 0, masked)
        s = self.issue_scores(t, width)
        plgpu.barrier_wait(scratch.d_out_ready.at[self.d_out_slot(t)])
        # In a masked step of 64 queries, dp is issued after the rule, which needs the registers.
        dp_first = kernel.has_dk and (masked is None or kernel.step > ROWS)
        dp = self.issue_dp(t, width) if dp_first else None
        in_flight = masked is None and kernel.step == ROWS  # load lse, delta while products run
        pairs = []
        for at in range(0, width, ROWS):
            columns = pl.ds(at, ROWS)
            lse = functools.partial(self.per_query, self.lse_smem.at[self.q_slot(t), columns])
            delta = functools.partial(
                self.per_query, self.delta_smem.at[self.d_out_slot(t), columns]
            )
            s, lse = self.settle_and_load(s, int(dp_first) if at == 0 else None, lse, in_flight)
            bias, words = loaded
            if at + ROWS < width:
                loaded = self.load_early(t, at + ROWS, masked)
            if kernel.bias.exists and not kernel.bias.loads_early:
                bias = self.load_bias(t, at)
            keep = functools.partial(self.keep, t, at, words)
            p, slope = kernel.probabilities(self.part(s, at), lse, masked, keep, bias)
            if not kernel.has_dk:
                pairs.append((p.astype(dtype), None))
                continue
            if not dp_first:
                p, slope = lax.optimization_barrier((p, slope))
                dp = self.issue_dp(t, width)
            exact_p, p = p, p.astype(dtype) if kernel.has_dv else None
            dp, delta = self.settle_and_load(dp, 0 if at == 0 else None, delta, in_flight)
            if kernel.frees_v_early and at == 0:
                pl.when(t == self.steps - 1)(lambda: plgpu.barrier_arrive(scratch.v_free))
            change = self.part(dp, at) - delta
            if kernel.sums_bias:
                self.add_bias_sums(exact_p * change)
            pairs.append((p, (slope * change).astype(dtype)))
        if not kernel.has_dv:
            plgpu.barrier_arrive(scratch.d_out_free.at[self.d_out_slot(t)])
        return pairs, first_query

    def issue_scores(self, t, width):
        """sT of the first `width` queries of step t, in flight."""
        slot = self.q_slot(t)
        plgpu.barrier_wait(self.scratch.q_ready.at[slot])
        k = self.kernel.own_rows(self.wg, self.scratch.k_smem)
        q = self.queries_of(self.scratch.q_smem.at[self.q_slot(t)], width)
        return self.kernel.issue(k, q.transpose((1, 0)))

    def issue_dp(self, t, width):
        """dpT of the first `width` queries of step t, in flight."""
        d_out = self.queries_of(self.scratch.d_out_smem.at[self.d_out_slot(t)], width)
        d_out = d_out.transpose((1, 0))
        return self.kernel.issue(self.kernel.own_rows(self.wg, self.scratch.v_smem), d_out)

    def queries_of(self, tile, width):
        """The first `width` rows of a step's tile."""
        return tile if width == self.kernel.step else tile.at[pl.ds(0, width)]

    def settle_and_load(self, tile, wait_n, load, in_flight):
        """(the issued tile, load()); the load runs while the product is in flight, or after it.

        wait_n is None: the caller has already waited for the product.
        """
        values = load() if in_flight else None
        if wait_n is not None:
            tile = self.kernel.settle(tile, wait_n)
        return tile, values if in_flight else load()

    def per_query(self, smem):
        """One value per query, repeated over the rows of a transposed tile."""
        values = plgpu.load(smem, layout=COLUMN, optimized=False)
        return lax.broadcast_in_dim(values, (ROWS, *smem.shape), [1])

    def part(self, tile, first):
        """64 columns of a tile."""
        return tile if tile.shape[1] == ROWS else tile[:, first : first + ROWS]

    def load_columns(self, rule, refs):
        """A rule's values of this warpgroup's 64 keys."""
        return rule.load(refs.columns, self.work_tile, self.first_key, ROWS, ROW)

    def load_early(self, t, at, masked):
        """(bias or None, token masks) of 64 queries: loads that arrive while products run."""
        kernel, words = self.kernel, ()
        if masked is not None and kernel.rule.tile_arrays:
            tile_at = self.work_tile, self.first_key, self.first_query(t) + at
            words = kernel.rule.load_words(self.rule_refs.tiles, *tile_at)
        if kernel.bias.per_key:
            return self.bias, words
        return self.load_bias(t, at) if kernel.bias.loads_early else None, words

    def load_bias(self, t, at):
        """The bias of 64 queries, from query `at` of step t, and of this warpgroup's keys."""
        return self.load_bias_at(self.first_query(t) + at)

    def load_bias_at(self, first_query):
        """The same by the index of the first query."""
        at = self.work_tile, self.first_key, first_query
        return self.kernel.bias.load(self.bias_ref, *at, ROWS)

    def add_bias_sums(self, d_logits):
        """Adds the sums over queries to the gradient of a bias per key."""
        tile = self.work_tile
        keys = pl.ds(self.first_key, ROWS)
        sums = self.outs["bias_sums"].at[self.wg, tile.b, tile.n, keys]
        add_rows(d_logits.sum(axis=1), sums, self.kernel.interpret)

    def keep(self, t, at, words, p, rule):
        """pT of 64 queries, from query `at` of step t, with zeros where the rule forbids."""
        refs, column_values = self.rule_refs, self.column_values
        if rule is not self.kernel.rule:
            refs = refs.otherwise
            column_values = self.load_columns(rule, refs)
        first_query = self.first_query(t) + at
        row_values = rule.load(refs.rows, self.work_tile, first_query, ROWS, COLUMN)
        tile_at = self.work_tile, first_query, self.first_key
        return rule.keep(p, 0.0, *tile_at, (1, 0), row_values, column_values, words)

    # Products

    def add_products(self, refs, t, given):
        """dv += pT d_out, dk += dsT q, and dq += ds k."""
        kernel, scratch = self.kernel, self.scratch
        pairs, first_query = given
        is_half = len(pairs) * ROWS < kernel.step  # 64 of 128 queries: all of dq is warpgroup 0's
        dq_first = kernel.fused and kernel.dq.before_dk and not is_half
        d_out_free = scratch.d_out_free
        if kernel.has_dv:
            self.add_product(
                refs["dv"], [p for p, _ in pairs], scratch.d_out_smem.at[self.d_out_slot(t)]
            )
        if kernel.results_through_ds:  # the previous tile's stores must have read this buffer
            pl.when(t == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        if kernel.fused:
            self.share_ds(t, [ds for _, ds in pairs])
        if dq_first:
            dq = self.issue_dq(t)
            plgpu.wgmma_wait(1)  # dv is done, and the registers of p are free
            plgpu.barrier_arrive(d_out_free.at[self.d_out_slot(t)])
        if kernel.has_dk:
            self.add_product(refs["dk"], [ds for _, ds in pairs], scratch.q_smem.at[self.q_slot(t)])
        dk_products = len(pairs) * kernel.has_dk  # in flight after those of dv and dq
        if dq_first:
            self.add_dq(t, kernel.settle(dq, dk_products), first_query)
        elif kernel.has_dv:
            plgpu.wgmma_wait(dk_products)  # dv is done
            plgpu.barrier_arrive(d_out_free.at[self.d_out_slot(t)])
        if kernel.dq is backward_dq.OwnSteps:
            for column in range(PANEL, kernel.shape.sizes.H, PANEL):
                dq = self.issue_dq(t, column)
                self.add_dq(t, kernel.settle(dq, 0), first_query, column)
        plgpu.wgmma_wait(0)  # dk is done
        plgpu.barrier_arrive(scratch.q_free.at[self.q_slot(t)])
        if kernel.fused and is_half:
            pl.when(self.wg == 0)(
                lambda: self.add_dq(t, kernel.settle(self.issue_dq(t), 0), first_query)
            )
        if kernel.dq is backward_dq.AlternatingSteps:

            @pl.when(lax.rem(self.done + t, jnp.int32(COMPUTE_WGS)) == self.wg)
            def _():
                self.add_dq(t, kernel.settle(self.issue_dq(t), 0), first_query)

    def add_product(self, acc_ref, lefts, right):
        """acc += left right, where left is the horizontal concatenation of `lefts`."""
        left_smem, first = self.scratch.left_smem, 0
        for left in lefts:
            queries = pl.ds(first, left.shape[1])
            smem = None if left_smem is None else left_smem.at[self.wg, :, queries]
            self.kernel.add_product(acc_ref, left, right.at[queries], smem)
            first += left.shape[1]

    # dq

    def share_ds(self, t, parts):
        """Writes dsT to shared memory, where both warpgroups read it.

        With alternating steps, each warpgroup writes and reads its own.
        """
        kernel, ds_smem = self.kernel, self.scratch.ds_smem
        if kernel.alternate:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # results were staged here
            (ds_smem[0, 0, kernel.half(self.wg)],) = parts
            plgpu.commit_smem()
            return
        for at, ds in enumerate(parts):
            ds_smem[slot_of(self.done + t, DS_STAGES), at, kernel.half(self.wg)] = ds
        barriers.sync_compute()

    def issue_dq(self, t, column=0):
        """This warpgroup's part of ds k of step t, in flight."""
        kernel, scratch = self.kernel, self.scratch
        slot = None if kernel.alternate else slot_of(self.done + t, DS_STAGES)
        ds = kernel.dq.ds(kernel, self.wg, scratch.ds_smem, slot)
        return kernel.issue(ds, kernel.dq.k(kernel, self.wg, scratch.k_smem, column))

    def add_dq(self, t, dq, first_query, column=0):
        """Adds a part of dq to the sums in global memory, by TMA."""
        kernel, dq_smem, tile = self.kernel, self.scratch.dq_smem, self.work_tile
        if first_query is None:
            first_query = self.first_query(t)
        # The previous copy must have read the buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dq_smem[kernel.opaque(self.wg)] = dq
        plgpu.commit_smem()
        queries, columns = kernel.dq.target(kernel, self.wg, first_query, column)
        sums = self.outs["sums"].at[tile.b, queries, tile.n, columns]
        plgpu.copy_smem_to_gmem(dq_smem.at[self.wg], sums, reduction_op="add")
