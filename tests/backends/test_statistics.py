"""`xsake.observed_attention`: entropy and block mass, against the float64 oracle."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests import oracle
from tests.backends.test_conformance import allowed_in, arguments, taken_by
from tests.draws import FAST_COMPILATION
from xsake import _jax, masks
from xsake.arguments import block_for
from xsake.backends import statistics
from xsake.bench.cases import CONFORMANCE, Case

# On a GPU `pytest -m gpu` runs the whole module.
pytestmark = [pytest.mark.gpu] if _jax.platform() == "gpu" else []
LIMIT = 1e-3  # of entropies in nats and of masses

# One case of each kind of input; a GPU runs all.
ON_A_CPU = {"several sinks, documents", "soft cap and bias", "kv-head blocks"}
assert {case.name for case in CONFORMANCE} >= ON_A_CPU
CASES = [
    pytest.param(
        case,
        way,
        id=f"{case.name}-{way}",
        marks=[]
        if _jax.platform() == "gpu" or (way == "dense" and case.name in ON_A_CPU)
        else pytest.mark.slow,
    )
    for case in CONFORMANCE
    for way in ("hopper", "dense")
]


@pytest.mark.parametrize(("case", "way"), CASES)
def test_every_case_has_the_statistics_of_the_oracle(case: Case, way: str):
    """Entropy over keys and blocks of every query, and the mass of every block."""
    case = taken_by(case, way)
    given = arguments(case)
    if way == "hopper" and case.bias is not None and case.bias[3] == 1:
        pytest.skip("a bias per query is for plain JAX")
    if way == "hopper" and max(case.sizes[-2:]) > 128:
        pytest.skip("heads of 256 are for plain JAX")
    arrays = {name: x for name, x in given.items() if isinstance(x, jax.Array | np.ndarray)}
    rest = {name: x for name, x in given.items() if name not in arrays}
    options = FAST_COMPILATION if _jax.platform() == "cpu" else None

    @functools.partial(jax.jit, compiler_options=options)
    def run(arrays):
        return xsake.observed_attention(**arrays, **rest, what="tokens", implementation=way)

    out, found = run(arrays)
    q, k, v = (np.asarray(given[name], np.float64) for name in ("query", "key", "value"))
    setting = {
        "allowed": allowed_in(case),
        "scale": case.scale,
        "soft_cap": case.soft_cap,
        **{name: np.asarray(given[name]) for name in ("bias", "sinks") if name in given},
    }
    entropy, block_entropy, mass = oracle.statistics(q, k, **setting, block=blocks_of(case))
    assert found.mass.shape == mass.shape
    for name, want in (("entropy", entropy), ("block_entropy", block_entropy), ("mass", mass)):
        got = np.asarray(getattr(found, name), np.float64)
        assert np.isfinite(got).all(), name
        assert np.abs(got - want).max() <= LIMIT, name
    assert oracle.relative_error(out, oracle.attention(q, k, v, **setting)[0]) <= 1e-2


def blocks_of(case: Case) -> tuple[int, int]:
    """The block sizes of a call: the case's, or what the door takes without a BlockMask."""
    if case.blocks() is not None:
        return case.block
    _, T, S, *_ = case.sizes
    return block_for(T), block_for(S)


def test_masses_add_up_to_one_for_rows_that_see_something():
    """And to nothing for a row block that sees nothing; with sinks to what they leave."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((64, 2, 16)), jnp.float32) for _ in range(3))
    ids = jnp.arange(64) // 24  # 0, 1, 2
    mask = xsake.BlockMask.from_rule(
        masks.documents(jnp.where(ids == 2, -1, ids)), (64, 64), block=(16, 16)
    )
    observe = jax.jit(
        functools.partial(xsake.observed_attention, what="tokens", implementation="dense")
    )
    out, found = observe(q, k, v, mask=mask)
    assert (found.entropy.shape, found.mass.shape) == ((2, 64), (2, 4, 4))
    np.testing.assert_allclose(found.mass.sum(-1), [[1, 1, 1, 0]] * 2, atol=1e-6)
    assert not np.asarray(found.entropy[:, 48:]).any()
    assert not np.asarray(out[48:]).any()
    sinks = jnp.array([-jnp.inf, 1.0])
    _, with_sinks = observe(q, k, v, mask=mask, sinks=sinks)
    np.testing.assert_allclose(with_sinks.mass[0], found.mass[0], atol=1e-6)
    allowed = np.asarray(mask.to_dense(1, 2))
    _, lse = oracle.attention(q[None], k[None], v[None], allowed=allowed)
    left = jax.nn.sigmoid(lse[0, :48, 1] - 1).reshape(3, 16).mean(-1)
    np.testing.assert_allclose(with_sinks.mass[1, :3].sum(-1), left, atol=1e-6)


def test_what_cannot_be_observed_is_refused():
    """A wrong word, and a backend that was named and cannot run; nothing is computed instead."""
    with pytest.raises(ValueError, match=r"what is 'keys'; choose one of \['blocks', 'tokens'\]"):
        inspect.unwrap(statistics.checked)("keys")  # without the types of the tests
    q = jnp.zeros((16, 1, 256))
    with pytest.raises(ValueError, match="implementation 'hopper' cannot "):
        xsake.observed_attention(q, q, q, implementation="hopper")


def test_statistics_have_no_gradient_and_the_output_keeps_its_own():
    """Also in a loss that reads them."""
    q = jnp.linspace(-1, 1, 32 * 16).reshape(32, 1, 16)

    def loss(q, weight):
        out, found = xsake.observed_attention(q, q, q, is_causal=True, implementation="dense")
        assert found.entropy is None  # it was not asked for
        return (out**2).sum() + weight * (found.block_entropy.sum() + found.mass.sum())

    slope = jax.jit(jax.grad(loss))
    np.testing.assert_array_equal(slope(q, 0.0), slope(q, 1.0))
    assert np.asarray(slope(q, 0.0)).any()


def test_statistics_of_a_mask_that_overflowed_are_nan():
    """As the output is: what the lists lack cannot be told from what has no mass."""
    q = jax.random.normal(jax.random.key(0), (1, 64, 2, 16))

    @jax.jit
    def run(blocks):
        mask = xsake.BlockMask.from_dense(
            blocks, masks.causal(), shape=(64, 64), block=16, capacity=5
        )
        return xsake.observed_attention(q, q, q, mask=mask)

    for x in jax.tree.leaves(run(jnp.ones((1, 1, 4, 4), bool))):
        assert np.isnan(x).all()


def test_statistics_are_float32_and_take_no_return_residual():
    q = jax.random.normal(jax.random.key(0), (1, 16, 2, 16))
    with pytest.raises(TypeError, match="observed_attention takes no return_residual"):
        xsake.observed_attention(q, q, q, return_residual=True)
    with jax.enable_x64(True):
        _, found = xsake.observed_attention(*[q.astype(jnp.float64)] * 3)
    assert {x.dtype for x in jax.tree.leaves(found)} == {np.dtype("float32")}
