"""The selected branch against the float64 oracle: any indices, any group, packed sequences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import xsake
from tests.nsa import oracle
from tests.oracle import relative_error
from xsake.nsa import selected
from xsake.nsa.sequences import ONE_SEQUENCE, describe, sequences_of

# As in tests/backends/test_conformance.py, which gives the reasons.
OUTPUT_LIMIT = {"float32": 2e-6, "bfloat16": 1e-2}
GRADIENT_LIMIT = {"float32": 1e-5, "bfloat16": 1e-2}
BLOCK = 16
T = 75  # not a multiple of the block
PACKED = np.array([3] * 21 + [0] * 1 + [-1] * 2 + [4] * 35 + [1] * 16)


def results(**given):
    """out, logsumexp and the gradients of q, k, v."""
    return tuple(map(np.asarray, compiled(**given)))


@functools.partial(jax.jit, static_argnames=("block", "implementation"))
def compiled(q, k, v, indices, counts, ids, d_out, d_lse, block=BLOCK, implementation=None):
    sequences = ONE_SEQUENCE
    if ids is not None:
        sequences = sequences_of(*q.shape[:2], segment_ids=ids, cu_seqlens=None, token_indices=None)

    def attend(q, k, v):
        return selected.attend_selected(
            *(q, k, v, indices),
            counts=counts,
            block=block,
            scale=q.shape[-1] ** -0.5,
            sequences=sequences,
            implementation=implementation,
        )

    found, pull_back = jax.vjp(attend, q, k, v)
    return *found, *pull_back((d_out, d_lse))


def inputs(seed=0, B=2, T=T, N=4, K=2, H=8, Hv=12, dtype="float32"):
    """Rounded to dtype, as float64."""
    rng = np.random.default_rng(seed)
    shapes = {"q": (B, T, N, H), "k": (B, T, K, H), "v": (B, T, K, Hv), "d_out": (B, T, N, Hv)}
    found = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    found = {name: x.astype(jnp.dtype(dtype)).astype(np.float64) for name, x in found.items()}
    found["d_lse"] = np.float32(rng.standard_normal((B, T, N))).astype(np.float64)
    return found


def any_indices(seed=1, B=2, T=T, K=2, C=5):
    """Negative, repeated, future and missing blocks among them; and counts from 0 to C."""
    rng = np.random.default_rng(seed)
    return rng.integers(-3, -(-T // BLOCK) + 3, (B, T, K, C)), rng.integers(0, C + 1, (B, T, K))


def check(given, indices, counts, ids, dtype="float32", implementation=None, floor=1e-30):
    """Compares all results with the oracle, batch row by batch row.

    floor: the least size that errors are relative to.
    """
    arrays = {name: x.astype(jnp.dtype(dtype)) for name, x in given.items()}
    arrays["d_lse"] = np.float32(given["d_lse"])
    found = results(
        **arrays, indices=indices, counts=counts, ids=ids, implementation=implementation
    )
    expected = []
    for b in range(len(indices)):
        q, k, v, d_out, d_lse = (given[name][b] for name in ("q", "k", "v", "d_out", "d_lse"))
        row_ids = np.zeros(q.shape[0], int) if ids is None else ids[b]
        row_counts = None if counts is None else counts[b]
        seen = oracle.selected_mask(indices[b], row_counts, row_ids, BLOCK)
        scale = q.shape[-1] ** -0.5
        out, lse, _ = oracle.attention(q, k, v, seen, scale)
        grads = oracle.attention_grads(q, k, v, seen, scale, d_out, d_lse)
        expected.append((out, lse, *grads))
    for name, actual, rows in zip(
        ("out", "lse", "dq", "dk", "dv"), found, zip(*expected, strict=True), strict=True
    ):
        limit = (OUTPUT_LIMIT if name in ("out", "lse") else GRADIENT_LIMIT)[dtype]
        error = relative_error(np.asarray(actual, np.float64), np.stack(rows), floor)
        assert error <= limit, f"{name}: {error}"


@pytest.mark.parametrize(
    "group", [1, 3, *(pytest.param(x, marks=pytest.mark.slow) for x in (4, 8, 16))]
)
def test_any_group_and_any_indices(group):
    indices, counts = any_indices()
    check(inputs(N=2 * group), indices, counts, None)


def test_packed_sequences_with_padding():
    """Groups of 16, with which several tiles of queries visit a block."""
    indices, counts = any_indices()
    ids = np.stack([PACKED, np.roll(PACKED, 30)])
    check(inputs(N=32), indices, counts, ids)


def test_any_sequences_and_any_choice_of_blocks(request):
    """Few and many sequences, blocks and counts, all with one compiled program."""

    @settings(
        max_examples=40 if request.config.getoption("--slow") else 6,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        seed=st.integers(0, 2**32 - 1),
        changes=st.sampled_from([0, 1, 5, 30, T]),
        padding=st.sampled_from([0.0, 0.1, 1.0]),
        highest=st.sampled_from([0, 2, 8, 2**30]),
    )
    def every_number_is_near(seed, changes, padding, highest):
        rng = np.random.default_rng(seed)
        ids = np.cumsum(rng.permuted(np.arange(2 * T).reshape(2, T) % T < changes, axis=1), axis=1)
        ids = np.where(rng.random((2, T)) < padding, -1, ids)
        indices = rng.integers(-2, highest + 1, (2, T, 2, 5))
        counts = rng.integers(0, 6, (2, T, 2))
        # Where every query sees few keys, the terms of dq and dk cancel: inputs are of size 1.
        check(inputs(seed=seed % 7), indices, counts, ids, floor=0.1)

    every_number_is_near()


def test_bfloat16():
    indices, counts = any_indices()
    check(inputs(dtype="bfloat16"), indices, counts, None, dtype="bfloat16")


def test_the_reference_agrees():
    indices, counts = any_indices()
    ids = np.stack([PACKED, np.roll(PACKED, 30)])
    check(inputs(), indices, counts, ids, implementation="reference")


def test_nothing_selected_gives_zeros_and_zero_gradients():
    given = inputs()
    indices = np.full((2, T, 2, 5), -1)
    indices[1] = 99  # missing blocks
    arrays = {name: np.float32(x) for name, x in given.items()}
    counts = np.full((2, T, 2), 5)
    counts[1, ::2] = 0
    indices[1, ::2] = 0  # a block that exists, but does not count
    out, lse, *grads = results(**arrays, indices=indices, counts=counts, ids=None)
    assert not out.any()
    assert (lse == -np.inf).all()
    assert not any(g.any() for g in grads)


def test_indices_become_a_set():
    indices = jnp.array([4, 1, 1, -7, 0, 9, 4, 2], jnp.int32).reshape(1, 1, 1, 8)
    wide = jnp.broadcast_to(indices, (1, 3 * BLOCK, 1, 8))
    sets = selected.as_sets(wide, None, ONE_SEQUENCE, BLOCK)[0, :, 0]
    assert sets[BLOCK - 1].tolist() == [0] + [-1] * 7
    assert sets[BLOCK].tolist() == [0, 1] + [-1] * 6
    assert sets[-1].tolist() == [0, 1, 2] + [-1] * 5
    first_two = selected.as_sets(wide, 2, ONE_SEQUENCE, BLOCK)[0, :, 0]
    assert first_two[-1].tolist() == [1] + [-1] * 7


def test_no_gradient_reaches_the_future():
    """Row t of the Jacobian of a summed output has no entry after t."""
    given = inputs()
    indices, counts = any_indices()
    for t in (0, 15, 16, 40):
        d_out, d_lse = (np.zeros_like(given[name]) for name in ("d_out", "d_lse"))
        d_out[:, t], d_lse[:, t] = 1, 1
        arrays = given | {"d_out": d_out, "d_lse": d_lse}
        arrays = {name: np.float32(x) for name, x in arrays.items()}
        _, _, dq, dk, dv = results(**arrays, indices=indices, counts=counts, ids=None)
        assert not any(x[:, t + 1 :].any() for x in (dq, dk, dv))


def test_a_dropped_block_cannot_leak():
    """Keys and values of a block that nobody selects may be NaN."""
    given = inputs()
    indices = np.where(any_indices()[0] == 1, 0, any_indices()[0])
    arrays = {name: np.float32(x) for name, x in given.items()}
    call = {"indices": indices, "counts": np.full((2, T, 2), 5), "ids": None}
    clean = results(**arrays, **call)
    for name in ("k", "v"):
        arrays[name][:, BLOCK : 2 * BLOCK] = np.nan
    for one, two in zip(clean, results(**arrays, **call), strict=True):
        assert np.array_equal(one, two)


def test_a_key_after_the_query_may_hold_any_finite_value():
    """Later tokens of a visited block do not change earlier rows, whatever they hold."""
    given, t = inputs(), 40
    indices, counts = any_indices()
    arrays = {name: np.float32(x) for name, x in given.items()}
    arrays["d_lse"] *= 0
    arrays["d_out"] *= 100  # times such a value, it is infinite
    arrays["d_out"][:, t + 1 :] = 0
    call = {"indices": indices, "counts": counts, "ids": None}
    clean = results(**arrays, **call)
    arrays["k"][:, t + 1 :], arrays["v"][:, t + 1 :] = 1e18, 2e36
    for one, two in zip(clean, results(**arrays, **call), strict=True):
        assert np.array_equal(one[:, : t + 1], two[:, : t + 1])


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_what_is_not_finite_reaches_only_the_tokens_that_see_it(implementation):
    """Keys and values: their queries. Queries and cotangents: their keys. Padding: nobody."""
    t, ids = 40, np.zeros((2, T), int)
    ids[:, 70:] = -1
    indices, counts = any_indices()
    call = {"indices": indices, "counts": counts, "ids": ids, "implementation": implementation}
    arrays = {name: np.float32(x) for name, x in inputs().items()}
    clean = results(**arrays, **call)
    by_row = zip(indices, counts, ids, strict=True)
    seen = np.stack([oracle.selected_mask(*x, BLOCK) for x in by_row])  # [B, T, K, S]

    bad = {name: x.copy() for name, x in arrays.items()}
    bad["k"][:, t], bad["v"][:, t + 1] = np.nan, np.inf
    hit = np.repeat(seen[..., [t, t + 1]].any(-1), 2, axis=2)  # [B, T, N]
    assert hit.any(1).all()
    for one, two in zip(clean[:3], results(**bad, **call)[:3], strict=True):  # out, lse, dq
        assert np.array_equal(one[~hit], two[~hit])
        assert np.isnan(two[hit]).all()

    if implementation is None:  # the reference has derivatives by JAX, with products of all pairs
        bad = {name: x.copy() for name, x in arrays.items()}
        bad["q"][:, t], bad["d_out"][:, t - 1] = np.inf, np.nan
        hit = seen[:, [t - 1, t]].any(1).swapaxes(1, 2)  # [B, S, K]
        assert hit.any(1).all()
        for one, two in zip(clean[3:], results(**bad, **call)[3:], strict=True):  # dk, dv
            assert np.array_equal(one[~hit], two[~hit])
            assert np.isnan(two[hit]).all()

    bad = {name: x.copy() for name, x in arrays.items()}
    for x in bad.values():
        x[:, 70:] = np.nan
    for one, two in zip(clean, results(**bad, **call), strict=True):
        assert np.array_equal(one, two)


def test_memory_is_linear_in_the_length():
    """Twice the tokens need at most twice the temporary memory, and a little."""

    def temporary_bytes(T):
        shape = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)
        lse = jax.ShapeDtypeStruct((1, T, 2), jnp.float32)
        indices = jax.ShapeDtypeStruct((1, T, 2, 4), jnp.int32)
        lowered = compiled.lower(shape, shape, shape, indices, None, None, shape, lse)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, large = temporary_bytes(1024), temporary_bytes(4096)
    assert large <= 4.2 * small


@pytest.mark.parametrize("by", ["cu_seqlens", "token_indices", "pairs"])
def test_sequences_are_described_in_three_ways(by):
    ends = np.array([0, 20, 20, 50, 75])
    ids = np.repeat([0, 2, 3], [20, 30, 25])
    positions = np.concatenate([np.arange(20), np.arange(30), np.arange(25)])
    given = {
        "cu_seqlens": {"cu_seqlens": jnp.asarray(ends)},
        "token_indices": {"token_indices": positions},
        "pairs": {"cu_seqlens": ends, "token_indices": np.stack([ids, positions], 1)},
    }[by]
    nothing = dict.fromkeys(("segment_ids", "cu_seqlens", "token_indices"))
    found = sequences_of(1, 75, **nothing | given)
    expected = sequences_of(1, 75, **nothing | {"segment_ids": ids})
    for one, two in zip(found, expected, strict=True):
        assert np.array_equal(one, two)


def test_traced_lengths_and_padding_after_the_last_sequence():
    @jax.jit
    def first_and_last(ends):
        return sequences_of(1, 8, segment_ids=None, cu_seqlens=ends, token_indices=None)

    found = first_and_last(jnp.array([0, 3, 5]))
    assert found.number[0].tolist() == [0, 0, 0, 1, 1, -1, -1, -1]
    assert found.last[0].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert found.first[0, :5].tolist() == [0, 0, 0, 3, 3]


def test_traced_lengths_that_describe_no_sequences_give_nan():
    """Values and gradients, of the gates too; what can be read is refused instead."""
    x = np.ones((1, 8, 1, 4), np.float32)
    indices = np.zeros((1, 8, 1, 1), np.int32)

    @jax.jit
    def run(ends):
        def attend(q, gate):
            call = {"g_slc": gate, "block_indices": indices, "block_size": 4, "cu_seqlens": ends}
            return xsake.native_sparse_attention(q, x, x, **call)

        out, pull_back = jax.vjp(attend, x, x[..., 0])
        return out, *pull_back(jnp.ones_like(out))

    assert all(np.isfinite(y).all() for y in run(jnp.array([0, 3, 8])))
    for ends in ([1, 4, 8], [0, 4, 3], [0, 4, 9]):
        assert all(np.isnan(y).all() for y in run(jnp.array(ends)))


@pytest.mark.parametrize("beside", [None, [0, 3, 8]])
def test_traced_positions_that_describe_no_sequences_are_noticed(beside):
    @jax.jit
    def holds(positions):
        given = {"segment_ids": None, "cu_seqlens": beside, "token_indices": positions}
        return describe(1, 8, **given)[1].holds

    assert holds(jnp.array([0, 1, 2, 0, 1, 2, 3, 4]))
    assert not holds(jnp.arange(1, 9))
    assert not holds(jnp.array([0, 1, 2, 0, 1, 0, 2, 3]))


def test_second_derivatives_are_refused():
    q = jnp.ones((1, 8, 1, 4))
    indices = jnp.zeros((1, 8, 1, 1), jnp.int32)

    def loss(q):
        return xsake.apply_native_sparse_attention(q, q, q, indices, block_size=4).sum()

    with pytest.raises(NotImplementedError, match="'xla' backend has first derivatives only"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(q)
