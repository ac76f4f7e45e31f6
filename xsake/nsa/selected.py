"""The selected branch: attention of every query to its own list of kv blocks.

    block_indices [B, T, K, C] ─ normalised: a set, causal ─┐
    q, k, v ────────────────────────────────────────────────┴─ SelectedCall ─ backend ─ out, lse
    of a split sequence: one kv head after the other, with the blocks that some query here selected

    backends/hopper/selected/     Hopper GPUs
    backends/xla/selected.py      any device

`BACKENDS` and `backend_for` are the one place that knows them. The derivative is defined here: a
backend computes it from the saved output and logsumexp.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from xsake import _jax
from xsake.arguments import Abstract
from xsake.attention import dot_product_attention
from xsake.backends import SelectedCall, accumulator, choice, first_order_only, reverse_only
from xsake.backends.choice import Explanation, report
from xsake.backends.hopper import selected as hopper
from xsake.backends.options import Options
from xsake.backends.xla import selected as xla
from xsake.masks.integers import size_of
from xsake.nsa.checks import check_arrays, check_indices
from xsake.nsa.sequences import ONE_SEQUENCE, Sequences, sequences_of
from xsake.nsa.split import Split

# Fastest first. A module with why_not(call), forward(call) and backward(call, …): see SelectedCall.
BACKENDS: dict[str, ModuleType] = {"hopper": hopper, "xla": xla}
REFERENCE = "reference"  # T × S in memory, by the door's backend of that name
NAMES = [*BACKENDS, REFERENCE]
OTHERS = [name for name in choice.BACKENDS if name not in NAMES]


def attend_selected(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    indices: Int[Array, "B T K C"],
    *,
    block: int,
    scale: float,
    sequences: Sequences = ONE_SEQUENCE,
    split: Split | None = None,
    counts: int | Int[Array, "B T K"] | None = None,
    is_set: bool = False,
    forced: tuple[int, int] = (0, 0),
    implementation: str | None = None,
    options: Options | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Attention of every query to the keys of its selected blocks, up to itself.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H]; S may differ from T if `sequences` has first and last.
      value: [B, S, K, Hv].
      indices: int32 block numbers, counted in the query's own sequence. Repeated, negative, future
        and missing blocks are ignored.
      block: keys of a block.
      scale: of the logits.
      sequences: of the queries.
      split: how the sequence lies over devices; query, key and value are this device's.
      counts: only the first so many indices count.
      is_set: the indices are known to be ascending, unique, causal, and -1 at the end.
      forced: (initial, local), blocks that are known to be in every list, as in SelectedCall.
      implementation: a backend by name, which runs or raises; default the fastest that can run.
      options: settings of the backends.

    Returns:
      The output in query's dtype and the logsumexp in float32, both differentiable; 0 and -inf for
      a query that sees nothing.
    """
    indices = indices if is_set else as_sets(indices, counts, sequences, block)
    call = SelectedCall(
        q=query,
        k=key,
        v=value,
        indices=indices,
        first=sequences.first,
        last=sequences.last,
        block=block,
        scale=float(scale),
        options=Options.of(options),
        forced=forced,
    )
    found = backend_for(call, implementation)
    name = found.chosen
    if name is None:
        raise ValueError(
            f"implementation {implementation!r} cannot run the selected branch: it "
            f"{found.reasons[str(implementation)]}"
        )
    if 0 in (*call.sizes[:3], indices.shape[-1]):
        B, T, _, N, _, _, Hv = call.sizes
        lse = jnp.full((B, T, N), -jnp.inf, accumulator(query.dtype))
        return jnp.zeros((B, T, N, Hv), query.dtype), lse
    if name == REFERENCE:
        if split is not None:
            key, value = split.gathered(key), split.gathered(value)
            call = dataclasses.replace(call, k=key, v=value)
        return dot_product_attention(
            query,
            key,
            value,
            mask=as_mask(call),
            scale=scale,
            implementation=REFERENCE,
            return_residual=True,
        )
    report(found)
    call = _jax.vary(call, _jax.varying_axes(*jax.tree.leaves(call)))
    q, k, v = reverse_only(name, call.q, call.k, call.v)
    static = (name, call.block, call.scale, call.options, call.forced)
    arrays = (q, k, v, call.indices, call.first, call.last)
    return _attend(static, *arrays) if split is None else _attend_split(static, split, *arrays)


