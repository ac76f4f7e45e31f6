"""Weight decay applies to kernels only, and the chain equals optax's AdamW."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xsake.model import PRESETS, parameter_shapes
from xsake.train import optimizer
from xsake.train.config import Optimizer, Schedule


def test_weight_decay_applies_to_kernels_only():
    """GPT-2 has every kind: embeddings, positions, norms with biases, biases of linear maps."""
    config = dataclasses.replace(PRESETS["gpt2"], tied=False, qk_norm=True)
    mask = optimizer.decayed(parameter_shapes(config))
    linear = [f"layers.{x}.kernel" for x in ("query", "key", "value", "out", "up", "down")]
    assert sorted(name for name, on in mask.items() if on) == sorted([*linear, "head.kernel"])
    assert {name for name, on in mask.items() if not on} == {
        "embed.tokens",
        "embed.positions",
        "norm.scale",
        "norm.bias",
        *(f"layers.{x}_norm.{y}" for x in ("attention", "mlp") for y in ("scale", "bias")),
        *(f"layers.{x}_norm.scale" for x in ("query", "key")),
        *(name.replace("kernel", "bias") for name in linear),
    }


def test_updates_decay_exactly_the_masked_parameters():
    """With a gradient of 0, the update is the decay alone."""
    ones = {"layers.up.kernel": jnp.ones((2, 3, 3)), "layers.up.bias": jnp.ones((2, 3))}
    chain = optimizer.make(Optimizer(weight_decay=0.25))
    change, _ = chain.update(jax.tree.map(jnp.zeros_like, ones), chain.init(ones), ones)
    np.testing.assert_array_equal(change["layers.up.kernel"], np.full((2, 3, 3), 0.25))
    np.testing.assert_array_equal(change["layers.up.bias"], np.zeros((2, 3)))


def test_the_chain_equals_optax_adamw_after_clipping():
    draw = np.random.default_rng(0)
    parameters = {"up.kernel": jnp.asarray(draw.normal(size=(4, 5)), jnp.float32)}
    parameters["up.bias"] = jnp.asarray(draw.normal(size=5), jnp.float32)
    how, schedule = Optimizer(clip_norm=0.5), Schedule(steps=20, warmup_steps=4)
    ours, other = (
        optimizer.make(how),
        optax.chain(
            optax.clip_by_global_norm(0.5),
            optax.adamw(
                lambda count: optimizer.rate(how, schedule, count),
                how.beta1,
                how.beta2,
                how.epsilon,
                weight_decay=how.weight_decay,
                mask={"up.kernel": True, "up.bias": False},
            ),
        ),
    )
    a, b = parameters, parameters
    sa, sb = ours.init(a), other.init(b)
    for step in range(20):
        gradient = {x: jnp.asarray(draw.normal(size=y.shape), y.dtype) for x, y in a.items()}
        change, sa = ours.update(gradient, sa, a)
        a = jax.tree.map(lambda x, d, s=step: x - optimizer.rate(how, schedule, s) * d, a, change)
        change, sb = other.update(gradient, sb, b)
        b = optax.apply_updates(b, change)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=2e-7 * 20)  # an ulp or two per step


@pytest.mark.parametrize(
    ("step", "ratio"),
    [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (54, 0.55), (99, 0.1), (100, 0.1), (500, 0.1)],
)
def test_the_rate_warms_up_and_follows_a_cosine_to_its_end(step, ratio):
    schedule = Schedule(steps=100, warmup_steps=10, final_ratio=0.1)
    found = optimizer.rate(Optimizer(learning_rate=2.0), schedule, jnp.int32(step))
    assert float(found) == pytest.approx(2 * ratio, abs=1e-3)
