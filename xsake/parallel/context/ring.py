"""The ring: every device attends to its own keys, then to those of the device before it, and so on.

    step 0   own keys                         out, L                    merged by logsumexp:
    step r   keys of device d - r arrive ───▶ out', L' ───────────────▶ out · eᴸ + out' · eᴸ' …
             dk, dv of them go home     ◀─── backward(out, L of all steps)

Keys are sent straight from the device that holds them, so a step that no device needs is neither
sent nor computed, whatever the other steps are: steps that the rule excludes do not exist in the
compiled program, and the others are skipped at run time by a flag that all devices share.

The derivative does not save the keys that arrived: the backward sends them again, and the gradients
of a device's keys come back from the devices that used them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import get_abstract_mesh

from xsake import _jax
from xsake.backends import Call, accumulator, merged, reverse_only, run_forward
from xsake.backends.choice import BACKENDS
from xsake.backends.options import Options
from xsake.block_mask import BlockMask
from xsake.parallel.context.local_mask import LocalMask


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed when a call is traced."""

    axis: str
    devices: int
    backend: str
    scale: float
    soft_cap: float | None
    options: Options
    steps: tuple[int, ...] = ()  # the steps from 1 on that can have a live block
    is_static: bool = False  # each of them has one, which needs no flag

    def call(self, q: Array, k: Array, v: Array, mask: BlockMask) -> Call:
        """One call of the backend."""
        return Call(q, k, v, None, mask, self.scale, self.soft_cap, self.options)


def attend(
    settings: Settings, q: Array, k: Array, v: Array, local: LocalMask
) -> tuple[Array, Array]:
    """(out [B, T, N, Hv] in the accumulator's dtype, logsumexp [B, T, N]) by the ring."""
    if settings.backend == "reference":  # differentiable to any order, as it stands
        return _forward(settings, q, k, v, local)
    q, k, v = reverse_only(settings.backend, q, k, v)
    return _ring(settings, q, k, v, local)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    settings: Settings, q: Array, k: Array, v: Array, local: LocalMask
) -> tuple[Array, Array]:
    return _forward(settings, q, k, v, local)


def _ring_fwd(settings: Settings, q: Any, k: Any, v: Any, local: Any) -> Any:
    out, logsumexp = _forward(settings, q, k, v, local)
    return (out, logsumexp), (q, k, v, local, out, logsumexp)


def _ring_bwd(settings: Settings, saved: Any, cotangents: Any) -> Any:
    q, k, v, local, out, logsumexp = saved
    dq, dk, dv = _backward(settings, q, k, v, local, (out, logsumexp, *cotangents))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_ring.defvjp(_ring_fwd, _ring_bwd)


def _forward(
    settings: Settings, q: Array, k: Array, v: Array, local: LocalMask
) -> tuple[Array, Array]:
    forward = BACKENDS[settings.backend].forward

    def visit(step: Any, keys: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        k, v = keys
        call = settings.call(q, k, v, step_mask(settings, local, step))
        return merged(state, run_forward(forward, call))

    dtype = accumulator(q.dtype)
    nothing = (
        jnp.zeros((*q.shape[:3], v.shape[3]), dtype),
        jnp.full(q.shape[:3], -jnp.inf, dtype),
    )
    return over_steps(settings, local, q, (k, v), visit, nothing)


def _backward(
    settings: Settings, q: Array, k: Array, v: Array, local: LocalMask, rows: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) from rows = (out, logsumexp, d_out, d_logsumexp)."""
    backward = BACKENDS[settings.backend].backward
    axes = _jax.varying_axes(*jax.tree.leaves((q, k, v, local, rows)))

    def visit(step: Any, keys: Any, state: Any) -> Any:
        given = (q, *keys, step_mask(settings, local, step))
        dq, *own = backward(settings.call(*_jax.vary(given, axes)), *_jax.vary(rows, axes))
        dk, dv = fetched(settings, tuple(own), step, -1)  # of the keys at home
        return tuple(total + x for total, x in zip(state, (dq, dk, dv), strict=True))

    zeros = tuple(jnp.zeros(x.shape, accumulator(q.dtype)) for x in (q, k, v))
    return over_steps(settings, local, q, (k, v), visit, zeros)


def over_steps(
    settings: Settings,
    local: LocalMask,
    q: Array,
    keys: tuple[Array, Array],
    visit: Callable[[Any, Any, Any], Any],
    state: Any,
) -> Any:
    """visit(step, keys, state) for step 0 and for those in which any device has a live block.

    The keys of the next step are sent while those of a step are used.
    """
    axes = _jax.varying_axes(*jax.tree.leaves((q, keys, local)))
    state = _jax.vary(state, axes)
    if settings.backend == "reference":  # no loop, which could not be differentiated
        for step in (0, *settings.steps):
            state = visit(step, fetched(settings, keys, step), state)
        return state
    table = jnp.asarray((0, *settings.steps), jnp.int32)
    count: Any = len(settings.steps) + 1
    if not settings.is_static:
        flags = jnp.concatenate([jnp.ones(1, bool), shared_flags(settings, local)])
        table, count = table[jnp.argsort(~flags, stable=True)], flags.sum()

    def body(i: Array, carry: Any) -> Any:
        here, state = carry
        # after the last step nothing is sent: step 0 is what lies here
        following = jnp.where(i + 1 < count, table[jnp.minimum(i + 1, len(table) - 1)], 0)
        there = fetched(settings, keys, following)
        return there, visit(table[i], here, state)

    return lax.fori_loop(0, count, body, (_jax.vary(keys, axes), state))[1]


def shared_flags(settings: Settings, local: LocalMask) -> Array:
    """For each of settings.steps, whether any device has a live block in it: equal on all."""
    sources = (local.slots_of(_source(settings, step)) for step in settings.steps)
    own = jnp.stack([(local.block_classes(slots) > 0).any() for slots in sources])
    axes = tuple(get_abstract_mesh().manual_axes)
    return lax.pmax(_jax.vary(own.astype(jnp.int32), axes), axes) > 0


def step_mask(settings: Settings, local: LocalMask, step: Any) -> BlockMask:
    """The mask of this device's queries and of the keys that arrive in a step."""
    return local.mask(local.slots_of(_source(settings, step)))


def _source(settings: Settings, step: Any) -> Array:
    return (lax.axis_index(settings.axis) - step) % settings.devices


def fetched(settings: Settings, arrays: Any, step: Any, sign: int = 1) -> Any:
    """The arrays of the device `step` before this one; with sign -1, of the one after it.

    A permutation is fixed when a program is compiled, so a step that is not known then chooses
    among those of settings.steps. It is the same on all devices.
    """
    count = settings.devices

    def sent(step: int) -> Any:
        shift = sign * step
        return permuted(arrays, settings.axis, [(i, (i + shift) % count) for i in range(count)])

    if isinstance(step, int):
        return sent(step) if step else arrays
    if not settings.steps:
        return arrays
    branches: list[Callable[[], Any]] = [
        lambda: arrays,
        *(functools.partial(sent, step) for step in settings.steps),
    ]
    number = jnp.searchsorted(jnp.asarray((0, *settings.steps)), step)
    return lax.switch(number, branches)


permuted = lax.ppermute  # what sends; tests count its calls
