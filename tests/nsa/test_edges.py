"""Edges of Native Sparse Attention: equal defaults, no tokens, caches that hold what is read."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake import _jax, nsa

B, T, N, K, H = 2, 32, 4, 2, 8


def zeros(*shape):
    return np.zeros(shape, np.float32)


def test_packed_sequences_are_a_reason_that_explain_gives(monkeypatch):
    """On a Hopper GPU, by segment ids and by cu_seqlens."""
    monkeypatch.setattr(_jax, "why_no_hopper", lambda needs: None)
    q, kv = (jax.ShapeDtypeStruct((1, T, n, H), jnp.bfloat16) for n in (N, K))
    call = q, kv, kv, jax.ShapeDtypeStruct((1, T, K, 3), jnp.int32)
    assert nsa.explain(*call).chosen == "hopper"
    for packed in (
        {"segment_ids": np.zeros((1, T), np.int32)},
        {"cu_seqlens": np.array([0, 9, T])},
    ):
        answer = nsa.explain(*call, **packed)
        assert answer.chosen == "xla"
        assert "packed ones can have a batch row each" in answer.reasons["hopper"]


def test_all_functions_have_one_default_of_block_size():
    """Blocks that one function selected are not read with another size by the next."""
    functions = (
        nsa.Settings,
        nsa.native_sparse_attention,
        nsa.apply_native_sparse_attention,
        nsa.select_blocks,
        nsa.indexer_loss,
        nsa.explain,
    )
    assert {inspect.signature(x).parameters["block_size"].default for x in functions} == {64}


@pytest.mark.parametrize(("batch", "length"), [(0, T), (B, 0)])
@pytest.mark.parametrize("score", ["nsa", "moba", "msa"])
def test_without_queries_nothing_is_selected_and_the_loss_is_zero(score, batch, length):
    q, k = zeros(batch, length, N, H), zeros(batch, length, K, H)
    index = {name: zeros(batch, length, K, 4) for name in ("index_query", "index_key")}
    given = index if score == "msa" else {}
    blocks = nsa.select_blocks(q, k, score=score, block_size=16, num_selected=3, **given)
    assert blocks.shape == (batch, length, K, min(3, length // 16))
    assert blocks.dtype == jnp.int32
    if score == "msa":
        loss = functools.partial(nsa.indexer_loss, q, k, block_size=16, **index)
        assert loss() == loss(block_indices=blocks) == 0


@pytest.mark.parametrize("score", ["nsa", "moba"])
def test_a_step_of_no_sequences_has_no_output(score):
    sizes = {"batch": 0, "capacity": 16, "kv_heads": K, "head_size": H, "value_size": 3}
    cache = nsa.Cache.empty(nsa.Settings(score=score, window_size=4), **sizes)
    given = zeros(0, 1, N, H), zeros(0, 1, K, H), zeros(0, 1, K, 3)
    out, cache = jax.eval_shape(nsa.decode_step, *given, cache)
    assert (out.shape, cache.length.shape) == ((0, 1, N, 3), (0,))


def test_a_cache_without_a_compressed_branch_holds_and_checks_none():
    """MSA selects by its indexer: a stride that nothing reads is no error, and no slot is kept."""
    sizes = {"batch": 1, "capacity": 64, "kv_heads": K, "head_size": H}
    unread = nsa.Settings(score="msa", compression_stride=24)
    made = nsa.Cache.empty(unread, index_size=4, **sizes)
    assert made.pooled_k is made.pooled_v is None
    means = nsa.Cache.empty(nsa.Settings(score="moba"), **sizes)
    assert (means.pooled_k.shape, means.pooled_v) == ((1, 1, K, H), None)
    kv, index_key = zeros(1, 3, K, H), zeros(1, 3, 1, 4)
    assert nsa.prefill(made, kv, kv, index_key=index_key).length.tolist() == [3]
