"""A Report: its types and how it prints; the settings of the call that makes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hads.test_certificate import EVERY, RULES, WINDOW, B, N, certify, problem
from xsake import hads


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"threshold": "a"}, "threshold is a share of the mass, 0 to 1, got 'a'"),
        ({"guarantee": [0.1]}, r"guarantee is a share of the mass, 0 to 1, got \[0.1\]"),
        ({"every": 8.0}, "every must be a whole number of at least 1, got 8.0"),
        ({"window": "32"}, "window must be a whole number of at least 1, got '32'"),
        ({"every": 0}, "every must be a whole number of at least 1, got 0"),
        ({"threshold": 1.5}, "threshold is a share of the mass, 0 to 1, got 1.5"),
        ({"criterion": "loss"}, 'criterion must be "mass" or "error", got \'loss\''),
        ({"guarantee": 0.1, "bound": False}, "guarantee needs the bound; leave bound = True"),
        ({"every": 12}, "every = 12 must divide the row blocks of 8 queries or be a multiple"),
        ({"window": 20}, "window = 20 must be a multiple of every = 8"),
        ({"correct": True}, "needs T = S and a mask whose rule is causal\\(\\), documents"),
    ],
)
def test_bad_settings_are_refused(change, words, as_users_call_it):
    q, k, v, mask = problem(RULES["array"])
    given = {"every": EVERY, "window": WINDOW} | change
    with pytest.raises(ValueError, match=words):
        hads.certified_attention(q, k, v, mask, jax.random.key(0), **given)


def test_settings_that_are_scalar_arrays_are_the_numbers_in_them(as_users_call_it):
    q, k, v, mask = problem(RULES["causal"])
    numbers = {"threshold": 0.5, "guarantee": 0.25, "every": EVERY, "window": WINDOW}
    arrays = {name: jnp.asarray(x) for name, x in numbers.items()}
    one, other = (
        jax.jit(functools.partial(hads.certified_attention, **x))(q, k, v, mask, jax.random.key(0))
        for x in (numbers, arrays)
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_arrays_may_be_lists_as_elsewhere(as_users_call_it):
    q, k, v, mask = problem(RULES["causal"])
    how = {"rng": jax.random.key(0), "every": EVERY, "window": WINDOW}
    wanted = hads.certified_attention(q, k, v, mask, **how)
    found = hads.certified_attention(*(x.tolist() for x in (q, k, v)), mask, **how)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(TypeError, match="key must be an array, got str"):
        hads.certified_attention(q, "k", v, mask, **how)


def test_a_traced_threshold_is_refused(as_users_call_it):
    q, k, v, mask = problem(RULES["causal"])
    with pytest.raises(TypeError, match="threshold must be a plain number, got a traced array"):
        jax.jit(lambda x: hads.certified_attention(q, k, v, mask, jax.random.key(0), threshold=x))(
            0.5
        )


def test_a_report_prints_a_line_for_every_head():
    q, k, v, mask = problem(RULES["causal"])
    report = certify(q, k, v, mask, jax.random.key(1), threshold=0.3)[1]
    assert str(report).count("\n") == B * N
    assert str(jax.tree.map(lambda x: x[0], report)).count("\n") == N
    assert str(jax.eval_shape(lambda: report)) == repr(report) == f"Report({B}×{N} heads)"


def test_a_report_of_vmapped_calls_prints_a_line_for_every_head():
    q, k, v, mask = problem(RULES["causal"])
    inside = []

    def one(q):
        report = certify(q, k, v, mask, jax.random.key(1), bound=True)[1]
        inside.append(str(report))
        return report

    report = jax.vmap(one)(jnp.stack([q, 2 * q, 3 * q]))
    assert inside == [f"Report({B}×{N} heads)"]
    assert repr(report) == f"Report(3×{B}×{N} heads)"
    title, *lines = str(report).splitlines()
    assert title.split()[:4] == ["axis", "0", "batch", "head"]
    assert [tuple(map(int, x.split()[:3])) for x in lines] == list(np.ndindex(3, B, N))
    assert f"{report.dropped_mass_by_head.mean[2, 1, 3]:.4f}" in lines[-1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("threshold", [None, 0.3])
def test_a_report_has_the_same_types_with_and_without_x64(threshold, dtype):
    q, k, v, mask = problem(RULES["causal"])
    with jax.enable_x64(True):
        given = [x.astype(dtype) for x in (q, k, v)]
        report = certify(*given, mask, jax.random.key(1), threshold=threshold, bound=True)[1]
        found = {x.dtype.name for x in jax.tree.leaves(report)}
        assert report.density.dtype == report.density_given.dtype == jnp.float32
    assert found == {"float32", "int32", "bool"}
