"""optax AdamW with gradient clipping, weight decay on kernels and a learning-rate schedule.

gradient ─ clip to clip_norm ─ Adam ─ + weight_decay · kernel ─ × -rate(step) ─ update
"""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Int

from xsake.train.config import Config, Optimizer, Schedule


def decayed(names: Iterable[str]) -> dict[str, bool]:
    """Which parameters have weight decay: the kernels of linear layers only.

    They are selected by name, because stacked biases and norms have as many axes as matrices.

    >>> decayed(["embed.tokens", "layers.up.kernel", "layers.up.bias", "norm.scale"])
    {'embed.tokens': False, 'layers.up.kernel': True, 'layers.up.bias': False, 'norm.scale': False}
    """
    return {name: name.endswith(".kernel") for name in names}


def make(config: Optimizer) -> optax.GradientTransformation:
    """The chain above without the learning rate, which step.py applies.

    This way a skipped step does not change the optimizer state, while the schedule still advances
    with the step count.
    """
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    decay = optax.add_decayed_weights(config.weight_decay, decayed)
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    return optax.chain(*clip, adam, decay)


def rate(config: Optimizer, schedule: Schedule, step: int | Int[Array, ""]) -> Float[Array, ""]:
    """Learning rate of update number `step`, counted from 0, float32.

    peak · (step + 1) / warmup_steps during the warm-up, then half a cosine down to
    final_ratio · peak at the last step.
    """
    warm = (step + 1) / max(schedule.warmup_steps, 1)
    left = max(schedule.steps - schedule.warmup_steps, 1)
    done = jnp.clip((step + 1 - schedule.warmup_steps) / left, 0, 1)
    low = schedule.final_ratio
    cosine = low + (1 - low) * 0.5 * (1 + jnp.cos(jnp.pi * done))
    ratio = jnp.where(step < schedule.warmup_steps, warm, cosine)
    return (config.learning_rate * ratio).astype(jnp.float32)


def longer_note(config: Config, steps: int, step: int) -> str:
    """What a longer schedule does to the learning rate from `step` on."""
    old, new = config.with_steps(steps), config
    last = float(rate(old.optimizer, old.schedule, max(step - 1, 0)))
    first, end = (
        float(rate(new.optimizer, new.schedule, x)) for x in (step, new.schedule.steps - 1)
    )
    return (
        f"schedule.steps: {steps} → {new.schedule.steps}; the learning rate follows the longer "
        f"schedule from here: it was {last:.2e} and is {first:.2e}, at the end {end:.2e}"
    )
