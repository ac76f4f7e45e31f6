"""The bound on the dropped mass where keys, queries or logits are not finite numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hads.test_certificate import (
    BLOCK,
    RULES,
    WINDOW,
    B,
    H,
    N,
    T,
    certify,
    problem,
    wants_one_key,
)
from xsake.block_mask import BlockMask
from xsake.hads import mass_bounds

VALUES = [np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("channels", [1, H])
def test_the_bound_of_dropped_keys_that_are_no_numbers_is_1(value, channels, soft_cap):
    """A guarantee does their row blocks densely, wherever the sample is."""
    q, k, v, mask = wants_one_key()
    mask = dropping_key_3(mask)
    k = k.at[0, 3, :, :channels].set(value)
    how = {"guarantee": 1.0, "bound": True, "logits_soft_cap": soft_cap}
    report = certify(q, k, v, mask, jax.random.key(4), **how)[1]
    np.testing.assert_array_equal(report.largest_bound[0, :, 1:], 1)
    assert report.dense_row_blocks[0, :, 1:].all()
    assert not report.dense_row_blocks[1].any()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("what", ["queries", "keys"])
@pytest.mark.parametrize("value", VALUES)
def test_queries_whose_logits_are_no_numbers_meet_no_guarantee(value, what, implementation):
    q, k, v, mask = problem(RULES["causal"], sharp=0.1)
    mask = dropping_key_3(mask)
    bad_q = q.at[0, 43, 0].set(value) if what == "queries" else q
    bad_k = k.at[0, 40:43].set(value) if what == "keys" else k
    how = {"guarantee": 0.9, "bound": True, "implementation": implementation}
    clean, report = (
        certify(*x, v, mask, jax.random.key(4), **how)[1] for x in ((q, k), (bad_q, bad_k))
    )
    assert not clean.dense_row_blocks[0, 0, 43 // BLOCK]
    assert report.dense_row_blocks[0, 0, 43 // BLOCK]
    assert not report.largest_bound[0, 0, 43 // WINDOW] < 1


def test_a_bound_is_not_0_where_the_kept_logits_are_infinite():
    q, k, _, mask = problem(RULES["causal"])
    n = -(-T // BLOCK)
    dropped = np.zeros((B, N, n, n), bool)
    dropped[:, :, 3, 0] = True
    found = mass_bounds.bounds(q, k, jnp.full((B, T, N), jnp.inf), jnp.asarray(dropped), mask.block)
    rows = np.arange(T) // BLOCK == 3
    assert np.isnan(found[..., rows]).all()
    np.testing.assert_array_equal(found[..., ~rows], 0)  # they drop nothing


def dropping_key_3(mask):
    """All blocks but the first one, of all row blocks but the first."""
    n = -(-T // BLOCK)
    kept = np.ones((B, N, n, n), bool)
    kept[:, :, 1:, 0] = False
    return BlockMask.from_dense(kept, mask.rule, shape=(T, T), block=BLOCK)
