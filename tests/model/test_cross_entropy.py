"""The loss and its custom gradient equal the formula written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.model import cross_entropy

M, WIDTH, VOCAB = 37, 16, 50


def draw(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (M, WIDTH)).astype(dtype)
    kernel = jax.random.normal(keys[1], (WIDTH, VOCAB)) / 4
    targets = jax.random.randint(keys[2], (M,), 0, VOCAB)
    weights = jax.random.uniform(keys[3], (M,)).at[5].set(0)
    return hidden, kernel, targets, weights


def written_out(hidden, kernel, targets, weights, soft_cap=None):
    logits = hidden.astype(jnp.float32) @ kernel
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    p = jax.nn.log_softmax(logits, axis=-1)
    return -(p[jnp.arange(M), targets] * weights).sum()


def closeness(found, wanted):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return np.abs(found - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize(
    ("at_once", "cap"), [(0, None), (8, None), (37, None), (64, None), (8, 1.0)]
)
def test_value_and_every_gradient_equal_the_formula(at_once, cap):
    hidden, kernel, targets, weights = draw()
    ours = jax.value_and_grad(cross_entropy.summed, argnums=(1, 2, 4))
    theirs = jax.value_and_grad(written_out, argnums=(0, 1, 3))
    value, slopes = ours(at_once, hidden, kernel, targets, weights, cap)
    expected, wanted = theirs(hidden, kernel, targets, weights, cap)
    assert closeness(value, expected) < 1e-6
    assert closeness(cross_entropy.summed(at_once, *draw(), cap), expected) < 1e-6
    for found, right in zip(slopes, wanted, strict=True):
        assert closeness(found, right) < 1e-5


def test_a_scaled_loss_has_scaled_gradients():
    hidden, kernel, targets, weights = draw()

    def scaled(hidden):
        return 3 * cross_entropy.summed(8, hidden, kernel, targets, weights)

    plain = jax.grad(cross_entropy.summed, argnums=1)(8, hidden, kernel, targets, weights)
    assert closeness(jax.grad(scaled)(hidden), 3 * plain) < 1e-6


def test_in_half_precision_the_kernel_gets_a_float32_gradient():
    hidden, kernel, targets, weights = draw(jnp.bfloat16)
    slopes = jax.grad(cross_entropy.summed, argnums=(1, 2))(8, hidden, kernel, targets, weights)
    wanted = jax.grad(written_out, argnums=(0, 1))(hidden, kernel, targets, weights)
    assert slopes[0].dtype == jnp.bfloat16
    assert slopes[1].dtype == jnp.float32
    # the kernel and the gradients of the logits are rounded to bfloat16
    assert all(closeness(a, b) < 1e-2 for a, b in zip(slopes, wanted, strict=True))


def test_tokens_of_weight_0_have_no_gradient():
    hidden, kernel, targets, weights = draw()
    slope = jax.grad(cross_entropy.summed, argnums=1)(8, hidden, kernel, targets, weights)
    assert not slope[5].any()
    assert slope[6].any()


def test_a_text_of_one_token_predicts_nothing():
    hidden, kernel, targets, weights = (x[:0] if len(x) == M else x for x in draw())
    found = jax.value_and_grad(cross_entropy.summed, argnums=(1, 2))
    value, slopes = found(8, hidden, kernel, targets, weights)
    assert value == 0
    assert slopes[0].shape == (0, WIDTH)
    assert not slopes[1].any()
