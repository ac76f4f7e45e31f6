"""Single properties of dot_product_attention, on every backend that runs on a CPU."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests import oracle
from tests.draws import BACKENDS, FAST_COMPILATION
from tests.specs import to_rule
from xsake import BlockMask, masks

# `dense` has the formulas of `reference`, and more to get wrong.
every_backend = pytest.mark.parametrize(
    "backend",
    [pytest.param(x, marks=[pytest.mark.slow] * (x == "reference")) for x in BACKENDS],
)
by_own_gradient = pytest.mark.parametrize("backend", ["xla", "dense"])
OUTPUT, GRADIENT = 2e-6, 1e-5  # float32, as a share of the largest number of the reference


def random_arrays(*sizes, seed=0):
    """q, k, v, d_out, d_lse in float32; sizes are B, T, S, N, K, H[, Hv]."""
    floats = oracle.random_inputs(np.random.default_rng(seed), *sizes)
    return tuple(jnp.asarray(np.float32(x)) for x in floats.values())


@functools.partial(
    jax.jit,
    static_argnames=("backend", "is_causal", "logits_soft_cap", "options"),
    compiler_options=FAST_COMPILATION,
)
def run(backend, q, k, v, d_out, d_lse, **call):
    """out, lse, dq, dk, dv."""

    def attend(q, k, v):
        return xsake.dot_product_attention(
            q, k, v, implementation=backend, return_residual=True, **call
        )

    (out, lse), pull_back = jax.vjp(attend, q, k, v)
    return (out, lse, *pull_back((d_out, d_lse)))


def fast(fn):
    return jax.jit(fn, compiler_options=FAST_COMPILATION)


def assert_same_bits(one, two):
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), one, two, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), name


def assert_near(one, two):
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), one, two, strict=True):
        limit = OUTPUT if name in {"out", "lse"} else GRADIENT
        assert oracle.relative_error(x, y) <= limit, name


def from_oracle(spec, q, k, v, d_out, d_lse, **call):
    B, T, N, _ = q.shape
    see = oracle.allowed(spec, B, N, T, k.shape[1])
    d_lse = np.where(see.any(-1).swapaxes(1, 2), d_lse, 0)
    grads = oracle.attention_grads(q, k, v, allowed=see, d_out=d_out, d_lse=d_lse, **call)
    forward = oracle.attention(q, k, v, allowed=see, **call)
    return (*forward, *(grads[name] for name in ("dq", "dk", "dv")))


# ---------------------------------------------------------------- nothing leaks


@every_backend
def test_a_dropped_block_cannot_leak(backend):
    """NaN in a block that its head never visits: results are bit-identical, its gradient is 0."""
    q, k, v, d_out, d_lse = random_arrays(1, 64, 70, 4, 2, 8)
    bits = np.random.default_rng(1).random((1, 4, 4, 5)) < 0.7
    bits[:, :2, :, 2] = False  # the query heads of kv head 0 drop block 2
    mask = BlockMask.from_dense(jnp.asarray(bits), shape=(64, 70), block=16)
    clean = run(backend, q, k, v, d_out, d_lse, mask=mask)
    poison = [x.at[:, 32:48, 0].set(jnp.nan) for x in (k, v)]
    poisoned = run(backend, q, *poison, d_out, d_lse, mask=mask)
    assert_same_bits(clean, poisoned)
    assert not poisoned[3][:, 32:48, 0].any()
    assert not poisoned[4][:, 32:48, 0].any()
    assert poisoned[3][:, 32:48, 1].all(), "the other head does use it"


@by_own_gradient
def test_a_row_that_drops_a_block_cannot_see_it(backend):
    """NaN in a block that some rows visit: the rows that drop it do not change by one bit."""
    q, k, v, d_out, d_lse = random_arrays(1, 64, 64, 2, 2, 8)
    bits = np.ones((1, 2, 4, 4), bool)
    bits[:, :, :2, 3] = False
    mask = BlockMask.from_dense(jnp.asarray(bits), block=16)
    clean = run(backend, q, k, v, d_out, d_lse, mask=mask)
    poison = [x.at[:, 50:60].set(jnp.nan) for x in (k, v)]
    poisoned = run(backend, q, *poison, d_out, d_lse, mask=mask)
    for name, x, y in zip(("out", "lse", "dq"), clean, poisoned, strict=False):
        assert np.asarray(x[:, :32]).tobytes() == np.asarray(y[:, :32]).tobytes(), name


@every_backend
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_nan_that_is_seen_is_not_hidden(backend, where):
    """The other side of the probes above: zeros in place of a NaN would hide a broken model."""
    x = dict(zip("qkv", random_arrays(1, 32, 32, 2, 2, 8), strict=False))
    x[where] = x[where].at[:, 20].set(jnp.nan)
    mask = BlockMask.from_rule(masks.causal(), (32, 32), block=16)
    out = xsake.dot_product_attention(*x.values(), mask=mask, implementation=backend)
    seen = slice(20, 21) if where == "q" else slice(20, None)
    assert np.isnan(out[:, seen]).all()


@every_backend
@pytest.mark.parametrize("rule", ["lengths", "documents", "causal", "array"])
def test_a_masked_key_of_a_visited_block_cannot_leak(backend, rule):
    """1e9 in keys and values that the rule masks inside visited blocks: not one bit changes."""
    T = 40
    q, k, v, d_out, d_lse = random_arrays(1, T, 64, 2, 1, 8)
    hidden = np.zeros(64, bool)
    hidden[[41, 43, 47]] = True  # of the third block
    rule = {
        "lengths": masks.lengths(key_value=jnp.array([41])),
        "documents": masks.documents(
            jnp.zeros((1, T), jnp.int32), jnp.where(hidden, -1, 0)[None].astype(jnp.int32)
        ),
        "causal": masks.causal(),  # the queries end at 39
        "array": masks.array(jnp.asarray(~hidden)[None, None, None]),
    }[rule]
    mask = BlockMask.from_dense(jnp.ones((3, 4), bool), rule, shape=(T, 64), block=16)
    assert mask.blocks()[0, 0, -1, 2] == 1, "visited, and partial"
    clean = run(backend, q, k, v, d_out, d_lse, mask=mask)
    for size in (1e9, -1e9):
        poison = [x.at[:, hidden].set(size) for x in (k, v)]
        poisoned = run(backend, q, *poison, d_out, d_lse, mask=mask)
        assert_same_bits(clean, poisoned)
        assert not poisoned[3][:, hidden].any()
        assert not poisoned[4][:, hidden].any()


@every_backend
def test_no_gradient_reaches_the_future(backend):
    q, k, v, d_out, d_lse = random_arrays(1, 40, 40, 2, 1, 8)
    mask = BlockMask.from_rule(masks.causal(), (40, 40), block=16)
    for t in (0, 15, 16, 37):
        only = np.arange(40)[None, :, None] == t
        one_row = jnp.where(only[..., None], d_out, 0), jnp.where(only, d_lse, 0)
        _, _, dq, dk, dv = run(backend, q, k, v, *one_row, mask=mask)
        assert not dk[:, t + 1 :].any()
        assert not dv[:, t + 1 :].any()
        assert dv[:, : t + 1].any(-1).all(), "the past does get its gradient"
        assert not np.delete(dq, t, axis=1).any()


@every_backend
@pytest.mark.parametrize("sinks", [None, pytest.param("one", marks=pytest.mark.slow), "three"])
def test_a_query_without_keys_has_output_0_and_logsumexp_minus_infinity(backend, sinks):
    """Rows 16 to 31 visit no block at all, row 40 sees none of the keys of the blocks it visits."""
    q, k, v, d_out, d_lse = random_arrays(1, 48, 48, 2, 1, 8)
    see = np.ones((1, 1, 48, 48), bool)
    see[..., 40, :] = see[..., 16:32, :] = False
    mask = BlockMask.from_rule(masks.array(jnp.asarray(see)), (48, 48), block=16)
    empty = [*range(16, 32), 40]
    call = {"mask": mask}
    if sinks is not None:
        call["sinks"] = jnp.ones((2,) if sinks == "one" else (2, 3))
    out, lse, dq, dk, dv = run(backend, q, k, v, d_out, d_lse, **call)
    assert not out[:, empty].any()
    assert (lse[:, empty] == -np.inf).all()
    assert np.isfinite(np.delete(lse, empty, axis=1)).all()
    assert not dq[:, empty].any()
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))
    bare = BlockMask.from_dense(jnp.zeros((3, 3), bool), block=16)
    out, lse, *grads = run(backend, q, k, v, d_out, d_lse, **(call | {"mask": bare}))
    assert not out.any()
    assert (lse == -np.inf).all()
    assert not any(x.any() for x in grads)
    if sinks is not None:

        def total(s):
            return xsake.dot_product_attention(
                q, k, v, mask=bare, sinks=s, implementation=backend
            ).sum()

        assert not fast(jax.grad(total))(call["sinks"]).any()


# ---------------------------------------------------------------- lengths, documents, heads


@every_backend
@pytest.mark.parametrize("window", [(15, 0), (17, 3), (None, 5)])
def test_windows_need_not_align_with_blocks(backend, window):
    x = random_arrays(1, 53, 53, 2, 2, 8)
    spec = ("sliding_window", *window)
    mask = BlockMask.from_rule(to_rule(spec), (53, 53), block=(16, 32))
    assert_near(run(backend, *x, mask=mask), from_oracle(spec, *x))


@every_backend
@pytest.mark.parametrize("lengths", [(20, 75), (75, 20), (1, 33)])
def test_queries_and_keys_may_differ_in_length(backend, lengths):
    T, S = lengths
    x = random_arrays(2, T, S, 2, 1, 8, 5)
    assert_near(run(backend, *x, is_causal=True), from_oracle(("causal",), *x))


@every_backend
def test_packed_documents_equal_documents_run_alone(backend):
    lengths = [13, 20, 13]
    x = random_arrays(1, sum(lengths), sum(lengths), 4, 2, 8)
    ids = jnp.repeat(jnp.arange(3), jnp.array(lengths))[None]
    packed = run(backend, *x, q_segment_ids=ids, kv_segment_ids=ids, is_causal=True)
    starts = np.cumsum([0, *lengths])
    alone = [
        run(backend, *(part[:, a:b] for part in x), is_causal=True)
        for a, b in itertools.pairwise(starts)
    ]
    assert_near(packed, [np.concatenate(parts, axis=1) for parts in zip(*alone, strict=True)])


@every_backend
def test_per_head_masks_equal_single_head_calls(backend):
    q, k, v, d_out, d_lse = random_arrays(1, 48, 48, 4, 4, 8)
    bits = np.random.default_rng(2).random((4, 3, 3)) < 0.6
    rule = masks.sliding_window(20, 11)

    def mask(bits):
        return BlockMask.from_dense(jnp.asarray(bits), rule, block=16, capacity=9)

    d_lse = jnp.where(np.asarray(mask(bits).to_dense()).any(-1).swapaxes(1, 2), d_lse, 0)
    x = (q, k, v, d_out, d_lse)
    together = run(backend, *x, mask=mask(bits))
    alone = [
        run(backend, *(part[:, :, n : n + 1] for part in x), mask=mask(bits[n])) for n in range(4)
    ]
    assert_near(together, [np.concatenate(parts, axis=2) for parts in zip(*alone, strict=True)])


# ---------------------------------------------------------------- JAX transformations


def masked_attention(backend, block=16, rule=None):
    """A function of (q, k, v, bits), so that the mask's contents are traced."""

    def attend(q, k, v, bits):
        mask = BlockMask.from_dense(bits, rule, shape=(q.shape[-3], k.shape[-3]), block=block)
        return xsake.dot_product_attention(q, k, v, mask=mask, implementation=backend)

    return attend


