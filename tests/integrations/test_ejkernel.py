"""ejkernel's Native Sparse Attention: its examples run as written, and every parameter counts."""

from __future__ import annotations

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.oracle import relative_error
from xsake.integrations import ejkernel
from xsake.integrations.ejkernel import apply_native_sparse_attention, native_sparse_attention

# The examples of ejkernel.kernels._xla.native_sparse_attention._interface, as they are printed
# there. They define q, k and v and then pass query, key and value: the names mean the same.
APPLY = """
>>> batch, seq_len, num_heads, head_dim = 2, 1024, 8, 64
>>> block_size = 64
>>> num_blocks = seq_len // block_size
>>>
>>> q = jnp.ones((batch, seq_len, num_heads, head_dim))
>>> k = jnp.ones((batch, seq_len, num_heads, head_dim))
>>> v = jnp.ones((batch, seq_len, num_heads, head_dim))
>>>
>>>
>>> block_counts = 4
>>> block_indices = jnp.tile(
...     jnp.arange(4)[None, None, None, :],
...     (batch, num_heads, num_blocks, 1)
... )
>>>
>>> output = apply_native_sparse_attention(
...     query, key, value, block_indices, block_counts, block_size
... )
>>> output.shape
(2, 1024, 8, 64)
"""
LOCAL = """
>>> def create_local_pattern(num_blocks, window=2):
...     indices = []
...     for i in range(num_blocks):
...         local = list(range(max(0, i-window), min(num_blocks, i+window+1)))
...
...         local = local + [0] * (window*2+1 - len(local))
...         indices.append(local)
...     return jnp.array(indices)
>>>
>>> local_indices = create_local_pattern(num_blocks, window=2)
>>> local_indices = jnp.tile(local_indices[None, None, :, :], (batch, num_heads, 1, 1))
>>> output = apply_native_sparse_attention(
...     query, key, value, local_indices, block_counts=5, block_size=block_size
... )
"""
NATIVE = """
>>> batch, seq_len, num_heads, head_dim = 2, 1024, 8, 64
>>> block_size = 64
>>> block_counts = 16
>>>
>>> q = jnp.ones((batch, seq_len, num_heads, head_dim))
>>> k = jnp.ones((batch, seq_len, num_heads, head_dim))
>>> v = jnp.ones((batch, seq_len, num_heads, head_dim))
>>>
>>>
>>> g_cmp = jnp.ones((batch, seq_len, num_heads * head_dim))
>>> output = native_sparse_attention(
...     query, key, value, g_cmp=g_cmp, block_counts=block_counts, block_size=block_size
... )
>>> output.shape
(2, 1024, 8, 64)
"""
GIVEN = """
>>> num_blocks = seq_len // block_size
>>> block_indices = jnp.tile(
...     jnp.arange(block_counts)[None, None, None, :],
...     (batch, num_heads, num_blocks, 1)
... )
>>> output = native_sparse_attention(
...     query, key, value, block_indices=block_indices, block_counts=block_counts, block_size=block_size
... )
>>> output.shape
(2, 1024, 8, 64)
"""  # noqa: E501  as printed

