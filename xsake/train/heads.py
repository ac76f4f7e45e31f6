"""What every head attends to while training: the event `HeadsObserved`.

    a window of training text ─ dense pass ─ every layer's q, k ─ hads.observed ─ layers × heads

The window depends on the seed and the step alone, and the pass changes nothing: a run has the same
weights with and without it.
"""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from xsake.data.stream import Stream
from xsake.hads import observed
from xsake.hads.statistics import retained_mass
from xsake.observe import events
from xsake.train.config import Config
from xsake.train.step import transformer

DENSITY = 0.2  # of the blocks whose mass is `top_mass_ratios`


class Figures(NamedTuple):
    """Figures of all heads, float32 [layers, N]."""

    entropy: Array
    block_entropy: Array
    top_mass: Array


def is_due(config: Config, step: int) -> bool:
    """Whether the heads are observed after `step` updates; always after the last, if at all."""
    every = config.observe.heads_every
    return bool(every) and (step % every == 0 or step == config.schedule.steps)


def observe(
    config: Config, parameters: Any, stream: Stream, step: int, mesh: Mesh | None = None
) -> events.HeadsObserved:
    """The event of a step."""
    began = time.perf_counter()
    tokens = stream.long_windows(1, step)
    found = _figures(parameters, tokens, config=config.static, mesh=mesh)
    entropy, block_entropy, top_mass = (np.asarray(x, np.float64).round(4).tolist() for x in found)
    return events.HeadsObserved(
        step=step,
        tokens=config.data.length,
        block=config.hads.block,
        entropy_ratios=entropy,
        block_entropy_ratios=block_entropy,
        top_density_ratio=DENSITY,
        top_mass_ratios=top_mass,
        observe_seconds=time.perf_counter() - began,
    )


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def _figures(parameters: Any, tokens: Array, *, config: Config, mesh: Mesh | None) -> Figures:
    model = transformer(config, parameters, mesh, "contiguous")  # the window is text as it is read

    def fold(layer: Any, seen: Any, figures: Figures) -> Figures:
        heads = observed.observe(
            seen.q[0], seen.k[0], block=config.hads.block, softmax=seen.softmax
        )
        top = retained_mass(heads.mass, np.array([DENSITY]))[:, 0]
        if seen.softmax.sinks is not None:
            top = top + (1 - heads.mass.sum(-1)).mean(-1)
        new = Figures(heads.entropy, heads.block_entropy, top)
        return jax.tree.map(lambda every, x: every.at[layer].set(x), figures, new)

    nothing = jnp.zeros((config.model.layers, config.model.heads), jnp.float32)
    return model.observe(tokens, fold, Figures(nothing, nothing, nothing))