def backend_for(call: SelectedCall, asked: str | None = None) -> Explanation:
    """The backend that runs a call, None if `asked` cannot; and every backend's reason."""
    check_name(asked)
    reasons = {name: backend.why_not(call) for name, backend in BACKENDS.items()}
    reasons[REFERENCE] = None
    able = [name for name, why in reasons.items() if why is None and asked in (None, name)]
    return Explanation(able[0] if able else None, reasons, asked)


def check_name(asked: str | None) -> None:
    """Raises unless `asked` names a backend of the selected branch or is None."""
    if asked is not None and asked not in NAMES:
        raise ValueError(
            f"implementation {asked!r} is not one of {NAMES}, which compute the selected branch "
            f"({', '.join(OTHERS)}: only calls without one); leave it out for the fastest that can "
            "run"
        )


def explain(
    query: Abstract,
    key: Abstract,
    value: Abstract,
    block_indices: Abstract,
    *,
    block_size: int = 64,
    scale: float | None = None,
    segment_ids: Abstract | None = None,
    cu_seqlens: Abstract | None = None,
    token_indices: Abstract | None = None,
    implementation: str | None = None,
    options: Options | None = None,
) -> Explanation:
    """Returns the backend that the selected branch would take, and every backend's reason.

    Arguments are as in `apply_native_sparse_attention`, but arrays may be shapes; block_counts and
    axis make no difference and are left out. `xsake.explain` does the same for the other branches.

    >>> q, k = (jax.ShapeDtypeStruct((1, 256, n, 64), "float32") for n in (4, 2))
    >>> indices = jax.ShapeDtypeStruct((1, 256, 2, 16), "int32")
    >>> explain(q, k, k, indices).reasons["xla"] is None
    True
    """
    answers = []
    if block_indices is None:
        raise TypeError("block_indices must be an array, got NoneType")
    size_of("block_size", block_size, 1)
    packed = {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens, "token_indices": token_indices}
    packed = {  # eval_shape would take a list apart
        name: np.asarray(x) if isinstance(x, (list, tuple)) else x for name, x in packed.items()
    }

    def ask(query: Any, key: Any, value: Any, indices: Any, packed: Any) -> int:
        q, k, v, own_scale = check_arrays(query, key, value, scale)
        sequences = sequences_of(*q.shape[:2], **packed)
        call = SelectedCall(
            q=q,
            k=k,
            v=v,
            indices=check_indices(indices, q, k),
            first=sequences.first,
            last=sequences.last,
            block=block_size,
            scale=own_scale,
            options=Options.of(options),
        )
        answers.append(backend_for(call, implementation))
        return 0

    jax.eval_shape(ask, query, key, value, block_indices, packed)
    return answers[0]


# ----------------------------------------------------------------------------------- the derivative


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: Any, q: Array, k: Array, v: Array, indices: Array, first: Any, last: Any
) -> tuple[Array, Array]:
    out, logsumexp = _forward(static, q, k, v, indices, first, last)
    return out.astype(q.dtype), logsumexp


def _forward(static: Any, *arrays: Any) -> tuple[Array, Array]:
    name, *_ = static
    return BACKENDS[name].forward(_call(static, arrays))


def _backward(static: Any, arrays: Any, *results: Any) -> Any:
    name, *_ = static
    return BACKENDS[name].backward(_call(static, arrays), *results)


def _call(static: Any, arrays: Any) -> SelectedCall:
    return SelectedCall(*arrays, *static[1:])


def _attend_fwd(static: Any, *arrays: Any) -> Any:
    run = first_order_only(static[0], functools.partial(_forward, static))
    out, logsumexp = run(*arrays)
    return (out.astype(arrays[0].dtype), logsumexp), (arrays, out, logsumexp)


def _attend_bwd(static: Any, saved: Any, cotangents: Any) -> Any:
    run = first_order_only(static[0], functools.partial(_backward, static))
    return *run(*saved, *cotangents), None, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


# ----------------------------------------------------------------------------- a split sequence


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_split(
    static: Any,
    split: Split,
    q: Array,
    k: Array,
    v: Array,
    indices: Array,
    first: Array,
    last: Array,
) -> tuple[Array, Array]:
    """As `_attend`. Keys that arrived are not kept: the backward fetches them again."""
    return _attend_split_fwd(static, split, q, k, v, indices, first, last)[0]


