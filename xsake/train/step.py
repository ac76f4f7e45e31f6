"""One update, compiled: loss and gradient over micro-batches, then clipped AdamW.

    state, batch [B, T], plan ─ Σ over micro-batches ─ ÷ targets ─ update ─ finite? ─┬─ new state
                                                                                     └─ old state

An update whose loss or gradient is not finite is skipped. The plan is an argument: another one of
the same shape does not recompile. On a mesh every device sums over its own batch rows, the sums are
added up, and all devices make the same update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh

from xsake.data.stream import Batch
from xsake.model import Transformer
from xsake.parallel.mesh import sum_over_batch
from xsake.train import cross_entropy, optimizer
from xsake.train.config import Config


class State(NamedTuple):
    """What a run carries from step to step, a pytree. Plan and data are not part of it."""

    step: Any  # int32 []: updates so far, skipped ones too; it is the position in the data
    skipped_steps: Any  # int32 []: how many of them were skipped
    bad_steps: Any  # int32 []: consecutive skipped updates up to now
    parameters: Any  # {name: float32}
    optimizer: Any  # optax's state
    average: Any  # {name: float32}, or {} where none is kept


class Metrics(NamedTuple):
    """Scalar metrics of one update."""

    loss: Any  # nats per target, before the update
    targets: Any  # sum of the targets' weights
    gradient_norm: Any  # before clipping
    learning_rate: Any
    skipped_steps: Any  # so far, because loss or gradient was not finite
    bad_steps: Any  # consecutive ones, up to this update
    index_loss: Any  # nats: KL of the indexer of model.attention = "msa"; else 0


class Sums(NamedTuple):
    """Sums over the rows of a batch, float32 []."""

    loss: Any  # weight · -log p(target)
    targets: Any  # weights
    index_loss: Any  # the indexer's mean loss · weights


def initial(config: Config, parameters: Any = None) -> State:
    """The state before the first step: of these parameters, else a function of the seed."""
    if parameters is None:
        parameters = Transformer(config.model, rngs=nnx.Rngs(config.seed)).parameters()
    average = jax.tree.map(jnp.array, parameters) if config.optimizer.ema_decay else {}
    return State(
        # separate buffers, because the state is donated
        step=jnp.zeros((), jnp.int32),
        skipped_steps=jnp.zeros((), jnp.int32),
        bad_steps=jnp.zeros((), jnp.int32),
        parameters=parameters,
        optimizer=optimizer.make(config.optimizer).init(parameters),
        average=average,
    )


def transformer(config: Config, parameters: Any) -> Transformer:
    """A model of these parameters with the config's compute options."""
    how = config.compute
    return Transformer.of(
        config.model,
        parameters,
        dtype=how.dtype,
        scan=how.scan,
        remat=how.remat,
        implementation=how.implementation,
    )


def summed_loss(parameters: Any, batch: Batch, plan: Any, config: Config) -> tuple[Array, Sums]:
    """(what is minimised, Sums): Σ loss, plus config.index_loss · Σ index loss for "msa"."""
    if config.model.attention != "msa":
        return evaluation_loss(parameters, batch, plan, config)
    model = transformer(config, parameters)
    segments = batch.segment_ids if config.data.separate else None
    hidden, index = model.hidden_and_index_loss(batch.tokens, segment_ids=segments)
    total, sums = loss_of_hidden(model, hidden, batch, config)
    sums = sums._replace(index_loss=index * sums.targets)
    return total + config.index_loss * sums.index_loss, sums


def evaluation_loss(parameters: Any, batch: Batch, plan: Any, config: Config) -> tuple[Array, Sums]:
    """(Σ loss, Sums) in float32, with loss = weight · -log p(target)."""
    model = transformer(config, parameters)
    segments = batch.segment_ids if config.data.separate else None
    hidden = model.hidden(batch.tokens, mask=plan, segment_ids=segments)
    return loss_of_hidden(model, hidden, batch, config)


