"""Which blocks are selected: scores against the float64 oracle, exact counts, ties, chunks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nsa import oracle
from xsake import nsa
from xsake.nsa import select
from xsake.nsa.compress import Pooled, block_count, slots_of
from xsake.nsa.sequences import ONE_SEQUENCE, sequences_of

PACKED = np.array([3] * 21 + [0] * 1 + [-1] * 2 + [4] * 35 + [1] * 16)
T, N, K, H = 75, 6, 2, 8


def inputs(T=T, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"q": (T, N, H), "k": (T, K, H), "iq": (T, K, 4), "ik": (T, 1, 4)}
    return {
        name: np.float32(rng.standard_normal(shape)).astype(np.float64)
        for name, shape in shapes.items()
    }


def expected(score, x, ids, block, n, forced, pooled=None, stride=None):
    """The oracle's choice, which must be a clear one."""
    if score == "nsa":
        keys = oracle.pool(x["k"], ids, pooled, stride)
        seen = oracle.compressed_mask(ids, K, pooled, stride)
        _, _, p = oracle.attention(x["q"], keys, keys, seen, H**-0.5)
        by = oracle.nsa_score(p, ids, block, pooled, stride, N // K)
    elif score == "moba":
        by = oracle.moba_score(x["q"], x["k"], ids, block)
    else:
        by = oracle.msa_score(x["iq"], x["ik"], ids, block)
    indices, gap = oracle.choose(by, ids, K, block, n, *forced)
    assert gap > 1e-6, "choose a seed without near ties"
    return indices


def found(score, x, ids, **call):
    arrays = {name: np.float32(value)[None] for name, value in x.items()}
    return np.asarray(compiled(arrays, ids, tuple(call.items()), score))[0]


@functools.partial(jax.jit, static_argnames=("call", "score"))
def compiled(x, ids, call, score):
    index = {"index_query": x["iq"], "index_key": x["ik"]} if score == "msa" else {}
    return nsa.select_blocks(x["q"], x["k"], score=score, segment_ids=ids, **dict(call), **index)


@pytest.mark.parametrize("ids", [None, PACKED], ids=["one sequence", "packed"])
@pytest.mark.parametrize("score", ["nsa", "moba", "msa"])
def test_each_score_selects_what_the_oracle_does(score, ids):
    x = inputs()
    call = {"block_size": 8, "num_selected": 4, "compression_block": 8, "compression_stride": 4}
    forced = (1, 2) if score == "nsa" else (0, 1)
    row_ids = np.zeros(T, int) if ids is None else ids
    wanted = expected(score, x, row_ids, 8, 4, forced, pooled=8, stride=4)
    np.testing.assert_array_equal(found(score, x, ids, **call), wanted)


@pytest.mark.parametrize(("pooled", "stride", "block"), [(32, 16, 64), (64, 64, 64), (48, 16, 32)])
def test_overlap_weights_of_other_sizes(pooled, stride, block):
    """The paper's sizes; equal sizes; pooled blocks that are longer than selected ones."""
    x = inputs(T=300)
    call = {"block_size": block, "compression_block": pooled, "compression_stride": stride}
    wanted = expected("nsa", x, np.zeros(300, int), block, 3, (0, 1), pooled, stride)
    actual = found("nsa", x, None, **call, num_selected=3, initial_blocks=0, local_blocks=1)
    np.testing.assert_array_equal(actual, wanted)


def test_ties_go_to_the_earlier_block_and_forced_blocks_count():
    """All keys are equal, and so are all scores but those that overlap less."""
    x = inputs() | {"k": np.ones((T, K, H))}
    call = {"block_size": 8, "compression_block": 8, "compression_stride": 8}
    chosen = found("nsa", x, None, **call, num_selected=5, initial_blocks=1, local_blocks=2)
    for t in range(T):
        current = t // 8
        wanted = list(range(current + 1)) if current < 5 else [0, 1, 2, current - 1, current]
        assert chosen[t, 0].tolist() == wanted + [-1] * (5 - len(wanted))


def test_a_sequence_shorter_than_a_pooled_block_selects_all_it_has():
    x = inputs(T=40)
    chosen = found("nsa", x, None, block_size=16, compression_block=48, num_selected=3)
    assert chosen[[0, 16, 39], 1].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]


def test_nan_scores_are_the_lowest():
    x = inputs()
    x["k"][16:24] = np.nan
    call = {"block_size": 8, "compression_block": 8, "compression_stride": 8}
    chosen = found("moba", x, None, **call, num_selected=4)
    assert not (chosen[56:] == 2).any()


CHOICE = {
    "block": 8,
    "pooled_block": 8,
    "stride": 4,
    "scale": 1.0,
    "num_selected": 4,
    "initial": 1,
    "local": 1,
}


def test_chunks_of_queries_select_the_same(monkeypatch):
    rng = np.random.default_rng(0)
    q, keys = (np.float32(rng.standard_normal((1, *x, H))) for x in ((T, N), (T // 4, K)))
    lse = np.float32(rng.standard_normal((1, T, N)))

    def chosen():
        @jax.jit  # anew for each chunk size
        def of(q, keys, lse):
            sequences = sequences_of(1, T, segment_ids=PACKED, cu_seqlens=None, token_indices=None)
            pooled = Pooled(keys, None, *slots_of(sequences, T, 8, 4))
            by = select.by_compressed_attention.__wrapped__
            return by(q, pooled, lse, sequences, keys=T, **CHOICE)

        return of(q, keys, lse)

    at_once = chosen()
    monkeypatch.setattr(select, "CHUNK_SCORES", 1)
    np.testing.assert_array_equal(chosen(), at_once)


def test_memory_of_the_selection_is_linear_in_the_length():
    def temporary_bytes(T):
        def chosen(q, keys, lse):
            pooled = Pooled(keys, None, *slots_of(ONE_SEQUENCE, T, 8, 4))
            return select.by_compressed_attention(q, pooled, lse, ONE_SEQUENCE, keys=T, **CHOICE)

        shapes = (1, T, 16, 16), (1, block_count(T, 8, 4), 1, 16), (1, T, 16)
        shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        return jax.jit(chosen).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary_bytes(4096), temporary_bytes(16384)
    assert large <= 4.5 * small