def random_bits(*shape, seed=3):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.6)


@pytest.mark.optimized
@every_backend
def test_a_traced_mask_does_not_recompile(backend):
    """A BlockMask is an argument like any other: new contents, the same program."""
    q, k, v, *_ = random_arrays(1, 48, 48, 2, 2, 8)
    traces = []

    @jax.jit
    def attend(q, mask):
        traces.append(1)
        return jax.value_and_grad(
            lambda q: xsake.dot_product_attention(q, k, v, mask=mask, implementation=backend).sum()
        )(q)

    seen = set()
    for seed in range(4):
        bits = random_bits(2, 3, 3, seed=seed)
        mask = BlockMask.from_dense(bits, masks.causal(), block=16, capacity=9)
        seen.add(float(attend(q, mask)[0]))
    assert len(traces) == 1
    assert len(seen) == 4, "contents do matter"


@every_backend
def test_vmap(backend):
    """Over q, k, v with one mask, over the mask with one q, and over both."""
    q, k, v, *_ = random_arrays(3, 40, 40, 2, 1, 8)
    bits = random_bits(3, 2, 3, 3)
    attend = masked_attention(backend, rule=masks.causal())

    def loss(q, k, v, bits):
        return (attend(q[None], k[None], v[None], bits) ** 2).sum()

    derive = jax.value_and_grad(loss, (0, 1, 2))
    alone = fast(derive)
    for axes in [(0, 0, 0, None), (None, None, None, 0), (0, 0, 0, 0)]:
        args = [x if axis == 0 else x[0] for x, axis in zip((q, k, v, bits), axes, strict=True)]
        mapped = fast(jax.vmap(derive, axes))(*args)
        for i in range(3):
            one = [x[i] if axis == 0 else x for x, axis in zip(args, axes, strict=True)]
            value, grads = alone(*one)
            assert oracle.relative_error(mapped[0][i], value) <= OUTPUT
            for x, y in zip(mapped[1], grads, strict=True):
                assert oracle.relative_error(x[i], y) <= GRADIENT


