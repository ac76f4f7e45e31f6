"""time_attention runs each method on the model's own q, k and v."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.model.test_gemma import gpt_oss
from xsake.bench import method_times
from xsake.evaluate.methods import SOURCES, Method
from xsake.model import Transformer
from xsake.model.observer import Observer

BLOCK, LENGTH = 16, 40


@pytest.fixture(scope="module")
def subject():
    """Two layers with windows and sinks."""
    model = gpt_oss()
    config = dataclasses.replace(model.config, window_layers=None)
    return Observer(Transformer.of(config, model.parameters()))


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 96, LENGTH)


@pytest.fixture(scope="module")
def inputs(subject, tokens):
    return method_times.inputs(subject, tokens)


def method(subject, name, blocks):
    given = jnp.broadcast_to(blocks, (subject.layers, subject.heads, 3, 3))
    return Method(given.sum(-1, dtype=jnp.int32), given, jnp.int32(0), name)


@pytest.mark.slow
def test_all_blocks_are_dense_attention_and_fewer_are_not(subject, inputs):
    config, qkv = inputs
    dense = method_times._dense(*qkv, config=config)

    def sparse(blocks, source):
        chosen = method(subject, "", blocks)
        how = {"config": config, "source": source, "block": BLOCK}
        return method_times._sparse(chosen.counts, chosen.given, *qkv, **how)

    for source in ("given", "gaussian"):
        np.testing.assert_allclose(sparse(jnp.tri(3, dtype=bool), source), dense, atol=2e-6)
    assert jnp.abs(sparse(jnp.eye(3, dtype=bool), "given") - dense).max() > 1e-2


def test_activations_returns_the_q_k_v_of_the_model(subject, tokens, inputs):
    def fold(layer, seen, carry):
        return carry.at[layer].set(seen.out[0])

    config, qkv = inputs
    empty = jnp.zeros((config.layers, LENGTH, config.heads, config.head_size))
    out = subject.observe(subject.weights, jnp.asarray(tokens)[None], fold, empty)
    dense = method_times._dense(*qkv, config=config)
    np.testing.assert_allclose(dense[:, 0], out, atol=2e-6)


def test_a_suite_of_causal_attention_refuses_windows_and_sinks(subject):
    with pytest.raises(ValueError, match="soft_cap = None, window = 6 and sinks = True; use"):
        method_times.check_is_plain(nnx.merge(subject.graph, subject.weights).config)


@pytest.mark.parametrize("source", ["sensitivity", "loss_sensitivity"])
def test_oracles_that_need_more_than_q_k_and_v_are_refused(subject, tokens, source):
    oracle = method(subject, "oracle/…", jnp.eye(3, dtype=bool))
    oracle = dataclasses.replace(oracle, source=jnp.int32(SOURCES.index(source)))
    with pytest.raises(ValueError, match="oracle/… cannot be timed: it selects blocks by"):
        method_times.time_attention(subject, tokens, [oracle], BLOCK)


def test_a_band_and_top_p_are_those_of_what_is_timed(subject, tokens, monkeypatch):
    """With them fewer blocks, or others, are attended to."""
    every = method(subject, "every", jnp.tri(3, dtype=bool))
    every = dataclasses.replace(every, source=jnp.int32(SOURCES.index("gaussian")))
    calls = {}
    monkeypatch.setattr(method_times, "time_calls", lambda given, _: calls.update(given) or {})
    limited = dataclasses.replace(every, name="limited", top_p=1e-6, band=0)
    with_band = dataclasses.replace(every, name="with band", top_p=1e-6, band=2)
    method_times.time_attention(subject, tokens, [every, limited, with_band], BLOCK)
    dense, all_of_it, some, band = (run(*given) for run, given in calls.values())
    np.testing.assert_allclose(all_of_it, dense, atol=2e-6)
    np.testing.assert_allclose(band, dense, atol=2e-6)  # a band of two is all of three blocks
    assert jnp.abs(some - dense).max() > 1e-3


def test_every_method_and_dense_are_timed(subject, tokens):
    blocks = jnp.eye(3, dtype=bool)
    times = method_times.time_attention(
        subject, tokens, [method(subject, "some", blocks)], BLOCK, 2
    )
    assert set(times) == {"dense", "some"}
    assert all(x.least_seconds > 0 and x.repeats == 2 for x in times.values())
