"""One update, compiled: loss and gradient over micro-batches, then clipped AdamW.

    state, batch [B, T], plan ─ Σ over micro-batches ─ ÷ targets ─ update ─ finite? ─┬─ new state
                                                                                     └─ old state

An update whose loss or gradient is not finite is skipped. The plan is an argument: another one of
the same shape does not recompile. On a mesh the state lies as `state_shardings` says, XLA
partitions the update, and attention runs under shard_map.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh

from xsake import parallel
from xsake.data.stream import Batch
from xsake.model import Transformer, cross_entropy, parameter_axes
from xsake.model.attend import Order
from xsake.parallel import sharding
from xsake.parallel.context import LEAST_BLOCK
from xsake.parallel.mesh import sizes_of
from xsake.train import optimizer
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
    stop_request: Any  # the largest of any process: 0 goes on, larger stops


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


def state_shardings(config: Config, mesh: Mesh) -> State:
    """Where every array of the state lies: moments and average where their parameters lie."""
    like = jax.eval_shape(lambda: initial(config))
    return sharding.of_state(like, mesh, parameter_axes(config.model))


def initial_on(config: Config, mesh: Mesh | None, parameters: Any = None) -> State:
    """`initial` on the devices of a mesh; without given parameters, made there part by part."""
    if mesh is None:
        return jax.device_put(initial(config, parameters), sharding.replicated(None))
    where = state_shardings(config, mesh)
    if parameters is None:
        return jax.jit(lambda: initial(config), out_shardings=where)()
    parameters = sharding.put(dict(parameters), where.parameters)
    return jax.jit(lambda x: initial(config, x), out_shardings=where)(parameters)


def transformer(
    config: Config, parameters: Any, mesh: Mesh | None = None, order: Order | None = None
) -> Transformer:
    """A model of these parameters with the config's compute options.

    The tokens that it takes are in `order`, by default that of `batch_on`.
    """
    how = config.compute
    return Transformer.of(
        config.model,
        parameters,
        dtype=how.dtype,
        scan=how.scan,
        remat=how.remat,
        implementation=how.implementation,
        mesh=mesh,
        order=token_order(config, mesh) if order is None else order,
    )


def token_order(config: Config, mesh: sharding.AnyMesh | None) -> Order:
    """The order of tokens that gives the devices of mesh.context equal work; see `Transformer`.

    "zigzag" for causal attention. With plans, whose work no order knows, "balanced", if every
    device has a row block of the plan for every other one; else "contiguous", and so with windows
    in all layers and with sparse attention, whose work hardly grows with the position.
    """
    devices, model = sizes_of(mesh).context, config.model
    if devices == 1 or model.is_sparse:
        return "contiguous"
    tokens = config.data.length // devices
    if config.hads.density is not None:
        fits = tokens % (devices * math.lcm(config.hads.block, LEAST_BLOCK)) == 0
        return "balanced" if fits else "contiguous"
    is_windowed = all(model.windowed(layer) for layer in range(model.layers))
    return "contiguous" if is_windowed or tokens % 2 else "zigzag"


def batch_on(
    config: Config,
    read: Callable[[Sequence[int]], Batch],
    shape: tuple[int, int],
    mesh: Mesh | None,
) -> Batch:
    """A batch on the mesh, its tokens in the order of `token_order`.

    Arguments are those of `sharding.batch_from_rows`.
    """
    order = token_order(config, mesh)
    if order != "zigzag":
        return sharding.batch_from_rows(read, shape, mesh)
    at = parallel.token_order(shape[1], sizes_of(mesh).context, order)
    return sharding.batch_from_rows(
        lambda rows: jax.tree.map(lambda x: x[:, at], read(rows)), shape, mesh
    )


def summed_loss(
    parameters: Any, batch: Batch, plan: Any, config: Config, mesh: Mesh | None = None
) -> tuple[Array, Sums]:
    """(what is minimised, Sums): Σ loss, plus config.index_loss · Σ index loss for "msa"."""
    if config.model.attention != "msa":
        return evaluation_loss(parameters, batch, plan, config, mesh)
    model = transformer(config, parameters, mesh)
    segments = batch.segment_ids if config.data.separate else None
    hidden, index = model.hidden_and_index_loss(batch.tokens, segment_ids=segments)
    total, sums = loss_of_hidden(model, hidden, batch, config)
    sums = sums._replace(index_loss=index * sums.targets)
    return total + config.index_loss * sums.index_loss, sums


def evaluation_loss(
    parameters: Any, batch: Batch, plan: Any, config: Config, mesh: Mesh | None = None
) -> tuple[Array, Sums]:
    """(Σ loss, Sums) in float32, with loss = weight · -log p(target)."""
    model = transformer(config, parameters, mesh)
    segments = batch.segment_ids if config.data.separate else None
    hidden = model.hidden(batch.tokens, mask=plan, segment_ids=segments)
    return loss_of_hidden(model, hidden, batch, config)


def loss_of_hidden(
    model: Transformer, hidden: Array, batch: Batch, config: Config
) -> tuple[Array, Sums]:
    """(Σ loss, Sums without an index loss) of hidden states [B, T, width]."""
    at_once, tokens = config.compute.loss_tokens, (hidden, batch.targets, batch.weights)
    if model.mesh is None or not at_once:
        flat: Any = tuple(x.reshape(-1, *x.shape[2:]) for x in tokens)
    else:
        at_once, flat = _interleaved(at_once, tokens, model.mesh)
    kernel = sharding.constrained(model.head_kernel(), ("width", "vocab"), model.mesh)
    total = cross_entropy.summed(at_once, flat[0], kernel, *flat[1:], model.config.final_soft_cap)
    return total, Sums(total, batch.weights.sum(), jnp.zeros((), jnp.float32))


def _interleaved(at_once: int, tokens: Any, mesh: Mesh) -> tuple[int, Any]:
    """(tokens of a part, arrays [M, …]), in an order in which every part has tokens of all devices.

    [B, T, …] ─ of each device ─ [devices, parts, each, …] ─ [parts · devices · each, …]
    """
    sizes = sizes_of(mesh)
    rows, columns = sizes.data * sizes.fsdp, sizes.context
    B, T = tokens[1].shape
    local = (B // rows) * (T // columns)
    each = min(max(1, at_once // (rows * columns)), local)
    parts = -(-local // each)

    def one(x: Array) -> Array:
        rest = x.shape[2:]
        x = x.reshape(rows, B // rows, columns, T // columns, *rest)
        x = jnp.moveaxis(x, 2, 1).reshape(rows, columns, local, *rest)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, parts * each - local), *[(0, 0)] * len(rest)])
        x = jnp.moveaxis(x.reshape(rows, columns, parts, each, *rest), 2, 0)
        return x.reshape(-1, *rest)

    return rows * columns * each, tuple(map(one, tokens))


Loss = Callable[..., tuple[Array, Sums]]  # of (parameters, batch, plan, config, mesh)


def summed_gradient(
    parameters: Any,
    batch: Batch,
    plan: Any,
    config: Config,
    mesh: Mesh | None = None,
    loss_fn: Loss = summed_loss,
) -> Any:
    """(Sums, gradient of what `loss_fn` minimises) over rows, a micro-batch at a time."""
    pieces = config.optimizer.accumulate
    slope = jax.value_and_grad(loss_fn, has_aux=True)

    def one(part: Batch) -> Any:
        (_, sums), gradient = slope(parameters, part, plan, config, mesh)
        return sums, gradient

    if pieces == 1:
        return one(batch)
    # every device splits its own batch rows
    sizes = sizes_of(mesh)
    devices = sizes.data * sizes.fsdp

    def split(x: Array) -> Array:
        parts = jnp.swapaxes(x.reshape(devices, pieces, -1, *x.shape[1:]), 0, 1)
        return parts.reshape(pieces, -1, *x.shape[1:])

    parts = jax.tree.map(split, batch)
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
    stop_requests: Any = None,
) -> tuple[State, Metrics]:
    """One step; batch has all rows of the update, sharded over the devices of `mesh`.

    `stop_requests` are int32 [devices], one of each: the metrics have the largest, so that all
    processes learn in the same step that one of them wants to stop.
    """
    found, gradient = summed_gradient(state.parameters, batch, plan, config, mesh, loss_fn)
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
    stop_request = jnp.zeros((), jnp.int32) if stop_requests is None else stop_requests.max()
    metrics = Metrics(
        loss,
        targets,
        norm,
        speed,
        after.skipped_steps,
        after.bad_steps,
        index_loss / count,
        stop_request,
    )
    # copies: the state's buffers are donated to the next step
    metrics = jax.tree.map(lambda x: x + 0, metrics)
    if mesh is not None:
        after = lax.with_sharding_constraint(after, state_shardings(config, mesh))
        metrics = lax.with_sharding_constraint(metrics, sharding.replicated(mesh))
    return after, metrics


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
    state: State,
    batch: Batch,
    plan: Any,
    stop_requests: Any = None,
    *,
    config: Config,
    mesh: Mesh | None = None,
) -> Any:
    """`update`, compiled once for a dense plan (None) and once for sparse ones."""
    return update(state, batch, plan, config, mesh, stop_requests=stop_requests)


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def compiled_loss(
    parameters: Any, batch: Batch, plan: Any, *, config: Config, mesh: Mesh | None = None
) -> Any:
    """(Σ loss, Σ weights) of a batch, for evaluation."""
    found = evaluation_loss(parameters, batch, plan, config, mesh)[1][:2]
    return found if mesh is None else lax.with_sharding_constraint(found, sharding.replicated(mesh))