@every_backend
def test_scan_and_checkpoint(backend):
    """Two layers with a mask each: scanned, rematerialised and unrolled, with gradients."""
    q, k, v, *_ = random_arrays(1, 40, 40, 2, 2, 8)
    bits = random_bits(2, 2, 3, 3).at[:, :, :, 0].set(True)
    attend = masked_attention(backend)

    def layer(x, bits):
        return x + attend(x, k, v, bits), None

    def written_out(x):
        for one in bits:
            x, _ = layer(x, one)
        return (x**2).sum()

    def scanned(x):
        return (jax.lax.scan(layer, x, bits)[0] ** 2).sum()

    def rematerialised(x):
        return (jax.lax.scan(jax.checkpoint(layer), x, bits)[0] ** 2).sum()

    value, grad = fast(jax.value_and_grad(written_out))(q)
    for other in (scanned, rematerialised):
        its_value, its_grad = fast(jax.value_and_grad(other))(q)
        assert oracle.relative_error(its_value, value) <= OUTPUT
        assert oracle.relative_error(its_grad, grad) <= GRADIENT


@every_backend
def test_eval_shape(backend):
    """Shapes and dtypes without a computation, for sizes that no memory holds."""
    T = 1 << 20
    shape = jax.ShapeDtypeStruct
    bf16 = jnp.bfloat16

    def attend(q, k, v):
        return xsake.dot_product_attention(
            q, k, v, is_causal=True, implementation=backend, return_residual=True
        )

    inputs = [shape((8, T, *sizes), bf16) for sizes in ((8, 64), (2, 64), (2, 128))]
    if backend == "dense":
        limit = r"up to 1 GiB; these are 8 × 8 × 1048576 × 1048576, 262144\.0 GiB"
        with pytest.raises(ValueError, match=limit):
            jax.eval_shape(attend, *inputs)
        return
    out, lse = jax.eval_shape(attend, *inputs)
    assert (out.shape, out.dtype) == ((8, T, 8, 128), bf16)
    assert (lse.shape, lse.dtype) == ((8, T, 8), jnp.float32)


