"""TPUs: which calls the kernels support, and the custom_vjp that uses them.

    call ─ why_not ─┬─ forward_kernel.py ──── out, logsumexp
                    └─ backward_kernel.py ─── dq by the lists; dk, dv by the transposed lists

    visits.py     one flat list of visits for all heads, read ahead from scalar memory
    kernel.py     what the kernels share: layouts of arrays, launches, the rule inside a tile

The kernels are written in Pallas Mosaic TPU. They have run in its interpreter, and lower for TPUs;
their speed has not been measured on one. Modules that import Pallas are imported when a kernel is
traced: `import xsake` does without them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake import _jax
from xsake.backends import Call, first_order_only, kernel_rule, reverse_only
from xsake.block_mask import BlockMask

if TYPE_CHECKING:
    from xsake.backends.tpu.kernel import Settings

MOST_HEAD, MOST_BLOCK = 256, 512
SUBLANES = 16  # rows of a bfloat16 tile; float32 has 8

# `pltpu.InterpretParams` that the kernels run with on any device: for tests.
interpret: Any = False


def why_not(call: Call) -> str | None:
    """The first thing that keeps the kernels from running this call."""
    if not interpret and _jax.platform() != "tpu":
        return f"needs a TPU; this is a {_jax.platform()}"
    if call.q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"takes bfloat16 and float32; this is {call.q.dtype}"
    if call.bias is not None:
        return "takes no bias"
    H, Hv = call.sizes.H, call.sizes.Hv
    if max(H, Hv) > MOST_HEAD:
        return f"takes heads of up to {MOST_HEAD}; these are {H} and {Hv}"
    if any(x % SUBLANES or x > MOST_BLOCK for x in call.mask.block):
        bq, bk = call.mask.block
        return f"takes blocks of multiples of {SUBLANES} up to {MOST_BLOCK}; these are {bq} × {bk}"
    if reason := kernel_rule.why_not(call.mask.rule, *call.mask.shape):
        return reason
    from xsake.backends.tpu.visits import Layout

    mask = call.mask.packed()
    layouts = (Layout.of(mask, call.sizes, by_column) for by_column in (False, True))
    return next((reason for layout in layouts if (reason := layout.why_not())), None)


def forward(call: Call) -> tuple[Array, Array]:
    """(out [B, T, N, Hv], logsumexp [B, T, N])."""
    from xsake.backends.tpu.kernel import Settings

    settings = Settings(float(call.scale), call.soft_cap, interpret)
    q, k, v = reverse_only("tpu", call.q, call.k, call.v)
    return _attention(settings, q, k, v, call.mask)


def backward(
    call: Call, out: Array, logsumexp: Array, d_out: Array, d_logsumexp: Array
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of the call's keys; out and logsumexp may cover more keys than the call has."""
    from xsake.backends.tpu.kernel import Settings

    settings = Settings(float(call.scale), call.soft_cap, interpret)
    run = first_order_only("tpu", functools.partial(_run_backward, settings))
    rows = (out.astype(call.q.dtype), logsumexp)
    return run((call.q, call.k, call.v, call.mask, *rows), (d_out, d_logsumexp))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    settings: Settings, q: Array, k: Array, v: Array, mask: BlockMask
) -> tuple[Array, Array]:
    return _run_forward(settings, q, k, v, mask)


def _attention_fwd(settings: Settings, q: Any, k: Any, v: Any, mask: Any) -> Any:
    run = first_order_only("tpu", functools.partial(_run_forward, settings))
    out, logsumexp = run(q, k, v, mask)
    return (out, logsumexp), (q, k, v, mask, out, logsumexp)


def _attention_bwd(settings: Settings, saved: Any, cotangents: Any) -> Any:
    run = first_order_only("tpu", functools.partial(_run_backward, settings))
    return (*run(saved, cotangents), None)


_attention.defvjp(_attention_fwd, _attention_bwd)


@functools.partial(jax.jit, static_argnums=0)
def _run_forward(
    settings: Settings, q: Array, k: Array, v: Array, mask: BlockMask
) -> tuple[Array, Array]:
    from xsake.backends.tpu import forward_kernel

    return forward_kernel.forward(settings, q, k, v, mask)


@functools.partial(jax.jit, static_argnums=0)
def _run_backward(settings: Settings, saved: Any, cotangents: Any) -> tuple[Array, Array, Array]:
    from xsake.backends.tpu import backward_kernel

    return backward_kernel.backward(settings, saved, cotangents)
