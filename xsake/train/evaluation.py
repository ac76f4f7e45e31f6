"""The loss on held-out text, with the attention in use."""

from __future__ import annotations

from collections.abc import Mapping

from jax import Array
from jax.sharding import Mesh

from xsake.data.stream import Stream
from xsake.hads import Plan
from xsake.train import inputs
from xsake.train import step as stepping
from xsake.train.config import Config


def evaluate(
    config: Config,
    weights: Mapping[str, Array],
    plan: Plan | None,
    stream: Stream,
    mesh: Mesh | None = None,
) -> tuple[float, int]:
    """Mean loss in nats over the evaluation windows of a file, and their number of targets."""
    total = count = 0.0
    for batch in inputs.evaluation_batches(config, stream, mesh):
        loss, targets = stepping.compiled_loss(
            weights, batch, plan, config=config.static, mesh=mesh
        )
        total, count = total + float(loss), count + float(targets)
    return total / max(count, 1), int(count)