@pytest.mark.by_version
@every_backend
def test_export(backend):
    """Serialised, read back, called and differentiated with other contents."""
    q, k, v, *_ = random_arrays(1, 40, 40, 2, 1, 8)
    bits = random_bits(2, 3, 3)
    attend = masked_attention(backend, rule=masks.causal())
    exported = jax.export.export(jax.jit(attend))(q, k, v, bits)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    for contents in (bits, random_bits(2, 3, 3, seed=9)):
        results = [
            fast(jax.value_and_grad(lambda q, f=f, c=contents: (f(q, k, v, c) ** 2).sum()))(q)
            for f in (again.call, attend)
        ]
        (ours, our_grad), (theirs, their_grad) = results
        assert oracle.relative_error(ours, theirs) <= OUTPUT
        assert oracle.relative_error(our_grad, their_grad) <= GRADIENT


def test_the_reference_has_second_derivatives():
    """Against differences of its first derivatives, whose step of 1e-2 errs by about 1e-4."""
    q, k, v, *_ = random_arrays(1, 5, 6, 2, 1, 4)
    direction = jax.random.normal(jax.random.key(0), q.shape)

    def slope(q):
        def loss(q):
            out = xsake.dot_product_attention(q, k, v, is_causal=True, implementation="reference")
            return (out**2).sum()

        return jnp.vdot(jax.grad(loss)(q), direction)

    compiled = fast(slope)
    expected = (compiled(q + 1e-2 * direction) - compiled(q - 1e-2 * direction)) / 2e-2
    actual = jnp.vdot(fast(jax.grad(slope))(q), direction)
    assert oracle.relative_error(actual, expected) < 1e-3