def _attend_split_fwd(static: Any, split: Split, *arrays: Any) -> Any:
    q, k, v, indices, first, last = arrays

    def head(given: Any) -> tuple[Array, Array]:
        q, k, v, indices = given
        pages = split.pages(indices[:, :, 0], first, last, static[1])
        near = q, pages.fetched(k), pages.fetched(v), indices, first, last
        return _forward(static, *near)

    run = first_order_only(static[0], lambda *given: lax.map(head, given))
    K = k.shape[2]
    out, logsumexp = run(*(_by_kv_head(x, K) for x in (q, k, v, indices)))
    out, logsumexp = _together(out), _together(logsumexp[..., None])[..., 0]
    return (out.astype(q.dtype), logsumexp), (arrays, out, logsumexp)


def _attend_split_bwd(static: Any, split: Split, saved: Any, cotangents: Any) -> Any:
    (q, k, v, indices, first, last), out, logsumexp = saved
    d_out, d_logsumexp = cotangents
    dtype = accumulator(q.dtype)

    def head(given: Any) -> tuple[Array, Array, Array]:
        q, k, v, indices, out, logsumexp, d_out, d_logsumexp = given
        pages = split.pages(indices[:, :, 0], first, last, static[1])
        near = q, pages.fetched(k), pages.fetched(v), indices, first, last
        results = out, logsumexp[..., 0], d_out, d_logsumexp[..., 0]
        dq, dk, dv = _backward(static, near, *results)
        return dq, pages.returned(dk.astype(dtype)), pages.returned(dv.astype(dtype))

    run = first_order_only(static[0], lambda *given: lax.map(head, given))
    K = k.shape[2]
    given = (q, k, v, indices, out, logsumexp[..., None], d_out, d_logsumexp[..., None])
    dq, dk, dv = (_together(x) for x in run(*(_by_kv_head(x, K) for x in given)))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


_attend_split.defvjp(_attend_split_fwd, _attend_split_bwd)


def _by_kv_head(x: Array, K: int) -> Array:
    """[B, T, K · G, D] -> [K, B, T, G, D]."""
    B, T, N, D = x.shape
    return jnp.moveaxis(x.reshape(B, T, K, N // K, D), 2, 0)


def _together(x: Array) -> Array:
    """The inverse of `_by_kv_head`."""
    K, B, T, G, D = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(B, T, K * G, D)


# ------------------------------------------------------------------------------------------ indices


@functools.partial(jax.jit, static_argnames="block")
def as_sets(
    indices: Int[Array, "B T K C"],
    counts: int | Int[Array, ""] | Int[Array, "B T K"] | None,
    sequences: Sequences,
    block: int,
) -> Int[Array, "B T K C"]:
    """Any indices as sets of blocks that a query can see: ascending, then -1.

    >>> jnp.ravel(as_sets(jnp.array([5, 0, -1, 0]).reshape(1, 1, 1, 4), None, ONE_SEQUENCE, 64))
    Array([ 0, -1, -1, -1], dtype=int32)
    """
    T, C = indices.shape[1], indices.shape[-1]
    current = sequences.positions(T)[:, :, None, None] // block
    listed = (indices >= 0) & (indices <= current)
    if counts is not None:
        limit = jnp.asarray(counts)
        limit = limit[..., None] if limit.ndim else limit
        listed = listed & (jnp.arange(C)[None, None, None] < limit)
    nothing = jnp.iinfo(jnp.int32).max
    ascending = jnp.sort(jnp.where(listed, indices, nothing), axis=-1)
    repeated = ascending[..., 1:] == ascending[..., :-1]
    unique = ascending.at[..., 1:].set(jnp.where(repeated, nothing, ascending[..., 1:]))
    ascending = jnp.sort(unique, axis=-1)
    return jnp.where(ascending == nothing, -1, ascending).astype(jnp.int32)


def as_mask(call: SelectedCall) -> Bool[Array, "B N T S"]:
    """Which keys every query sees, T × S in memory."""
    B, T, S, N, K, *_ = call.sizes
    key = jnp.arange(S, dtype=jnp.int32)[None, None]  # [1, 1, S]
    first = jnp.zeros((1, 1), jnp.int32) if call.first is None else call.first
    last = jnp.arange(T, dtype=jnp.int32)[None] if call.last is None else call.last
    own = (key >= first[..., None]) & (key <= last[..., None])  # [B|1, T, S]
    number = (key - first[..., None]) // call.block
    listed = (call.indices[..., None] == number[:, :, None, None]).any(3)  # [B, T, K, S]
    seen = (listed & own[:, :, None]).transpose(0, 2, 1, 3)
    return jnp.repeat(seen, N // K, axis=1)
