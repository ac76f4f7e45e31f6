"""context_attention: attention over a sequence that is split over the devices of a mesh axis.

It is called inside shard_map, on every device of the axis:

    q [B, T / c, N, H] ─┐          ┌─ ring    keys of one device after the other; steps without a
    k [B, S / c, K, H] ─┤          │          live block are neither sent nor computed
    v [B, S / c, K, Hv]─┼─ choose ─┤
    any mask, rule ─────┤          ├─ gather  only the kv blocks that a local row block visits
    ids, positions ─────┘          └─ halo    windows: the ends of the neighbours' keys

    layout.py        which tokens a device holds: contiguous or zigzag
    local_rule.py    a rule of the whole text for some of its tokens
    local_mask.py    the mask of one device's queries, for keys of any device
    input_rows.py    context_mask: plans and other masks from q and k, for one device's queries
    steps.py         which devices need which keys, known before any run
    traffic.py       the bytes that each method receives, and which one is taken
    ring.py          the ring and its derivative
    gather.py        the gather; halo.py: the halo exchange
    rows.py          row blocks that move between devices so that all have equal work
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from xsake import _jax, masks
from xsake.arguments import (
    Abstract,
    Mask,
    Tensor,
    block_for,
    check_qkv,
    check_sinks,
    check_soft_cap,
    lengths_rule,
    number,
    per_token,
    window_rule,
)
from xsake.attention import Arguments
from xsake.backends import Sizes, scale_gradient, with_sinks
from xsake.backends.choice import Explanation, choose, report
from xsake.backends.options import Options
from xsake.block_mask import BlockMask
from xsake.block_mask.input_mask import InputMask
from xsake.masks.integers import size_of
from xsake.masks.rule import Rule, check_fits, combine
from xsake.parallel.context import gather, halo, ring, rows, traffic
from xsake.parallel.context.input_rows import context_mask
from xsake.parallel.context.layout import Layout, LayoutName, token_order
from xsake.parallel.context.local_mask import (
    LocalMask,
    check_block_mask,
    gathered,
    row_classes,
)

__all__ = [
    "ContextExplanation",
    "context_attention",
    "context_mask",
    "explain_context",
    "token_order",
]


LEAST_BLOCK = 16  # tokens of a row block, if rules are balanced


def context_attention(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B S K H"],
    value: Float[Tensor, "B S K Hv"],
    mask: Mask | None = None,
    *,
    axis: str = "context",
    layout: LayoutName = "contiguous",
    method: str | None = None,
    capacity: int | None = None,
    balance: bool = False,
    implementation: str | None = None,
    return_residual: bool = False,
    **arguments: Unpack[Arguments],
) -> Any:
    """`dot_product_attention` over a sequence that is split over a mesh axis; inside `shard_map`.

    All devices of the axis hold equally many queries and keys. Together their results are those of
    one device with the whole sequence. Reverse-mode derivatives only, except by
    implementation="reference".

    Args:
      query: this device's queries, [B, T, N, H].
      key: its keys, [B, S, K, H].
      value: [B, S, K, Hv].
      mask: a rule of the whole text, which reads its arrays by a token's place in the text; a
        BlockMask of the whole text; a BlockMask of this device's queries and all keys, as
        `context_mask(plan, layer, q, k)` returns it; or a bool array of the whole text. Blocks
        are numbered by their place in the text.
      axis: the mesh axis over which the sequence is split.
      layout: how the text lies on the devices; see `token_order`.
      method: "ring", "gather" or "halo"; default the one with the least traffic that can run.
      capacity: of "gather": kv blocks that a device may receive from each other one. With more, the
        output and the gradients of this device are NaN. Default: enough for every mask.
      balance: send query blocks to other devices so that all have equal work under this mask, and
        the results back; for masks whose work is unequal in a way that no layout knows.
      implementation: a backend by name.
      return_residual: also return the logsumexp [B, T, N].
      **arguments: the others of `dot_product_attention`. Segment ids and positions are those of
        this device's queries and keys; positions default to the place in the text, whose tokens
        sequence lengths count. Sinks are the same on all devices of the axis.

    Returns:
      [B, T, N, Hv] in query's dtype; with return_residual, that and the logsumexp.
    """
    for name in arguments:
        if name not in Arguments.__annotations__:
            raise TypeError(
                f"context_attention has no argument {name!r}; it takes those of "
                "dot_product_attention but a bias"
            )
    given: dict[str, Any] = dict.fromkeys(Arguments.__annotations__) | arguments
    q, k, v, is_unbatched = check_qkv(query, key, value)
    if is_unbatched:
        raise ValueError(f"query must be [B, T, N, H], got shape {list(q.shape[1:])}")
    sizes, devices = Sizes.of(q, k, v), axis_size(axis)
    queries, keys = Layout(layout, devices, sizes.T), Layout(layout, devices, sizes.S)
    queries.check("queries")
    keys.check("keys")
    limits = [
        masks.causal() if given["is_causal"] else masks.everything(),
        window_rule(given["local_window_size"]),
        lengths_rule(sizes, given["query_seq_lengths"], given["key_value_seq_lengths"]),
    ]
    local = _local_mask(
        mask, combine(limits), sizes, queries, keys, axis, balance,
        ids=(given["q_segment_ids"], given["kv_segment_ids"]),
        positions=(given["q_positions"], given["kv_positions"]),
    )  # fmt: skip
    if balance:
        rows.check_divides(sizes.T, devices, local.block[0])
    sinks, scale = check_sinks(sizes, given["sinks"]), given["scale"]
    q, k, v = _jax.vary((q, k, v), _jax.varying_axes(*jax.tree.leaves((q, k, v, local))))
    problem = traffic.Problem(
        queries,
        keys,
        local.block,
        local.bound,
        local.is_static,
        token_bytes=sizes.B * sizes.K * (sizes.H + sizes.Hv) * q.dtype.itemsize,
        capacity=None if capacity is None else size_of("capacity", capacity, 1),
        moves_rows=balance,
    )
    found = traffic.estimates(problem)
    settings = ring.Settings(
        axis,
        devices,
        "",
        1 / math.sqrt(sizes.H) if scale is None else number("scale", scale),
        check_soft_cap(given["logits_soft_cap"]),
        Options.of(given["options"]),
        found["ring"].steps,
        local.is_static and not balance,
    )
    backend = choose(implementation, settings.call(q, k, v, ring.step_mask(settings, local, 0)))
    if isinstance(method, _Question):
        return method.ask(problem, backend)
    report(backend)
    if backend.chosen is None:
        raise ValueError(
            f"implementation {implementation!r} cannot run this call: it "
            f"{backend.reasons[str(implementation)]}"
        )
    settings = dataclasses.replace(settings, backend=backend.chosen)
    out, logsumexp = _attend(
        settings, q, k, v, local, traffic.chosen(found, method), found, balance
    )
    if sinks is not None:
        out = with_sinks(out, logsumexp, sinks)
    out = out.astype(q.dtype)
    return (out, logsumexp) if return_residual else out


def _attend(
    settings: ring.Settings,
    q: Array,
    k: Array,
    v: Array,
    local: LocalMask,
    method: str,
    found: dict[str, traffic.Estimate],
    balance: bool,
) -> tuple[Array, Array]:
    """(out, logsumexp) by a method, NaN with its gradients where a capacity was too small."""
    moved = None
    if balance:
        work = (local.block_classes(local.all_slots()) > 0).sum((0, 1, 3), dtype=jnp.int32)
        moved = rows.schedule(work, settings.axis, settings.devices, local.block[0])
        q, local = moved.sent(q, 1), local.moved(moved)
    overflow, capacity = local.overflow, found["gather"].capacity
    if method == "gather":
        cut = gather.exceeds(settings, local, Sizes.of(q, k, v), capacity)
        overflow = cut if overflow is None else cut | overflow
    if overflow is not None:
        factor = jnp.where(overflow, jnp.nan, 1.0)
        q, k, v = (scale_gradient(x, factor) for x in (q, k, v))
    if method == "gather":
        out, logsumexp = gather.attend(settings, q, k, v, local, capacity)
    elif method == "halo":
        out, logsumexp = halo.attend(settings, q, k, v, local, found["halo"].reach)
    else:
        out, logsumexp = ring.attend(settings, q, k, v, local)
    if overflow is not None:
        out, logsumexp = (x * factor.astype(x.dtype) for x in (out, logsumexp))
    if moved is not None:
        out, logsumexp = moved.returned(out, 1), moved.returned(logsumexp, 1)
    return out, logsumexp


# ----------------------------------------------------------------------------------------- explain


@dataclasses.dataclass(frozen=True)
class ContextExplanation:
    """The method and the backend of a call, and what every method would receive.

    Attributes:
      method: the one that is taken; None if the one asked for cannot run.
      estimates: of every method.
      backend: what `xsake.explain` says of one device's part.
      all_gather_bytes: what a device would receive if it gathered all keys and values.
    """

    method: str | None
    estimates: dict[str, traffic.Estimate]
    backend: Explanation
    all_gather_bytes: int

    def __str__(self) -> str:
        lines = []
        for name, estimate in self.estimates.items():
            words = estimate.reason or f"receives {estimate.received_bytes:,} bytes"
            if name == "ring" and estimate.reason is None:
                words += f" in {len(estimate.steps)} steps"
            if name == "gather" and estimate.reason is None:
                words += f", {estimate.capacity} blocks of each other device"
            lines.append(f"{name:<10}  {'chosen, ' if name == self.method else ''}{words}")
        lines.append(f"{'all-gather':<10}  would receive {self.all_gather_bytes:,} bytes")
        return "\n".join([*lines, f"backend     {self.backend.chosen}"])


class _Question(str):
    """A method's name, or "", passed as `method` to store an explanation instead of computing."""

    answer: ContextExplanation

    def ask(self, problem: traffic.Problem, backend: Explanation) -> int:
        """Keeps the answer, and returns something that `jax.eval_shape` takes."""
        found = traffic.estimates(problem)
        asked = str(self) or None
        is_unable = asked in found and found[asked].reason is not None
        method = None if is_unable else traffic.chosen(found, asked)
        everything = (problem.keys.devices - 1) * problem.chunk_bytes
        self.answer = ContextExplanation(method, found, backend, everything)
        return 0