@by_own_gradient
def test_second_derivatives_are_refused(backend):
    q, k, v, *_ = random_arrays(1, 5, 6, 2, 1, 4)

    def loss(q):
        return (xsake.dot_product_attention(q, k, v, implementation=backend) ** 2).sum()

    with pytest.raises(NotImplementedError, match=r"(?i)(second|twice|deriv).*reference"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(q)


@by_own_gradient
def test_forward_mode_is_refused_in_our_own_words(backend):
    """Eagerly, under jit and through vmap; reverse mode of one argument alone still works."""
    q, k, v, *_ = random_arrays(1, 5, 6, 2, 1, 4)

    def attend(q):
        return xsake.dot_product_attention(q, k, v, implementation=backend)

    for derive in (
        lambda: jax.jvp(attend, (q,), (q,)),
        lambda: jax.jit(lambda q: jax.jvp(attend, (q,), (q,)))(q),
        lambda: jax.jacfwd(lambda s: attend(s * q))(1.0),
        lambda: jax.linearize(attend, q)[1](q),
    ):
        with pytest.raises(NotImplementedError, match=rf"'{backend}'.*reverse-mode.*reference"):
            derive()
    assert jax.eval_shape(jax.vmap(jax.grad(lambda q: attend(q).sum())), q[None]).shape[1:] == (
        q.shape
    )


@every_backend
def test_a_list_that_was_cut_under_jit_makes_everything_nan(backend):
    """Output, logsumexp and every element of every gradient; a mask that fits is untouched."""
    q, k, v, d_out, d_lse = random_arrays(1, 64, 64, 2, 2, 8)

    @fast
    def both(q, k, v, bits):
        mask = BlockMask.from_dense(bits, block=16, capacity=9)
        return run.__wrapped__(backend, q, k, v, d_out, d_lse, mask=mask)

    assert all(np.isnan(x).all() for x in both(q, k, v, jnp.tri(4, dtype=bool)))
    bits = jnp.eye(4, dtype=bool)
    mask = BlockMask.from_dense(bits, block=16)
    assert mask.overflow is None
    assert_near(both(q, k, v, bits), run(backend, q, k, v, d_out, d_lse, mask=mask))


@every_backend
def test_row_blocks_may_share_a_list(backend):
    """A mask made by hand: lists out of order, shared, of other lengths; gradients as well."""
    x = random_arrays(1, 64, 64, 2, 2, 8)
    lists = [[0, 2], [2, 1], [0, 2], [2]]
    arrays = [[0, 2, 0, 1], [2, 2, 2, 1], [2, 1, 0, 0], [0, 2, 2, 1]]
    given = (jnp.asarray(a, jnp.int32)[None, None] for a in arrays)
    mask = BlockMask(*given, None, masks.causal(), (64, 64), (16, 16))
    see = np.zeros((64, 64), bool)
    for i, (blocks, full) in enumerate(zip(lists, arrays[2], strict=True)):
        for rank, j in enumerate(blocks):
            at = np.s_[16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
            see[at] = np.tri(64, dtype=bool)[at] | (rank < full)
    assert (np.asarray(mask.to_dense())[0, 0] == see).all()
    assert (np.asarray(mask.transpose().to_dense())[0, 0] == see.T).all()
    spec = ("array", see[None, None])
    assert_near(run(backend, *x, mask=mask), from_oracle(spec, *x))


@every_backend
def test_sinks_of_minus_infinity_are_no_sinks(backend):
    """One of two, or all of a head; empty rows too. Values and gradients are the oracle's."""
    q, k, v, d_out, _ = random_arrays(1, 20, 20, 2, 1, 8)
    sinks = jnp.array([[-jnp.inf, 0.5], [-jnp.inf, -jnp.inf]])
    see = np.tri(20, dtype=bool)[None, None] & (np.arange(20) > 2)

    @fast
    def both(q, k, v, sinks):
        out, pull_back = jax.vjp(
            lambda q, k, v, sinks: xsake.dot_product_attention(
                q, k, v, mask=jnp.asarray(see), sinks=sinks, implementation=backend
            ),
            q, k, v, sinks,
        )  # fmt: skip
        return (out, *pull_back(d_out))

    call = {"allowed": np.broadcast_to(see, (1, 2, 20, 20)), "sinks": sinks}
    with np.errstate(invalid="ignore"):
        out, _ = oracle.attention(q, k, v, **call)
        grads = oracle.attention_grads(q, k, v, d_out=d_out, **call)
    ours = both(q, k, v, sinks)
    assert oracle.relative_error(ours[0], out) <= OUTPUT
    for name, x in zip(("dq", "dk", "dv", "dsinks"), ours[1:], strict=True):
        assert oracle.relative_error(x, grads[name]) <= GRADIENT, name


@every_backend
def test_a_bias_of_minus_infinity_hides_keys(backend):
    """Row 3 sees nothing: zeros, -inf and finite gradients, as a mask would give."""
    x = random_arrays(1, 20, 20, 2, 2, 8)
    see = np.ones((1, 1, 20, 20), bool)
    see[..., 3, :] = see[..., 5, :7] = False
    bias = jnp.where(see, 0, -jnp.inf).astype(jnp.float32)
    assert_near(run(backend, *x, bias=bias), from_oracle(("array", see), *x))


@every_backend
@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 4, 0)], ids=str)
def test_empty_axes_give_what_jax_nn_gives(backend, sizes):
    B, T, S = sizes
    q, k, v = jnp.ones((B, T, 4, 8)), jnp.ones((B, S, 2, 8)), jnp.ones((B, S, 2, 8))

    def attend(q, k, v):
        return xsake.dot_product_attention(q, k, v, is_causal=True, implementation=backend)

    out, pull_back = jax.vjp(attend, q, k, v)
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    assert (out.shape, out.dtype) == (want.shape, want.dtype)
    assert not out.any()
    assert not want.any()
    assert [x.shape for x in pull_back(out)] == [q.shape, k.shape, v.shape]


