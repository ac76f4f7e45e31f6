"""The steps of one work tile of the forward, on one compute warpgroup: an online softmax.

    S = Q Kᵀ + bias ─ mask ─ m, l = running maximum (base 2), running sum ─ P = 2^(S - m)
    ─ acc += P V

With `overlap`, a warpgroup issues the scores of its next step before the values of this one, so
that its softmax overlaps with its own products too.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.layouts import LOG2E, ROW, ROWS, TILE, slot_of
from xsake.backends.hopper.votes import any_in_warp

# Of a row's sum of powers of two in one step, with `lazy_maximum`; the largest float16 is above it.
MOST_GROWTH = 2.0**15


def over_columns(x, tile):
    """One value per row, repeated over the columns of `tile`."""
    return lax.broadcast_in_dim(x, tile.shape, [0])


class TileSteps:
    """The steps of one work tile on one compute warpgroup; t counts this warpgroup's own steps.

    done: steps of all work tiles before this one.
    own_steps: (first, full, count) as BlockKernel.own_steps returns them.
    decides: as RuleTile.decides returns it.
    loads: two functions, step of the work tile -> its bias, its token masks, from global memory;
    with `bias_in_shared` the first one begins a copy and returns None.
    mask_step: (s, step of the work tile, rule, token masks) -> s with -inf where the rule forbids.
    settle: (statistics, m, step of the work tile) -> the statistics with the newest step's terms.

    A step's `masked` is the rule that masks it; None: no rule does. With statistics, l stands for
    `statistics_tile.Sums`.
    """

    def __init__(
        self, kernel, wg, done, own_steps, decides, loads, mask_step, settle, q_rows, scratch
    ):
        self.kernel, self.wg, self.done = kernel, wg, done
        self.decides = decides
        self.first, self.full, self.count = own_steps
        self.load_bias, self.load_words = loads
        self.mask_step, self.settle_step = mask_step, settle
        self.q_rows, self.scratch = q_rows, scratch
        self.k_slots, self.v_slots = kernel.k_slots(scratch), kernel.v_slots(scratch)
        self.dtype = scratch.v_smem.dtype
        self.scores_type = plgpu.ACC((ROWS, kernel.step), jnp.float32)

    # The two orders of products

    def in_sequence(self):
        """(acc, m, l): scores, softmax and values, one step after the other.

        Between await_turn and pass_turn a warpgroup issues P V of step t and Q Kᵀ of step t + 1.
        """

        def step(t, carry, masked):
            acc, m, l = carry
            loaded = self.load(t, masked)
            s = self.scores(t, self.kernel.pass_turn)
            self.free_k(t)
            s = self.logits(s, t, masked, loaded)
            p, m, l, shrink = self.softmax(s, m, l, masked)
            l = self.settle(l, m, t)
            acc = self.rescale(acc, shrink)
            p, acc, m, l = lax.optimization_barrier((p.astype(self.dtype), acc, m, l))
            self.await_v(t)
            self.kernel.await_turn(self.wg)
            acc = self.add_values(
                acc, p, t, lambda: pl.when(t + 1 < self.count)(lambda: self.await_k(t + 1))
            )
            self.free_v(t)
            return acc, m, l

        @pl.when(self.count > 0)
        def _():
            self.copy_first_bias()
            self.await_k(jnp.int32(0))
            self.await_q()

        self.kernel.await_turn(self.wg)
        carry = self.loop(0, step, self.init())
        self.kernel.pass_turn(self.wg)

        @pl.when(self.count > 0)
        def _():
            self.free_q()

        return carry

    def overlapped(self):
        """(acc, m, l): the scores of step t are issued before the values of step t - 1.

        The first scores and the last values of a work tile have nothing to overlap with.
        """

        def run():
            acc, _, _ = self.init()
            self.copy_first_bias()
            loaded = self.load(jnp.int32(0), self.kernel.rule.has_partial)
            self.await_k(jnp.int32(0))
            self.await_q()
            self.kernel.await_turn(self.wg)
            s = self.scores(jnp.int32(0), self.kernel.pass_turn)
            self.free_k(jnp.int32(0))
            p, m, l = self.first_softmax(s, loaded)
            acc, m, l, p = self.loop(1, self.overlapped_step, (acc, m, l, p.astype(self.dtype)))
            self.free_q()
            self.await_v(self.count - 1)
            self.kernel.await_turn(self.wg)
            acc = self.add_values(acc, p, self.count - 1, lambda: self.kernel.pass_turn(self.wg))
            self.free_v(self.count - 1)
            return acc, m, self.settle(l, m, self.count - 1)

        return lax.cond(self.count > 0, run, self.init)

    def overlapped_step(self, t, carry, masked):
        """Issues the scores of step t, then the values of t - 1, whose p waits in registers."""
        acc, m, l, p = carry
        loaded = self.load(t, masked)

        def softmax(s, m, l):
            s = self.logits(s, t, masked, loaded)
            p, m, l, shrink = self.softmax(s, m, l, masked)
            return m, l, shrink, p

        self.await_k(t)
        self.await_v(t - 1)
        self.kernel.await_turn(self.wg)
        if self.kernel.interpret:
            s = self.scores(t)
            acc = self.add_values(acc, p, t - 1)
            self.free_k(t)
            m, l, shrink, p = softmax(s, m, self.settle(l, m, t - 1))
        else:

            def products(refs):
                acc_ref, *new_refs = refs

                def with_scores(s_ref):
                    plgpu.wgmma(s_ref, self.q_rows, self.k(t))
                    plgpu.wgmma(acc_ref, p, self.v(t - 1))
                    self.kernel.pass_turn(self.wg)
                    settled = self.settle(l, m, t - 1)
                    # The rule's values per key need 32 registers, which p occupies until its
                    # product ends.
                    crowded = masked is not None and masked.column_arrays > 0
                    bias = self.kernel.bias
                    crowded = crowded or (bias.exists and not bias.loads_early)
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=0 if crowded else 1)
                    self.free_k(t)
                    jax.tree.map(_write, tuple(new_refs), softmax(s, m, settled))

                pl.run_scoped(with_scores, self.scores_type)

            unset = _splat(0.0, self.scores_type.shape, TILE)
            acc, m, l, shrink, p = pl.run_state(products)((plgpu.ACC.init(acc), m, l, m, unset))
            # The product reads the old p until it ends: only now may the new p overwrite its
            # registers.
            acc, p = lax.optimization_barrier((acc, p))
        self.free_v(t - 1)
        return self.rescale(acc, shrink), m, l, p.astype(self.dtype)

    def loop(self, begin, step, carry):
        """Full steps without masking, then partial steps with it."""
        carry = lax.fori_loop(begin, self.full, lambda t, c: step(t, c, masked=None), carry)
        loops = self.kernel.rule.partial_steps(self.full, self.count, self.decides)
        for rule, first, end in loops:
            masked_step = functools.partial(step, masked=rule)
            carry = lax.fori_loop(jnp.maximum(first, begin), end, masked_step, carry)
        return carry

    def leave_out(self, end):
        """Takes part in all barriers of the steps from this warpgroup's last one to `end`."""

        @pl.loop(self.count, end)
        def _(t):
            self.await_k(t)
            self.free_k(t)
            self.await_v(t)
            self.free_v(t)
            self.kernel.await_turn(self.wg)
            self.kernel.pass_turn(self.wg)

    # Softmax

    def init(self):
        """(acc, m, l) before the first step."""
        acc = _splat(0.0, (ROWS, self.kernel.shape.sizes.Hv), TILE)
        m = _splat(-jnp.inf, (ROWS,), ROW)
        if self.kernel.statistics is None:
            return acc, m, _splat(0.0, (ROWS,), ROW)
        return acc, m, self.kernel.statistics.init(_splat(0.0, (ROWS,), ROW))

    def softmax(self, s, m, l, masked):
        """p = 2^(s - m_new), the new m and l, and the factor that rescales acc."""
        return self.lazy_softmax(s, m, l) if self.is_lazy else self.full_softmax(s, m, l, masked)

    def settle(self, l, m, t):
        """l with the statistics of step t, the newest one; without statistics, l."""
        return l if self.kernel.statistics is None else self.settle_step(l, m, self.step_of(t))

    @property
    def is_lazy(self) -> bool:
        """Whether most steps look for no maximum; not where the entropy over keys is wanted."""
        statistics = self.kernel.statistics
        has_tokens = statistics is not None and statistics.has_tokens
        return self.kernel.tiling.lazy_maximum and not has_tokens

    @property
    def log2_scale(self) -> float:
        """The factor of the logits as `logits` returns them, in powers of two."""
        return LOG2E * (1.0 if self.kernel.bias.exists else self.scale)

    def lazy_softmax(self, s, m, l):
        """As `full_softmax`, which it calls if a row has outgrown its m or has none yet.

        A maximum is a chain of dependent operations that the exponentials would have to wait for.
        """
        p = jnp.exp2(s * self.log2_scale - over_columns(m, s))
        total = p.sum(axis=1)
        is_safe = (total < MOST_GROWTH) & (m > -jnp.inf)  # not if it is NaN
        sums = l + total if self.kernel.statistics is None else l.with_newest(total)
        as_before = p, m, sums, jnp.ones_like(m)

        def anew():
            return self.full_softmax(s, m, l, True)

        if self.kernel.interpret:
            return lax.cond(is_safe.all(), lambda: as_before, anew)
        return lax.cond(any_in_warp(jnp.where(is_safe, 1.0, 0.0)), anew, lambda: as_before)

    def full_softmax(self, s, m, l, masked):
        """`softmax` with the maximum of every row."""
        kernel, scale = self.kernel, self.log2_scale
        m_new = jnp.maximum(m, s.max(axis=1) * scale)
        if kernel.tiling.lazy_rescale:
            # m only has to be near the maximum: p stays below 2^lazy_rescale, far from overflow in
            # any dtype.
            m_new = jnp.where(m_new - m > kernel.tiling.lazy_rescale, m_new, m)
        # A row with nothing allowed so far keeps m = -inf; subtracting 0 instead makes its p and
        # shrink zeros, not NaN.
        may_be_empty = masked is not None or kernel.bias.exists  # a bias may be -inf
        base = jnp.where(m_new == -jnp.inf, 0.0, m_new) if may_be_empty else m_new
        x = s * scale - over_columns(base, s)
        p = jnp.exp2(x)
        shrink = jnp.exp2(m - base)  # rescales what was summed under the old maximum
        if kernel.statistics is None:
            return p, m_new, l * shrink + p.sum(axis=1), shrink
        return p, m_new, kernel.statistics.add(l, x, p, m, base, shrink, may_be_empty), shrink

    def first_softmax(self, s, loaded):
        """(p, m, l) of a work tile's first step."""
        _, m, l = self.init()
        rule = self.kernel.rule if self.kernel.rule.has_partial else None
        s = self.logits(s, jnp.int32(0), None, loaded)
        if rule is not None:
            s = lax.cond(self.full > 0, lambda: s, lambda: self.mask_first(s, rule, loaded))
        p, m, l, _ = self.full_softmax(s, m, l, rule)
        return p, m, l

    def mask_first(self, s, rule, loaded):
        """Scores of the first step, which is partial, with -inf where the rule forbids."""
        first = jnp.int32(0)
        if self.decides is None:
            return self.mask(s, first, rule, loaded)
        return lax.cond(
            self.decides,
            lambda: self.mask(s, first, rule, loaded),
            lambda: self.mask(s, first, rule.otherwise, loaded),
        )

    @property
    def scale(self) -> float:
        """The factor of q kᵀ, or of the tanh of the soft cap."""
        kernel = self.kernel
        return kernel.scale if kernel.soft_cap is None else kernel.soft_cap

    def load(self, t, masked):
        """(bias or None, token masks) of step t: loads that arrive while products run."""
        bias, words = None, ()
        if self.kernel.bias.loads_early and not self.kernel.bias.in_shared:
            bias = self.load_bias(self.step_of(t))
        if masked and self.kernel.rule.tile_arrays:
            words = self.load_words(self.step_of(t))
        return bias, words

    def copy_first_bias(self):
        """Begins to copy the bias of the first step to shared memory, if tiles pass there."""
        if self.kernel.bias.in_shared:
            self.load_bias(self.step_of(jnp.int32(0)))

    def add_from_shared(self, s, t):
        """s + the bias of step t; begins to copy that of the next one."""
        s = self.kernel.bias.add(s, self.scratch.bias_smem.at[self.wg])
        pl.when(t + 1 < self.count)(lambda: self.load_bias(self.step_of(t + 1)))
        return s

    def logits(self, s, t, masked, loaded):
        """Logits of step t, divided by `scale` without a bias; -inf where the rule forbids."""
        kernel = self.kernel
        if kernel.soft_cap is not None:
            # tanh x = 1 - 2 / (1 + e^2x): tanh.approx errs by 5e-4, too much times a cap of 50.
            growth = jnp.exp2(s * (2 * LOG2E * kernel.scale / kernel.soft_cap))
            s = 1.0 - 2.0 / (1.0 + growth)
        if kernel.bias.in_shared:
            s = self.add_from_shared(s * self.scale, t)
        elif kernel.bias.exists:
            bias = loaded[0] if kernel.bias.loads_early else self.load_bias(self.step_of(t))
            s = kernel.bias.add(s * self.scale, bias)
        return s if masked is None else self.mask(s, t, masked, loaded)

    def mask(self, s, t, rule, loaded):
        """Scores of step t with -inf where the rule forbids."""
        return self.mask_step(s, self.step_of(t), rule, loaded[1])

    def rescale(self, acc, shrink):
        """acc * shrink; lazily, a warp skips it when none of its rows has a new maximum."""
        if not self.kernel.tiling.lazy_rescale or self.kernel.interpret:
            return acc * over_columns(shrink, acc)
        return lax.cond(any_in_warp(shrink), lambda: acc * over_columns(shrink, acc), lambda: acc)

    # Products

    def scores(self, t, issued=lambda wg: None):
        """S of step t; issued(wg) runs while the product is in flight."""

        def product(s_ref):
            plgpu.wgmma(s_ref, self.q_rows, self.k(t))
            issued(self.wg)
            return s_ref[...]

        return pl.run_scoped(product, self.scores_type)

    def add_values(self, acc, p, t, issued=lambda: None):
        """acc + p V, in place on the card; issued() runs while the product is in flight."""
        # The interpreter supports neither run_state(ACC.init) nor an operand in registers.
        if self.kernel.interpret:
            v = self.v(t)[...]
            plgpu.commit_smem()
            issued()
            return acc + jnp.dot(p, v, preferred_element_type=jnp.float32)

        def product(acc_ref):
            plgpu.wgmma(acc_ref, p, self.v(t))
            issued()

        return pl.run_state(product)(plgpu.ACC.init(acc))

    # Slots and barriers

    def step_of(self, t):
        """The work tile's step that is this warpgroup's step t."""
        return t if self.kernel.stride == 1 else self.first + t * self.kernel.stride

    def slot(self, t):
        """The slot of step t in both rings."""
        return slot_of(self.done + self.step_of(t), self.kernel.stages)

    def k(self, t):
        """Kᵀ of step t."""
        return self.scratch.k_smem.at[self.slot(t)].transpose((1, 0))

    def v(self, t):
        """V of step t."""
        return self.scratch.v_smem.at[self.slot(t)]

    def await_q(self):
        """Waits for Q; with alternating steps, the caller has waited."""
        if not self.kernel.alternate:
            plgpu.barrier_wait(self.scratch.q_ready)

    def free_q(self):
        """Releases Q; with alternating steps, the caller does."""
        if not self.kernel.alternate:
            plgpu.barrier_arrive(self.scratch.q_free)

    def await_k(self, t):
        """Waits for K of step t."""
        plgpu.barrier_wait(self.scratch.k_ready.at[self.slot(t)])

    def await_v(self, t):
        """Waits for V of step t."""
        plgpu.barrier_wait(self.scratch.v_ready.at[self.slot(t)])

    def free_k(self, t):
        """Releases K of step t."""
        self.k_slots.arrive(self.slot(t))

    def free_v(self, t):
        """Releases V of step t."""
        self.v_slots.arrive(self.slot(t))


def _write(ref, value):
    ref[...] = value


def _splat(value, shape, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
