"""Attention on a mesh: shard_map, because XLA cannot partition kernels.

    q [B, T, N, H] ─ batch: data × fsdp, T: context, heads: tensor ─┐
    k, v [B, T, K, H] ─ the same ───────────────────────────────────┼─ attention of one device ─ out
    masks, plans, ids ─ as their own axes say ──────────────────────┘

A device has whole kv groups: mesh.tensor divides the number of kv heads. Where sequences are split,
the attention of one device is `parallel.context_attention`.

`mesh_for_text` is the mesh of commands that read one text at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from xsake.block_mask import BlockMask
from xsake.model.config import Config
from xsake.parallel import mesh as meshes
from xsake.parallel import sharding

TOKENS = ("batch", "sequence", "heads", "head_size")


def mesh_for_text(
    config: Config, asked: meshes.MeshSizes, length: int | None = None
) -> Mesh | None:
    """The mesh of a model that reads one text at a time; None on one device.

    Args:
      config: of the model; raises if the mesh does not divide its sizes.
      asked: sizes, 0 as XSAKE_MESH says, else 1.
      length: tokens of the text, which mesh.context divides; None: texts are not split.
    """
    given = meshes.given(asked)
    sizes = meshes.resolved(dataclasses.replace(given, data=given.data or 1), jax.device_count())
    if sizes.data > 1:
        raise ValueError(
            f"mesh.data = {sizes.data} splits batch rows, but one text is read at a time; use "
            "mesh.tensor"
        )
    if length is None and sizes.context > 1:
        raise ValueError(
            f"mesh.context = {sizes.context} splits texts whose length is known, not a text that "
            "grows or comes later; use mesh.tensor"
        )
    divided = {
        "fsdp": ("model.width", config.width),
        "tensor": ("model.kv_heads", config.kv_heads),
        "tensor 2": ("model.mlp_width", config.mlp_width),
    }
    if length is not None:
        divided["context"] = ("length", length)
    meshes.check_divides(sizes, divided)
    return meshes.make_mesh(sizes)


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
      rest: what else it takes: a BlockMask, or (layer, any mask, segment_ids), maybe with a count
        [B] after them.
      specs: the PartitionSpecs of `rest`; default by its type.
      out_specs: those of the result; default q's.
      sinks: [N]; if there are any, they are a fifth argument.
    """
    tokens = sharding.spec(TOKENS, q.shape)
    if specs is None:
        is_mask = isinstance(rest, BlockMask)
        specs = sharding.specs_of(rest) if is_mask else _input_specs(rest)
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


def _input_specs(rest: Any) -> Any:
    _, mask, segment_ids, *counts = rest
    of_counts = (None if x is None else sharding.spec(("batch",), x.shape) for x in counts)
    return P(), sharding.specs_of(mask), ids_spec(segment_ids), *of_counts


def ids_spec(segment_ids: Any) -> P | None:
    """The spec of segment ids [B, T]."""
    return None if segment_ids is None else sharding.spec(("batch", "sequence"), segment_ids.shape)