@every_backend
def test_two_runs_are_bit_equal(backend):
    x = random_arrays(2, 75, 75, 4, 2, 16)
    mask = BlockMask.from_dense(random_bits(2, 4, 5, 5), masks.causal(), shape=(75, 75), block=16)
    call = {"mask": mask, "sinks": jnp.ones(4), "logits_soft_cap": 5.0}
    call["options"] = xsake.Options(deterministic=True)
    assert_same_bits(run(backend, *x, **call), run(backend, *x, **call))


@every_backend
def test_sums_are_float32_whatever_the_dtype(backend):
    """The bias gradient is a sum of 1,216 ones; a sum in bfloat16 would stop at 256."""
    q, k, v, *_ = (x.astype(jnp.bfloat16) for x in random_arrays(2, 152, 40, 4, 2, 8))

    def logsumexps(bias):
        return xsake.dot_product_attention(
            q, k, v, bias, implementation=backend, return_residual=True
        )[1].sum()

    grad = fast(jax.grad(logsumexps))(jnp.zeros((1, 1, 1, 1), jnp.bfloat16))
    assert grad.item() == pytest.approx(2 * 4 * 152, rel=2**-8)


@every_backend
def test_partial_results_merge_by_their_logsumexp(backend):
    """Attention over two halves of the keys, merged, is attention over all; gradients too."""
    q, k, v, d_out, _ = random_arrays(1, 30, 64, 2, 1, 8)

    def merged(q, k, v):
        parts = [
            xsake.dot_product_attention(
                q, k[:, s], v[:, s], implementation=backend, return_residual=True
            )
            for s in (slice(0, 23), slice(23, 64))
        ]
        weights = jax.nn.softmax(jnp.stack([lse for _, lse in parts]), axis=0)
        return sum(w[..., None] * out for w, (out, _) in zip(weights, parts, strict=True))

    def whole(q, k, v):
        return xsake.dot_product_attention(q, k, v, implementation=backend)

    results = []
    for attend in (merged, whole):

        @fast
        def both(q, k, v, attend=attend):
            out, pull_back = jax.vjp(attend, q, k, v)
            return (out, *pull_back(d_out))

        results.append(both(q, k, v))
    for i, (x, y) in enumerate(zip(*results, strict=True)):
        assert oracle.relative_error(x, y) <= (GRADIENT if i else OUTPUT)


@pytest.mark.second_python
def test_shard_map_over_batch_and_heads():
    """On 8 devices, with rules that depend on the batch and head index: see tests/sharded.py."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sharded"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(": ok") == 10