B, T, N, K, H, S, BLOCK = 2, 43, 4, 2, 8, 3, 8
BLOCKS = -(-T // BLOCK)
CLOSE = 2e-6  # the same computation, from other shapes of the same arguments


class Names(dict):
    """The names of an example; query, key and value are its q, k and v."""

    def __missing__(self, name):
        if name in ("query", "key", "value"):
            return self[name[0]]
        raise KeyError(name)


def run(example, names):
    code = re.sub(r"^(>>>|\.\.\.) ?", "", example, flags=re.MULTILINE)
    code = re.sub(r"^\([\d, ]+\)$", "", code, flags=re.MULTILINE)  # the printed shape
    scope = {"jnp": jnp, **{name: getattr(ejkernel, name) for name in ejkernel.__all__}}
    exec(code, scope, names)
    return names["output"]


@pytest.mark.parametrize(
    "examples",
    [pytest.param((APPLY, LOCAL), marks=pytest.mark.slow), (NATIVE, GIVEN)],
    ids=["apply", "native"],
)
def test_the_examples_run_as_written(examples):
    """Values are ones, so each branch gives ones where a query sees anything."""
    names = Names()
    for example in examples:
        output = np.asarray(run(example, names))
        assert output.shape == (2, 1024, 8, 64)
        added = 1.0 if example is NATIVE else 0.0  # the compressed branch
        np.testing.assert_allclose(output[:, :63], 1, atol=1e-6)
        np.testing.assert_allclose(output[:, 63:], 1 + added, atol=1e-6)


# -------------------------------------------------------------------------------------- both forms


@functools.cache
def arrays():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((B, T, N, H), np.float32)
    k, v = rng.standard_normal((2, B, T, K, H), np.float32)
    gates = rng.random((2, B, T, N), np.float32)
    indices = rng.integers(-1, BLOCKS + 1, (B, K, BLOCKS, S)).astype(np.int32)
    counts = rng.integers(0, S + 1, (B, K, BLOCKS)).astype(np.int32)
    return {"q": q, "k": k, "v": v, "gates": gates, "indices": indices, "counts": counts}


def spread(x):
    """[B, K, Tb, …] -> [B, T, K, …], by a loop."""
    found = np.zeros((B, T, K, *x.shape[3:]), x.dtype)
    for t in range(T):
        found[:, t] = x[:, :, t // BLOCK]
    return found


def apply(indices, counts, **more):
    a = arrays()
    return apply_native_sparse_attention(a["q"], a["k"], a["v"], indices, counts, BLOCK, **more)


def native(**more):
    a = arrays()
    more.setdefault("block_size", BLOCK)
    return native_sparse_attention(a["q"], a["k"], a["v"], **more)


def reference(indices, counts, **more):
    a = arrays()
    return np.asarray(
        xsake.apply_native_sparse_attention(a["q"], a["k"], a["v"], indices, counts, BLOCK, **more),
        np.float64,
    )


def test_indices_and_counts_for_blocks_are_those_for_their_tokens():
    indices, counts = arrays()["indices"], arrays()["counts"]
    expected = reference(spread(indices), spread(counts))
    for i in (indices, spread(indices)):
        for c in (counts, spread(counts)):
            assert relative_error(apply(i, c), expected) <= CLOSE
            assert relative_error(native(block_indices=i, block_counts=c), expected) <= CLOSE
    same = np.full_like(counts, 2)
    assert relative_error(apply(indices, 2), reference(spread(indices), spread(same))) <= CLOSE


def test_gates_for_heads_and_for_elements():
    """[B, T, N·H] has a gate for every element of the output."""
    a, chosen = arrays(), {"block_indices": arrays()["indices"], "block_counts": S}
    plain = np.asarray(native(**chosen), np.float64)
    gate = a["gates"][0]
    assert relative_error(native(**chosen, g_slc=gate), plain * gate[..., None]) <= CLOSE
    wide = np.random.default_rng(1).random((B, T, N * H), np.float32)
    expected = plain * wide.reshape(B, T, N, H)
    assert relative_error(native(**chosen, g_slc=wide), expected) <= CLOSE


def test_g_cmp_adds_the_compressed_branch_and_selects():
    a = arrays()
    g_cmp, g_slc = a["gates"]
    sizes = {"block_size": BLOCK, "compression_block": BLOCK, "compression_stride": BLOCK}
    how = {"num_selected": 2, "initial_blocks": 0, "local_blocks": 1}
    blocks = xsake.nsa.select_blocks(a["q"], a["k"], **sizes, **how)
    selected = reference(blocks, None)
    compressed = xsake.native_sparse_attention(a["q"], a["k"], a["v"], g_cmp=g_cmp, **sizes)
    expected = np.asarray(compressed, np.float64) + selected
    assert relative_error(native(g_cmp=g_cmp, block_counts=2), expected) <= CLOSE
    expected = np.asarray(compressed, np.float64) + selected * g_slc[..., None]
    assert relative_error(native(g_cmp=g_cmp, g_slc=g_slc, block_counts=2), expected) <= CLOSE
    # given blocks instead of selected ones, only if asked for
    found = native(g_cmp=g_cmp, block_indices=a["indices"], block_counts=S, compressed=True)
    expected = np.asarray(compressed, np.float64) + reference(spread(a["indices"]), S)
    assert relative_error(found, expected) <= CLOSE


# -------------------------------------------------------------------------------- every parameter

CU = np.array([0, 17, T], np.int32)


def one_row(fn, *rest, **more):
    a = arrays()
    return fn(a["q"][:1], a["k"][:1], a["v"][:1], *rest, **more)


def differ(one, other):
    return float(np.abs(np.asarray(one) - np.asarray(other)).max()) > 1e-3


@pytest.mark.slow
def test_every_parameter_of_apply_changes_the_result():
    a, indices = arrays(), spread(arrays()["indices"])
    base = apply(indices, S)
    changes = {
        "block_indices": apply(np.zeros_like(indices), S),
        "block_counts": apply(indices, 1),
        "block_size": apply_native_sparse_attention(a["q"], a["k"], a["v"], indices, S, 2 * BLOCK),
        "softmax_scale": apply(indices, S, softmax_scale=2.0),
    }
    for name in ("query", "key", "value"):
        given = {"query": a["q"], "key": a["k"], "value": a["v"]}
        given[name] = 2 * given[name]
        changes[name] = apply_native_sparse_attention(
            **given, block_indices=indices, block_counts=S, block_size=BLOCK
        )
    for name, changed in changes.items():
        assert differ(base, changed), name
    row = one_row(apply_native_sparse_attention, indices[:1], S, BLOCK)
    packed = one_row(apply_native_sparse_attention, indices[:1], S, BLOCK, cu_seqlens=CU)
    positions = np.concatenate([np.arange(17), np.arange(T - 17)]).astype(np.int32)
    same = one_row(apply_native_sparse_attention, indices[:1], S, BLOCK, token_indices=positions)
    assert differ(row, packed)
    np.testing.assert_array_equal(same, packed)
    second = xsake.apply_native_sparse_attention(
        *(a[name][:1, 17:] for name in "qkv"), indices[:1, 17:], S, BLOCK
    )
    assert relative_error(packed[:, 17:], np.asarray(second, np.float64)) <= CLOSE
    changes |= {"cu_seqlens": 0, "token_indices": 0}
    assert changes.keys() == set(inspect.signature(apply_native_sparse_attention).parameters)


def test_every_parameter_of_native_changes_the_result():
    a = arrays()
    g_cmp, g_slc = a["gates"]
    by_gate = native(g_cmp=g_cmp, g_slc=g_slc, block_counts=2)
    by_index = native(g_slc=g_slc, block_indices=a["indices"], block_counts=S)
    changes = {
        "g_cmp": (by_gate, native(g_cmp=2 * g_cmp, g_slc=g_slc, block_counts=2)),
        "g_slc": (by_gate, native(g_cmp=g_cmp, block_counts=2)),
        "block_counts": (by_gate, native(g_cmp=g_cmp, g_slc=g_slc, block_counts=1)),
        "block_size": (by_gate, native(g_cmp=g_cmp, g_slc=g_slc, block_counts=2, block_size=16)),
        "softmax_scale": (
            by_gate,
            native(g_cmp=g_cmp, g_slc=g_slc, block_counts=2, softmax_scale=2.0),
        ),
        "block_indices": (
            by_index,
            native(g_slc=g_slc, block_indices=0 * a["indices"], block_counts=S),
        ),
        "compressed": (
            by_index,
            native(
                g_cmp=g_cmp,
                g_slc=g_slc,
                block_indices=a["indices"],
                block_counts=S,
                compressed=True,
            ),
        ),
        "cu_seqlens": tuple(
            one_row(
                native_sparse_attention,
                g_cmp=g_cmp[:1],
                block_counts=2,
                block_size=BLOCK,
                cu_seqlens=ends,
            )
            for ends in (None, CU)
        ),
    }
    for name, (one, other) in changes.items():
        assert differ(one, other), name
    tested = {"query", "key", "value", *changes}  # the first three with apply
    assert tested == set(inspect.signature(native_sparse_attention).parameters)


def test_indices_and_gates_may_be_traced():
    a = arrays()
    g_slc = a["gates"][1]

    def of_blocks(indices, counts):
        return native(g_slc=g_slc, block_indices=indices, block_counts=counts)

    for indices in (a["indices"], spread(a["indices"])):
        found = jax.eval_shape(of_blocks, jnp.asarray(indices), jnp.asarray(a["counts"]))
        assert (found.shape, found.dtype) == ((B, T, N, H), jnp.float32)


def test_signatures_are_those_of_ejkernel():
    """Names, order and defaults, as printed; `compressed` is ours and a keyword."""
    apply_names = "query key value block_indices block_counts block_size softmax_scale cu_seqlens"
    found = inspect.signature(apply_native_sparse_attention).parameters
    assert list(found) == [*apply_names.split(), "token_indices"]
    assert (found["block_counts"].default, found["block_size"].default) == (16, 64)
    names = "query key value g_cmp g_slc block_indices block_counts block_size softmax_scale"
    found = inspect.signature(native_sparse_attention).parameters
    assert list(found) == [*names.split(), "cu_seqlens", "compressed"]
    assert found["compressed"].kind is inspect.Parameter.KEYWORD_ONLY
    assert [found[x].default for x in ("g_cmp", "block_counts", "block_size")] == [None, 16, 64]


# ---------------------------------------------------------------------------------------- refusals


def zeros(*shape, dtype=np.int32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (native, "g_cmp and block_indices are both None, so nothing selects"),
        (
            lambda: native(g_cmp=arrays()["gates"][0], block_indices=arrays()["indices"]),
            "g_cmp selects blocks, and block_indices are given too; leave one out, or pass",
        ),
        (
            lambda: native(g_cmp=arrays()["gates"][0], compressed=True),
            "compressed=True adds the compressed branch to given block_indices, so it needs both",
        ),
        (
            lambda: native(g_cmp=arrays()["gates"][0], block_counts=zeros(B, T, K)),
            r"block_counts must be a number where g_cmp selects the blocks, .* \[2, 43, 2\]",
        ),
        (
            lambda: native(g_cmp=zeros(B, T, N * H + 1, dtype=np.float32)),
            r"g_cmp must be \[B, T, N\] = \[2, 43, 4\] or \[B, T, N·Hv\] = \[2, 43, 32\], got",
        ),
        (
            lambda: native(block_indices=arrays()["indices"], g_slc=zeros(B, T, dtype=np.float32)),
            r"g_slc must be \[B, T, N\] = \[2, 43, 4\]",
        ),
        (
            lambda: apply(zeros(B, N, BLOCKS, S), S),
            r"got shape \[2, 4, 6, 3\]; the 2 query heads of a kv head share their blocks",
        ),
        (lambda: apply(zeros(B, T, K), S), r"block_indices must be \[B, T, K, S\] with"),
        (
            lambda: apply(arrays()["indices"], zeros(B, BLOCKS, K)),
            r"block_counts must be \[B, T, K\] with \[B, T, K\] = \[2, 43, 2\] for tokens, or",
        ),
        (
            lambda: one_row(
                apply_native_sparse_attention,
                arrays()["indices"][:1],
                S,
                BLOCK,
                cu_seqlens=CU,
            ),
            "cannot be combined with packed sequences",
        ),
        (
            lambda: apply_native_sparse_attention(
                *(zeros(1, 2, 2, 4, dtype=np.float32),) * 3, zeros(1, 2, 2, 1), 1, 1
            ),
            "may be for tokens or for blocks of one token; use xsake.native_sparse_attention",
        ),
        (
            lambda: apply(spread(arrays()["indices"]), S, cu_seqlens=CU),
            "cu_seqlens describes sequences packed into one batch row, but query has 2",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_indices_must_be_given_and_whole():
    with pytest.raises(TypeError, match="block_indices must be an array, got NoneType"):
        apply(None, 1)
    with pytest.raises(TypeError, match="block_indices must hold integers, got float32"):
        apply(zeros(B, K, BLOCKS, S, dtype=np.float32), 1)
