"""The `dense` backend: what the conformance suite and the probes of all backends do not ask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.probes import assert_near, from_oracle, random_arrays, run
from tests.specs import to_rule
from xsake import BlockMask, masks
from xsake.backends import Sizes, dense
from xsake.block_mask.lists import token_map


def test_a_query_that_is_not_finite_reaches_only_the_keys_it_sees():
    """Query 5 is NaN and sees keys 0 to 5: those have NaN gradients, the others do not change."""
    q, k, v, d_out, d_lse = random_arrays(1, 16, 16, 2, 1, 8)
    mask = BlockMask.from_rule(masks.causal(), (16, 16), block=16)
    clean = run("dense", q, k, v, d_out, d_lse, mask=mask)
    found = run("dense", q.at[:, 5].set(jnp.nan), k, v, d_out, d_lse, mask=mask)
    for name, x, y in zip(("out", "lse", "dq"), found, clean, strict=False):
        rest = np.arange(16) != 5
        assert np.isnan(x[:, 5]).all(), name
        assert np.asarray(x[:, rest]).tobytes() == np.asarray(y[:, rest]).tobytes(), name
    for name, x, y in zip(("dk", "dv"), found[3:], clean[3:], strict=True):
        assert np.isnan(x[:, :6]).all(), name
        assert np.asarray(x[:, 6:]).tobytes() == np.asarray(y[:, 6:]).tobytes(), name


def test_an_infinite_value_makes_its_queries_nan_and_no_others():
    """inf in one column of a value: the whole output of the queries that see it."""
    q, k, v, d_out, d_lse = random_arrays(1, 16, 16, 2, 1, 8)
    mask = BlockMask.from_rule(masks.causal(), (16, 16), block=16)
    out, *_ = run("dense", q, k, v.at[:, 9, :, 3].set(jnp.inf), d_out, d_lse, mask=mask)
    assert np.isnan(out[:, 9:]).all()
    assert np.isfinite(out[:, :9]).all()


def test_under_a_window_only_a_band_is_computed():
    """Bands of 64 queries with 192 of 400 keys each; odd lengths, documents, grouped heads."""
    q, k, v, d_out, d_lse = random_arrays(2, 300, 400, 4, 2, 8)
    ids = np.stack([np.arange(400) // 60, np.arange(400) // 130]).astype(np.int32)
    spec = "and", ("sliding_window", 50, 9), ("documents", ids[:, :300], ids)
    mask = BlockMask.from_rule(to_rule(spec), (300, 400), block=16)
    layout = dense.Layout.of(Sizes.of(q, k, v), mask, None)
    assert layout == dense.Layout(layout.sizes, 5, 64, 192, (0, 0, 64, 128, 192))
    found = run("dense", q, k, v, d_out, d_lse, mask=mask, logits_soft_cap=5.0)
    assert_near(found, from_oracle(spec, q, k, v, d_out, d_lse, soft_cap=5.0))


IDS = jnp.arange(40)[None] // 15


@pytest.mark.parametrize(
    ("mask", "is_rule"),
    [
        (lambda: BlockMask.from_rule(masks.causal(), (40, 40), block=16), True),
        (lambda: BlockMask.from_rule(masks.documents(IDS), (40, 40), block=16), True),
        (
            lambda: (
                BlockMask.from_rule(masks.sliding_window(9, 0), (40, 40), block=16)
                & masks.documents(IDS)
            ),
            True,
        ),
        (
            lambda: (
                BlockMask.from_rule(masks.causal(), (40, 40), block=16)
                & BlockMask.from_dense(jnp.eye(3, dtype=bool), shape=(40, 40), block=16)
            ),
            False,
        ),
        (lambda: BlockMask.from_rule(masks.causal(), (40, 40), block=16, capacity=6), False),
    ],
    ids=["rule", "rule with arrays", "mask & rule", "mask & blocks", "capacity"],
)
def test_the_rule_alone_is_used_only_where_it_is_the_whole_mask(mask, is_rule):
    """What `to_dense` gives is what the lists give."""
    mask = mask()
    assert mask.is_rule == mask.transpose().is_rule == is_rule
    by_lists = token_map(mask.lists, mask.rule, mask.grid)
    assert (np.asarray(mask.to_dense()) == np.asarray(by_lists)).all()


@pytest.mark.parametrize("backend", ["xla", "dense"])
def test_a_profile_shows_what_belongs_to_the_forward_and_the_backward(backend):
    x = jnp.ones((1, 16, 1, 8))

    def attend(x, ids):
        mask = masks.documents(ids) & masks.causal()
        return xsake.dot_product_attention(x, x, x, mask=mask, implementation=backend).sum()

    lowered = jax.jit(jax.grad(attend)).lower(x, jnp.zeros((1, 16), jnp.int32))
    text = lowered.as_text(debug_info=True)
    for scope in ("xsake_forward", "xsake_backward", "block_lists"):
        assert scope in text, scope
