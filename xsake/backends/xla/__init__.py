"""Plain JAX that visits live blocks only: any device, forward and backward, memory linear in T.

The cost of a row block is proportional to the number of kv blocks that it visits. The row blocks of
all heads are sorted by that number and processed in chunks. A chunk runs as many steps as its
longest list needs; because of the sort, its lists have nearly the same length:

    row blocks (b, i, n), most visits first    one step of a chunk
    ┌─────────┐ chunk 0   9 9 9 8              q [R, block_q, H] ─┐
    ├─────────┤ chunk 1   8 8 7 7              k[next W blocks] ──┴─ s ─ m, l, acc ← online softmax
    ├─────────┤ chunk 2   7 5 5 4
    └─────────┘

The first step visits the end of every list, with the rule. The following steps visit full blocks
without masking, as long as all lists have them. The remaining steps use the rule again. Calls with
few token pairs have one loop for all visits, which is less to compile.

    chunks.py          row blocks that are processed together, and what a step reads for them
    bias.py            reads a bias by blocks, and sums its gradient by blocks
    output.py          the forward
    gradients.py       the backward: chunks of kv blocks by the transposed lists
    selected.py        attention to lists of blocks of single queries (nsa)
    cpu_jax_0_10.py    the forward on CPUs with JAX before 0.11
"""

from __future__ import annotations

import functools
import math

import jax
from jax import Array

from xsake import _jax
from xsake.backends import Call, Derivatives, Sizes
from xsake.backends.xla import cpu_jax_0_10, output
from xsake.backends.xla.bias import BiasBlocks, has_own_bias
from xsake.backends.xla.chunks import device_steps
from xsake.backends.xla.gradients import gradients
from xsake.backends.xla.output import Inputs
from xsake.backends.xla.settings import Settings
from xsake.block_mask import BlockMask


def why_not(call: Call) -> str | None:
    """None, except for deterministic gradients of a broadcast bias on a GPU."""
    bias, sizes = call.bias, call.sizes
    if not call.options.deterministic or _jax.platform() != "gpu" or bias is None:
        return None
    if has_own_bias(bias, sizes):
        return None
    return (
        f"cannot compute the gradient of a bias {list(bias.shape)} deterministically on a GPU; "
        f"broadcast the bias to {[sizes.B, sizes.N, sizes.T, sizes.S]}"
    )


def forward(call: Call) -> tuple[Array, Array]:
    """(out [B, T, N, Hv], logsumexp [B, T, N])."""
    return DERIVATIVES.forward(_settings(call), call)


def backward(
    call: Call, out: Array, logsumexp: Array, d_out: Array, d_logsumexp: Array
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of the call's keys; out and logsumexp may cover more keys than the call has."""
    return DERIVATIVES.backward(_settings(call), call, (out, logsumexp), (d_out, d_logsumexp))


def _settings(call: Call) -> Settings:
    options, mask, sizes = call.options, call.mask, call.sizes
    pairs = sizes.B * sizes.N * mask.kv_index.shape[-1] * math.prod(mask.block)
    steps = options.xla or device_steps(_jax.platform(), options.deterministic, mask.block, pairs)
    return Settings(float(call.scale), call.soft_cap, steps)


@functools.partial(jax.jit, static_argnums=0)
@jax.named_scope("xsake_forward")
def _output(
    settings: Settings, q: Array, k: Array, v: Array, bias: Array | None, mask: BlockMask
) -> tuple[Array, Array]:
    """(out, logsumexp), not rounded to q's dtype."""
    sizes = Sizes.of(q, k, v)
    biases = None if bias is None else BiasBlocks(bias, mask, sizes)
    inputs = Inputs(settings, sizes, q, k, v, biases, mask)
    if cpu_jax_0_10.fits(mask, sizes, settings.steps.chains):
        return cpu_jax_0_10.visit_chains(inputs)
    return output.visit_chunks(inputs)


DERIVATIVES = Derivatives("xla", _output, gradients)
