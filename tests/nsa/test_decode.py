"""Decoding token by token gives what the whole sequence gives, at every position."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.oracle import relative_error
from xsake import nsa

B, T, N, K, H, Hv, Hi = 2, 45, 4, 2, 8, 12, 4
SIZES = {
    "block_size": 8,
    "num_selected": 3,
    "window_size": 5,
    "compression_block": 8,
    "compression_stride": 4,
}
GATES = ("g_cmp", "g_slc", "g_swa")


def inputs(score, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"query": (B, T, N, H), "key": (B, T, K, H), "value": (B, T, K, Hv)}
    shapes |= dict.fromkeys(GATES if score == "nsa" else GATES[1:], (B, T, N))
    if score == "msa":
        shapes |= {"index_query": (B, T, K, Hi), "index_key": (B, T, 1, Hi)}
    return {name: np.float32(rng.standard_normal(x)) for name, x in shapes.items()}


def empty(score, **more):
    sizes = {"batch": B, "capacity": T, "kv_heads": K, "head_size": H, "value_size": Hv}
    sizes["index_size"] = Hi if score == "msa" else None
    return nsa.Cache.empty(nsa.Settings(score=score, **SIZES), **sizes | more)


def pooling(score, weights):
    return {"compression": nsa.weighted_pooling(weights)} if score == "nsa" else {}


@functools.partial(jax.jit, static_argnames="score")
def whole(score, given, weights):
    return xsake.native_sparse_attention(**given, **SIZES, score=score, **pooling(score, weights))


@jax.jit
def token_by_token(cache, given, weights):
    """[B, T', …] of new tokens, one step each."""

    def step(cache, token):
        now = {name: x[:, None] for name, x in token.items()}
        how = pooling(cache.settings.score, weights)
        out, cache = nsa.decode_step(**now, cache=cache, **how)
        return cache, out[:, 0]

    by_time = {name: jnp.moveaxis(x, 1, 0) for name, x in given.items()}
    cache, out = jax.lax.scan(step, cache, by_time)
    return cache, jnp.moveaxis(out, 0, 1)


@jax.jit
def filled(cache, prompt, lengths, weights):
    return nsa.prefill(cache, **prompt, lengths=lengths, **pooling("nsa", weights))


WEIGHTS = np.float32(np.random.default_rng(3).random(8))


@pytest.mark.parametrize("score", ["nsa", "moba", "msa"])
def test_every_position_equals_the_whole_pass(score):
    given = inputs(score)
    expected = np.asarray(whole(score, given, WEIGHTS), np.float64)
    cache, out = token_by_token(empty(score), given, WEIGHTS)
    assert cache.length.tolist() == [T, T]
    assert relative_error(out, expected) <= 2e-6


def test_decoding_goes_on_after_prompts_of_different_lengths():
    """Row 0 has a prompt of 9 tokens, row 1 of 20; what lies behind them does not matter."""
    given, lengths, more = inputs("nsa"), np.array([9, 20]), 25
    expected = np.asarray(whole("nsa", given, WEIGHTS), np.float64)
    prompt = {name: given[name][:, :20].copy() for name in ("key", "value")}
    for x in prompt.values():
        x[0, 9:] = np.nan
    cache = filled(empty("nsa"), prompt, lengths, WEIGHTS)
    at = lengths[:, None] + np.arange(more)[None]
    tokens = {name: x[np.arange(B)[:, None], at] for name, x in given.items()}
    _, out = token_by_token(cache, tokens, WEIGHTS)
    assert relative_error(out, expected[np.arange(B)[:, None], at]) <= 2e-6


def test_a_full_cache_raises_and_under_jit_gives_nan():
    given = inputs("nsa")
    prompt = {name: given[name] for name in ("key", "value")}
    cache = filled(empty("nsa"), prompt, np.array([T, T - 1]), WEIGHTS)
    last = {name: x[:, -1:] for name, x in given.items()}
    with pytest.raises(ValueError, match="the cache has 45 of 45 tokens, so 1 more do not fit"):
        nsa.decode_step(**last, cache=cache)
    _, out = token_by_token(cache, last, WEIGHTS)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()


def test_a_prompt_is_prefilled_once_and_with_its_own_length():
    """What cannot be read under jit makes a sequence full: its next step gives NaN."""
    given = inputs("nsa")
    prompt = {name: given[name][:, :20] for name in ("key", "value")}
    cache = filled(empty("nsa"), prompt, np.array([9, 0]), WEIGHTS)
    with pytest.raises(ValueError, match=r"cache must be empty, but its sequences have \[9, 0\]"):
        nsa.prefill(cache, **prompt)
    again = filled(cache, prompt, np.array([9, 9]), WEIGHTS)
    assert again.length.tolist() == [T, 9]
    assert filled(empty("nsa"), prompt, np.array([21, -1]), WEIGHTS).length.tolist() == [T, T]


@pytest.mark.parametrize(
    ("score", "change", "words"),
    [
        ("nsa", {"value": np.s_[:, :3]}, "value must have as many tokens as key, 5, got 3"),
        ("nsa", {"key": np.s_[:, :, :1]}, "key must have a batch, heads and head size of"),
        ("msa", {"index_key": np.s_[:, :3]}, "index_key must have as many tokens as key, 5, got 3"),
        ("msa", {"index_key": np.s_[..., :2]}, "index_key must have a batch, heads and head size"),
    ],
)
def test_prompts_that_do_not_fit_a_cache_are_refused(score, change, words):
    """By the check of `prefill`; with the types of tests, jaxtyping would refuse them before it."""
    names = ("key", "value", *(["index_key"] if score == "msa" else []))
    given = {name: jnp.asarray(inputs(score)[name][:, :5]) for name in names}
    given |= {name: given[name][part] for name, part in change.items()}
    with pytest.raises(ValueError, match=words):
        empty(score).check_fits(**given)


def test_an_index_key_without_an_indexer_is_refused():
    given = inputs("msa")
    with pytest.raises(ValueError, match=r"index_key is for score='msa', but the cache has"):
        nsa.prefill(empty("nsa"), **{x: given[x][:, :5] for x in ("key", "value", "index_key")})


def test_a_cache_that_a_compiled_step_closes_over_is_read():
    given = inputs("nsa")
    cache = empty("nsa", capacity=1)
    now = {name: x[:, :1] for name, x in given.items()}
    out, full = jax.jit(lambda: nsa.decode_step(**now, cache=cache))()
    assert out.shape == (B, 1, N, Hv)
    with pytest.raises(ValueError, match="the cache has 1 of 1 tokens, so 1 more do not fit"):
        jax.jit(lambda: nsa.decode_step(**now, cache=full))()
