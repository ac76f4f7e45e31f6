"""Attention on a mesh: shard_map, because XLA cannot partition kernels.

    q [B, T, N, H] ─ batch: data × fsdp, T: context, heads: tensor ─┐
    k, v [B, T, K, H] ─ the same ───────────────────────────────────┼─ attention of one device ─ out
    masks, plans, ids ─ as their own axes say ──────────────────────┘

A device has whole kv groups: mesh.tensor divides the number of kv heads. Where sequences are split,
the attention of one device is `parallel.context_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from xsake.block_mask import BlockMask
from xsake.parallel import sharding

TOKENS = ("batch", "sequence", "heads", "head_size")


def split_attention(
    attention: Callable[..., Any],
    mesh: Mesh,
    q: Array,
    k: Array,
    v: Array,
    rest: Any,
    specs: Any = None,
    out_specs: Any = None,
    sinks: Array | None = None,
) -> Any:
    """attention(q, k, v, rest) on every device, with the batch rows and heads that it holds.

    Args:
      attention: of the arrays of one device.
      mesh: the devices.
      q: [B, T, N, H].
      k: [B, T, K, H].
      v: [B, T, K, H].
      rest: what else it takes: a BlockMask, or (layer, any mask, segment_ids).
      specs: the PartitionSpecs of `rest`; default by its type.
      out_specs: those of the result; default q's.
      sinks: [N]; if there are any, they are a fifth argument.
    """
    tokens = sharding.spec(TOKENS, q.shape)
    if specs is None:
        is_mask = isinstance(rest, BlockMask)
        specs = sharding.specs_of(rest) if is_mask else _input_specs(rest, mesh)
    of_sinks = () if sinks is None else (sharding.spec(("heads",), sinks.shape),)
    # check_vma: interpreted kernels do not say over which axes their results vary
    run = jax.shard_map(
        attention,
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, specs, *of_sinks),
        out_specs=tokens if out_specs is None else out_specs,
        check_vma=False,
    )
    return run(q, k, v, rest, *(() if sinks is None else (sinks,)))


def _input_specs(rest: Any, mesh: Mesh) -> Any:
    _, mask, segment_ids = rest
    ids = ids_spec(segment_ids)
    if mesh.shape["context"] > 1 and segment_ids is not None:
        ids = sharding.spec(("batch", "sequence"), segment_ids.shape)
    return P(), sharding.specs_of(mask), ids


def ids_spec(segment_ids: Any) -> P | None:
    """The spec of segment ids [B, T], which every device needs for whole sequences."""
    return None if segment_ids is None else sharding.spec(("batch", None), segment_ids.shape)
