"""JAX transformations, unusual masks and inputs, and repeatability, on every backend."""

from __future__ import annotations

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
from tests.probes import (
    GRADIENT,
    OUTPUT,
    assert_near,
    assert_same_bits,
    by_blocks,
    by_own_gradient,
    every_backend,
    fast,
    from_oracle,
    masked_attention,
    random_arrays,
    random_bits,
    run,
)
from xsake import BlockMask, masks


# `dense` has the formulas of `reference`, and more to get wrong.
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


@by_blocks
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


@by_blocks
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
@by_blocks
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


@by_blocks
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


@by_blocks
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


@pytest.mark.parametrize(
    ("flags", "cases"),
    [
        pytest.param([], 4, marks=pytest.mark.second_python, id="rules together"),
        pytest.param(["--all"], 9, marks=pytest.mark.slow, id="all"),
    ],
)
def test_shard_map_over_batch_and_heads(flags, cases):
    """On 8 devices, with rules that depend on the batch and head index: see tests/sharded.py."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sharded", *flags],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(": ok") == cases