def explain_context(
    query: Abstract,
    key: Abstract,
    value: Abstract,
    mask: Mask | None = None,
    *,
    devices: int,
    method: str | None = None,
    **arguments: Any,
) -> ContextExplanation:
    """What `context_attention` would do with a whole sequence over `devices` devices.

    Takes its arguments, with arrays (or shapes) of the whole sequence, outside `shard_map`.

    >>> import jax
    >>> q = jax.ShapeDtypeStruct((1, 4096, 4, 64), "float32")
    >>> print(explain_context(q, q, q, devices=8, local_window_size=(100, 0)))
    ring        receives 1,048,576 bytes in 1 steps
    halo        chosen, receives 262,144 bytes
    gather      receives 1,835,008 bytes, 1 blocks of each other device
    all-gather  would receive 7,340,032 bytes
    backend     xla
    """
    for x in (query, key):
        token_order(x.shape[1], devices, arguments.get("layout", "contiguous"))
    axis = arguments.setdefault("axis", "context")
    question = _Question(method or "")
    per_token = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
    split = {name: arguments.pop(name) for name in per_token if arguments.get(name) is not None}

    def ask(query: Any, key: Any, value: Any, mask: Any, split: Any) -> Any:
        context_attention(query, key, value, mask, method=question, **split, **arguments)
        return query

    tokens = P(None, axis)
    mesh = AbstractMesh((devices,), (axis,), axis_types=(AxisType.Auto,))
    asked = jax.shard_map(
        ask, mesh=mesh, in_specs=(tokens, tokens, tokens, P(), tokens), out_specs=tokens
    )
    jax.eval_shape(asked, query, key, value, mask, split)
    return question.answer