def loss_of_hidden(
    model: Transformer, hidden: Array, batch: Batch, config: Config
) -> tuple[Array, Sums]:
    """(Σ loss, Sums without an index loss) of hidden states [B, T, width]."""
    if model.config.final_soft_cap is not None:
        raise ValueError(
            f"final_soft_cap = {model.config.final_soft_cap} is not supported in training, whose "
            "loss never holds the logits; train a model without it"
        )
    total = cross_entropy.summed(
        config.compute.loss_tokens,
        hidden.reshape(-1, hidden.shape[-1]),
        model.head_kernel(),
        batch.targets.reshape(-1),
        batch.weights.reshape(-1),
    )
    return total, Sums(total, batch.weights.sum(), jnp.zeros((), jnp.float32))


Loss = Callable[[Any, Batch, Any, Config], tuple[Array, Sums]]


def summed_gradient(
    parameters: Any, batch: Batch, plan: Any, config: Config, loss_fn: Loss = summed_loss
) -> Any:
    """(Sums, gradient of what `loss_fn` minimises) over rows, a micro-batch at a time."""
    pieces = config.optimizer.accumulate
    slope = jax.value_and_grad(loss_fn, has_aux=True)

    def one(part: Batch) -> Any:
        (_, sums), gradient = slope(parameters, part, plan, config)
        return sums, gradient

    if pieces == 1:
        return one(batch)
    parts = jax.tree.map(lambda x: x.reshape(pieces, -1, *x.shape[1:]), batch)
    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], parts))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(sums: Any, part: Batch) -> Any:
        return jax.tree.map(jnp.add, sums, one(part)), None

    return lax.scan(add, zero, parts)[0]


def update(
    state: State,
    batch: Batch,
    plan: Any,
    config: Config,
    mesh: Mesh | None = None,
    loss_fn: Loss = summed_loss,
) -> tuple[State, Metrics]:
    """One step; batch has all rows of the update, sharded over the devices of `mesh`."""
    sums = functools.partial(summed_gradient, config=config, loss_fn=loss_fn)
    found, gradient = sum_over_batch(sums, mesh)(state.parameters, batch, plan)
    loss, targets, index_loss = found
    count = jnp.maximum(targets, 1)
    gradient = jax.tree.map(lambda x: x / count, gradient)
    loss, norm = loss / count, jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(gradient)))
    speed = optimizer.rate(config.optimizer, config.schedule, state.step)
    good = jnp.isfinite(loss) & jnp.isfinite(norm)
    new = _updated(state, gradient, speed, config)
    kept = jax.tree.map(lambda new, old: jnp.where(good, new, old), new, state)
    after = kept._replace(
        step=state.step + 1,
        skipped_steps=state.skipped_steps + ~good,
        bad_steps=jnp.where(good, 0, state.bad_steps + 1),
    )
    metrics = Metrics(
        loss, targets, norm, speed, after.skipped_steps, after.bad_steps, index_loss / count
    )
    # copies: the state's buffers are donated to the next step
    return after, jax.tree.map(lambda x: x + 0, metrics)


def _updated(state: State, gradient: Any, speed: Array, config: Config) -> State:
    """The state after an update by this gradient, which is assumed to be finite."""
    chain = optimizer.make(config.optimizer)
    change, moments = chain.update(gradient, state.optimizer, state.parameters)
    parameters = jax.tree.map(lambda x, d: x - speed * d, state.parameters, change)
    decay = config.optimizer.ema_decay
    average = state.average
    if decay:
        average = jax.tree.map(lambda a, x: decay * a + (1 - decay) * x, average, parameters)
    return state._replace(parameters=parameters, optimizer=moments, average=average)


@functools.partial(jax.jit, static_argnames=("config", "mesh"), donate_argnums=0)
def compiled_update(
    state: State, batch: Batch, plan: Any, *, config: Config, mesh: Mesh | None = None
) -> Any:
    """`update`, compiled once for a dense plan (None) and once for sparse ones."""
    return update(state, batch, plan, config, mesh)


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def compiled_loss(
    parameters: Any, batch: Batch, plan: Any, *, config: Config, mesh: Mesh | None = None
) -> Any:
    """(Σ loss, Σ weights) of a batch, for evaluation."""

    def sums(parameters: Any, batch: Batch, plan: Any) -> Any:
        return evaluation_loss(parameters, batch, plan, config)[1][:2]

    return sum_over_batch(sums, mesh)(parameters, batch, plan)
