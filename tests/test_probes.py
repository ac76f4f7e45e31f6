"""Single properties of dot_product_attention, on every backend that runs on a CPU."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.probes import (
    assert_near,
    assert_same_bits,
    by_blocks,
    by_own_gradient,
    every_backend,
    fast,
    from_oracle,
    random_arrays,
    run,
)
from tests.specs import to_rule
from xsake import BlockMask, masks

# `dense` has the formulas of `reference`, and more to get wrong.
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
@pytest.mark.parametrize(
    "rule",
    [
        "lengths",
        "array",
        pytest.param("documents", marks=pytest.mark.slow),
        pytest.param("causal", marks=pytest.mark.slow),
    ],
)
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


@by_blocks
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


@by_blocks
@pytest.mark.parametrize("window", [(15, 0), (17, 3), (None, 5)])
def test_windows_need_not_align_with_blocks(backend, window):
    x = random_arrays(1, 53, 53, 2, 2, 8)
    spec = ("sliding_window", *window)
    mask = BlockMask.from_rule(to_rule(spec), (53, 53), block=(16, 32))
    assert_near(run(backend, *x, mask=mask), from_oracle(spec, *x))


@by_blocks
@pytest.mark.parametrize("lengths", [(20, 75), (75, 20), (1, 33)])
def test_queries_and_keys_may_differ_in_length(backend, lengths):
    T, S = lengths
    x = random_arrays(2, T, S, 2, 1, 8, 5)
    assert_near(run(backend, *x, is_causal=True), from_oracle(("causal",), *x))


@by_blocks
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


@by_blocks
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