def axis_size(axis: str) -> int:
    """The devices of a mesh axis; raises outside of `shard_map`."""
    try:
        return lax.axis_size(axis)
    except NameError as error:
        raise ValueError(
            f"axis {axis!r} is not a mesh axis here; make this call inside jax.shard_map over a "
            "mesh that has it"
        ) from error


def _local_mask(
    mask: Any,
    limits: Rule,
    sizes: Sizes,
    queries: Layout,
    keys: Layout,
    axis: str,
    balance: bool,
    ids: tuple[Any, Any],
    positions: tuple[Any, Any],
) -> LocalMask:
    q_slot = lax.axis_index(axis) * sizes.T + jnp.arange(sizes.T, dtype=jnp.int32)
    q_ids = per_token("q_segment_ids", ids[0], sizes.B, sizes.T)
    if q_ids is None and ids[1] is not None:
        raise ValueError("kv_segment_ids needs q_segment_ids beside it")
    if q_ids is not None and ids[1] is None and sizes.T != sizes.S:
        raise ValueError(
            f"q_segment_ids alone is enough only if T = S, got T = {sizes.T} and S = {sizes.S}; "
            "give kv_segment_ids too"
        )
    own_ids = q_ids if ids[1] is None else per_token("kv_segment_ids", ids[1], sizes.B, sizes.S)
    q_positions = per_token("q_positions", positions[0], sizes.B, sizes.T)
    kv_positions = per_token("kv_positions", positions[1], sizes.B, sizes.S)
    kv_ids, kv_positions = (
        None if x is None else gathered(x, axis) for x in (own_ids, kv_positions)
    )
    common: dict[str, Any] = {
        "q_ids": q_ids, "kv_ids": kv_ids, "q_positions": q_positions, "kv_positions": kv_positions,
        "queries": queries, "keys": keys, "batch": sizes.B, "heads": sizes.N, "q_slot": q_slot,
    }  # fmt: skip
    if isinstance(mask, BlockMask):
        if positions != (None, None):
            raise ValueError(
                "positions cannot be applied to a BlockMask, whose blocks are already chosen; "
                "give them to BlockMask.from_rule(rule, shape, q_positions=…, kv_positions=…)"
            )
        check_block_mask(mask, sizes, queries, keys)
        is_local = mask.shape[0] == queries.local and queries.devices > 1
        row = jnp.arange(sizes.T // mask.block[0])
        if not is_local:
            row = queries.index(q_slot[:: mask.block[0]]) // mask.block[0]
        return LocalMask(
            rule=mask.rule, limits=limits, classes=row_classes(mask, row), overflow=mask.overflow,
            rows_are_local=is_local, block=mask.block, **common,
        )  # fmt: skip
    if isinstance(mask, Rule):
        limits = mask & limits
    elif mask is not None:
        if isinstance(mask, InputMask):
            raise TypeError(
                f"mask is a {type(mask).__name__}, which is computed from q and k; give "
                "parallel.context_mask(mask, layer, q, k)"
            )
        if callable(mask):
            raise TypeError("mask is a function; wrap it with xsake.masks.rule(fn)")
        limits = masks.array(jnp.asarray(mask)) & limits
    check_fits(limits, sizes.B, sizes.N, queries.length, keys.length)
    rows_block = block_for(queries.run)
    if balance:  # every device has whole row blocks, equally many for each device
        while rows_block > LEAST_BLOCK and queries.local % (rows_block * queries.devices):
            rows_block //= 2
    block = (rows_block, block_for(keys.run))
    return LocalMask(
        rule=None, limits=limits, classes=None, overflow=None, rows_are_local=False, block=block,
        **common,
    )  # fmt: skip
