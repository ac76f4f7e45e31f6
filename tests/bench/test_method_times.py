"""time_attention runs each method on the model's own q, k and v."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xsake.bench import method_times
from xsake.evaluate.methods import Method
from xsake.model import PRESETS, Transformer
from xsake.model.observer import Observer

BLOCK, LENGTH = 16, 40


@pytest.fixture(scope="module")
def subject():
    return Observer(Transformer(PRESETS["tiny"], rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 256, LENGTH)


@pytest.fixture(scope="module")
def qkv(subject, tokens):
    return [x[:, 0] for x in method_times.activations(subject, tokens[None])[:3]]


def method(subject, name, blocks):
    given = jnp.broadcast_to(blocks, (subject.layers, subject.heads, 3, 3))
    return Method(given.sum(-1, dtype=jnp.int32), given, jnp.int32(0), name)


def test_all_blocks_are_dense_attention_and_fewer_are_not(subject, qkv):
    dense = method_times._dense(*qkv)

    def sparse(blocks, source):
        chosen = method(subject, "", blocks)
        return method_times._sparse(chosen.counts, chosen.given, *qkv, source=source, block=BLOCK)

    for source in ("given", "gaussian"):
        np.testing.assert_allclose(sparse(jnp.tri(3, dtype=bool), source), dense, atol=2e-6)
    assert jnp.abs(sparse(jnp.eye(3, dtype=bool), "given") - dense).max() > 1e-2


def test_activations_returns_the_q_k_v_of_the_model(subject, tokens, qkv):
    def fold(layer, seen, carry):
        return carry.at[layer].set(seen.out[0])

    config = PRESETS["tiny"]
    empty = jnp.zeros((config.layers, LENGTH, config.heads, config.head_size))
    out = subject.observe(subject.weights, jnp.asarray(tokens)[None], fold, empty)
    dense = method_times._dense(*qkv)
    np.testing.assert_allclose(dense[:, 0], out, atol=2e-6)


def test_every_method_and_dense_are_timed(subject, tokens):
    blocks = jnp.eye(3, dtype=bool)
    times = method_times.time_attention(
        subject, tokens, [method(subject, "some", blocks)], BLOCK, 2
    )
    assert set(times) == {"dense", "some"}
    assert all(x.least_seconds > 0 and x.repeats == 2 for x in times.values())
