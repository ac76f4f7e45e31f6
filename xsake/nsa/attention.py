"""Native Sparse Attention: three branches, each with a gate, whose outputs are added.

                    ┌─ compress.py ─ pooled k, v ─ attention ──── · g_cmp ─┐
                    │                    │ logsumexp                       │
    q, k, v ────────┼─ select.py ────────┴─ block_indices [B, T, K, C]     ├─ + ─ out
                    │                             │                        │
                    ├─ selected.py ── attention to those blocks ─ · g_slc ─┤
                    └─ window ─────── dot_product_attention ───── · g_swa ─┘

Queries of a kv head share their selection. Everything is causal, and sequences that are packed into
one batch row give what they would give alone, in all branches.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from xsake.attention import Tensor, check_qkv, dot_product_attention, number
from xsake.backends import accumulator
from xsake.backends.options import Options
from xsake.masks.integers import integers, size_of
from xsake.nsa import select
from xsake.nsa.compress import Compression, Pooled, attend_compressed, compress
from xsake.nsa.selected import attend_selected
from xsake.nsa.sequences import Sequences, sequences_of

Score = Literal["nsa", "moba", "msa"]
# Blocks that are always selected, (initial, local), unless the caller says otherwise: those of the
# NSA paper; the current block alone for the others.
FORCED: dict[str, tuple[int, int]] = {"nsa": (1, 2), "moba": (0, 1), "msa": (0, 1)}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The numbers of one call, checked."""

    score: Score = "nsa"
    block_size: int = 64
    num_selected: int = 16
    initial_blocks: int | None = None
    local_blocks: int | None = None
    window_size: int | None = None
    compression_block: int = 32
    compression_stride: int = 16

    def __post_init__(self) -> None:
        if self.score not in FORCED:
            raise ValueError(f"score must be one of {list(FORCED)}, got {self.score!r}")
        for name in ("block_size", "num_selected", "compression_block", "compression_stride"):
            size_of(name, getattr(self, name), 1)
        if self.window_size is not None:
            size_of("window_size", self.window_size, 1)
        for name, default, least in zip(
            ("initial_blocks", "local_blocks"), FORCED[self.score], (0, 1), strict=True
        ):
            given = getattr(self, name)
            object.__setattr__(
                self, name, default if given is None else size_of(name, given, least)
            )
        forced = self.initial_blocks + self.local_blocks  # type: ignore[operator]
        if forced > self.num_selected:
            raise ValueError(
                f"num_selected = {self.num_selected} is below the {forced} blocks that are always "
                f"selected (initial_blocks = {self.initial_blocks}, local_blocks = "
                f"{self.local_blocks}); raise it or lower those"
            )

    def check_stride(self, *names: str) -> None:
        """Raises unless compression_stride divides these sizes."""
        for name in names:
            if getattr(self, name) % self.compression_stride:
                raise ValueError(
                    f"{name} must be a multiple of compression_stride = "
                    f"{self.compression_stride}, got {getattr(self, name)}"
                )

    @property
    def choice(self) -> dict[str, Any]:
        """What the functions of `select` take beside the scores."""
        return {
            "num_selected": self.num_selected,
            "initial": self.initial_blocks,
            "local": self.local_blocks,
        }


def native_sparse_attention(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B T K H"],
    value: Float[Tensor, "B T K Hv"],
    *,
    g_cmp: Float[Tensor, ...] | None = None,
    g_slc: Float[Tensor, ...] | None = None,
    g_swa: Float[Tensor, ...] | None = None,
    block_indices: Int[Tensor, "B T K C"] | None = None,
    block_counts: int | Int[Tensor, "B T K"] | None = None,
    block_size: int = 64,
    num_selected: int = 16,
    initial_blocks: int | None = None,
    local_blocks: int | None = None,
    window_size: int | None = None,
    score: Score = "nsa",
    compressed: bool | None = None,
    compression: Compression = "mean",
    compression_block: int = 32,
    compression_stride: int = 16,
    index_query: Float[Tensor, "B T K Hi"] | None = None,
    index_key: Float[Tensor, "B T J Hi"] | None = None,
    scale: float | None = None,
    segment_ids: Int[Tensor, ...] | None = None,
    cu_seqlens: Int[Tensor, " sequences_and_one"] | None = None,
    token_indices: Int[Tensor, ...] | None = None,
    implementation: str | None = None,
    options: Options | None = None,
) -> Float[Array, "B T N Hv"]:
    """Native Sparse Attention: compressed, selected and window attention, gated and added.

    A branch is computed if its gate is given. If no gate is given, the output is the sum of the
    selected branch, the window branch if `window_size` is given, and the compressed branch if it
    also selects (score="nsa" without `block_indices`) or `compressed` is True.

    Args:
      query: [B, T, N, H].
      key: [B, T, K, H]; K divides N, and the N / K query heads of a kv head share their blocks.
      value: [B, T, K, Hv].
      g_cmp: gate of the compressed branch, [B, T, N], or [B, T, N, Hv] for each element.
      g_slc: gate of the selected branch.
      g_swa: gate of the window branch.
      block_indices: int [B, T, K, C], blocks to select instead of computing them; -1, repeated,
        future and missing blocks are ignored.
      block_counts: how many of the block_indices count, the first ones; one number or [B, T, K].
      block_size: tokens of a selected block; blocks are counted from the start of a sequence.
      num_selected: blocks of each query, forced ones included; all blocks where there are fewer.
      initial_blocks: first blocks of the sequence that are always selected; default 1 for "nsa",
        else 0.
      local_blocks: last blocks that are always selected, the current one included; default 2 for
        "nsa", else 1.
      window_size: the window branch sees a query's own token and window_size - 1 before it; None:
        no such branch.
      score: what scores a block: "nsa", the compressed attention; "moba", the product of query and
        mean key; "msa", the largest score of an indexer. The last two have no compressed branch
        unless `compressed` is True.
      compressed: whether there is a compressed branch; needed to have one that does not select.
      compression: "mean"; a function [B, P, block, K, H] -> [B, P, K, H] that pools blocks of
        tokens, such as `nsa.weighted_pooling(…)` or `nsa.mlp_pooling(…)`; or a pair of them, for
        keys and for values.
      compression_block: tokens of a pooled block.
      compression_stride: tokens from one pooled block to the next; divides compression_block and
        block_size.
      index_query: [B, T, K, Hi], queries of the indexer, for score="msa".
      index_key: [B, T, K, Hi] or [B, T, 1, Hi].
      scale: of the logits of all branches; default 1/sqrt(H).
      segment_ids: int [B, T]; each run of equal ids is a sequence, negative ids are padding.
      cu_seqlens: int [sequences + 1], for B = 1: the same as ends of the sequences.
      token_indices: int [T] positions or [T, 2] (sequence, position), for B = 1: the same again.
      implementation: a backend by name, for all branches.
      options: settings of the backends.

    Returns:
      [B, T, N, Hv] in query's dtype.
    """
    q, k, v, scale = _check(query, key, value, scale)
    settings = Settings(
        score=score,
        block_size=block_size,
        num_selected=num_selected,
        initial_blocks=initial_blocks,
        local_blocks=local_blocks,
        window_size=window_size,
        compression_block=compression_block,
        compression_stride=compression_stride,
    )
    gates = check_gates(q, v, g_cmp=g_cmp, g_slc=g_slc, g_swa=g_swa)
    branches = branches_of(settings, gates, compressed, block_indices is not None)
    sequences = sequences_of(
        *q.shape[:2], segment_ids=segment_ids, cu_seqlens=cu_seqlens, token_indices=token_indices
    )
    how: dict[str, Any] = {"scale": scale, "implementation": implementation, "options": options}
    indices = _check_indices(block_indices, q, k)
    counts = _check_counts(block_counts, indices, q, k)
    found: dict[str, Array] = {}

    pooled = logsumexp = None
    selects = "g_slc" in branches and indices is None
    if "g_cmp" in branches or (selects and score == "nsa"):
        settings.check_stride("compression_block", *["block_size"] * selects)
        pooled = compress(
            *(k, v, sequences),
            block=compression_block,
            stride=compression_stride,
            compression=compression,
        )
        found["g_cmp"], logsumexp = attend_compressed(q, pooled, sequences, **how)
    if "g_slc" in branches:
        is_set = indices is None
        if indices is None:
            index = _check_indexer(settings, index_query, index_key, q, k)
            indices = select_blocks(settings, q, k, pooled, logsumexp, index, sequences, scale)
        found["g_slc"], _ = attend_selected(
            *(q, k, v, indices),
            block=block_size,
            sequences=sequences,
            counts=counts,
            is_set=is_set,
            **how,
        )
    if "g_swa" in branches:
        found["g_swa"] = _window(q, k, v, sequences, settings.window_size, **how)
    return combine({name: found[name] for name in branches}, gates, q.dtype)


def apply_native_sparse_attention(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B T K H"],
    value: Float[Tensor, "B T K Hv"],
    block_indices: Int[Tensor, "B T K C"],
    block_counts: int | Int[Tensor, "B T K"] | None = None,
    block_size: int = 64,
    *,
    scale: float | None = None,
    segment_ids: Int[Tensor, ...] | None = None,
    cu_seqlens: Int[Tensor, " sequences_and_one"] | None = None,
    token_indices: Int[Tensor, ...] | None = None,
    implementation: str | None = None,
    options: Options | None = None,
) -> Float[Array, "B T N Hv"]:
    """The selected branch alone: every query attends to the blocks that block_indices list for it.

    Arguments are as in `native_sparse_attention`.

    >>> import jax, jax.numpy as jnp, xsake
    >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 100, 2, 8))
    >>> first_block = jnp.zeros((1, 100, 2, 1), jnp.int32)
    >>> xsake.apply_native_sparse_attention(q, k, v, first_block, block_size=16).shape
    (1, 100, 2, 8)
    """
    if block_indices is None:
        raise TypeError("block_indices must be an array, got NoneType")
    return native_sparse_attention(
        query,
        key,
        value,
        block_indices=block_indices,
        block_counts=block_counts,
        block_size=block_size,
        scale=scale,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        token_indices=token_indices,
        implementation=implementation,
        options=options,
    )


def select_blocks(
    settings: Settings,
    q: Array,
    k: Array,
    pooled: Pooled | None,
    logsumexp: Array | None,
    index: tuple[Array, Array] | None,
    sequences: Sequences,
    scale: float,
) -> Int[Array, "B T K c"]:
    """The blocks of every query and kv head, as the settings' score says."""
    block, choice = settings.block_size, settings.choice
    if settings.score == "msa":
        assert index is not None
        return select.by_indexer(*index, sequences, block=block, **choice)
    if settings.score == "moba":
        means = compress(k, None, sequences, block=block, stride=block)
        return select.by_block_means(q, means, sequences, block=block, **choice)
    assert pooled is not None
    assert logsumexp is not None
    return select.by_compressed_attention(
        *(q, pooled, logsumexp, sequences),
        block=block,
        pooled_block=settings.compression_block,
        stride=settings.compression_stride,
        scale=scale,
        **choice,
    )


def _window(
    q: Array, k: Array, v: Array, sequences: Sequences, size: int | None, **how: Any
) -> Array:
    assert size is not None
    return dot_product_attention(
        q, k, v, local_window_size=(size - 1, 0), q_segment_ids=sequences.number, **how
    )


def combine(found: dict[str, Array], gates: dict[str, Array | None], dtype: Any) -> Array:
    """The sum of the branches, each times its gate, rounded once."""
    total = None
    for name, out in found.items():
        gate, out = gates[name], out.astype(accumulator(dtype))
        if gate is not None:
            wide = gate if gate.ndim == 4 else gate[..., None]
            out = out * wide.astype(out.dtype)
        total = out if total is None else total + out
    assert total is not None
    return total.astype(dtype)


# -------------------------------------------------------------------------------------------- check


def _check(query: Any, key: Any, value: Any, scale: Any) -> tuple[Array, Array, Array, float]:
    q, k, v, is_unbatched = check_qkv(query, key, value)
    if is_unbatched:
        raise ValueError(
            f"query must be [B, T, N, H], got shape {list(q.shape[1:])}; add a batch axis"
        )
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"query has {q.shape[1]} tokens but key has {k.shape[1]}; native sparse attention is "
            "self-attention (nsa.decode_step attends to a cache)"
        )
    return q, k, v, 1 / math.sqrt(q.shape[3]) if scale is None else number("scale", scale)


def check_gates(q: Array, v: Array, **gates: Any) -> dict[str, Array | None]:
    """The gates as arrays [B, T, N] or [B, T, N, Hv|1]; None stays None."""
    found: dict[str, Array | None] = {}
    for name, gate in gates.items():
        if gate is None:
            found[name] = None
            continue
        gate = jnp.asarray(gate)
        if not jnp.issubdtype(gate.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating, got {gate.dtype}")
        lead, Hv = q.shape[:3], v.shape[3]
        if gate.shape not in (lead, (*lead, 1), (*lead, Hv)):
            raise ValueError(
                f"{name} must be [B, T, N] = {list(lead)} or [B, T, N, Hv] = {[*lead, Hv]}, "
                f"got shape {list(gate.shape)}"
            )
        found[name] = gate
    return found


def branches_of(
    settings: Settings, gates: dict[str, Array | None], compressed: bool | None, has_indices: bool
) -> list[str]:
    """The branches to compute, by the names of their gates."""
    given = [name for name, gate in gates.items() if gate is not None]
    selects = settings.score == "nsa" and not has_indices
    if "g_cmp" in given and compressed is None and not selects:
        reason = "block_indices" if has_indices else f"score={settings.score!r}"
        raise ValueError(
            f"g_cmp gates a compressed branch that would not select the blocks ({reason} does); "
            "pass compressed=True for both, or leave one out"
        )
    if "g_cmp" in given and compressed is False:
        raise ValueError("g_cmp needs the compressed branch, but compressed is False")
    if "g_swa" in given and settings.window_size is None:
        raise ValueError("g_swa needs window_size, the number of tokens that a query sees")
    if given:
        if compressed and "g_cmp" not in given:
            raise ValueError(
                f"compressed=True adds a branch, and {given[0]} is given, so g_cmp is needed too"
            )
        return given
    wanted = {
        "g_cmp": selects if compressed is None else compressed,
        "g_slc": True,
        "g_swa": settings.window_size is not None,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def _check_indices(indices: Any, q: Array, k: Array) -> Array | None:
    if indices is None:
        return None
    indices = integers("block_indices", indices)
    lead = (*q.shape[:2], k.shape[2])
    if indices.ndim != 4 or indices.shape[:3] != lead:
        raise ValueError(
            f"block_indices must be [B, T, K, C] with [B, T, K] = {list(lead)}, "
            f"got shape {list(indices.shape)}"
        )
    return indices


def _check_counts(counts: Any, indices: Array | None, q: Array, k: Array) -> Any:
    if counts is None:
        return None
    if indices is None:
        raise ValueError(
            "block_counts says how many of the block_indices count, and there are none; "
            "num_selected is the number of blocks to select"
        )
    if isinstance(counts, (int, np.integer)) and not isinstance(counts, bool):
        return size_of("block_counts", counts, 0)
    counts = integers("block_counts", counts)
    lead = (*q.shape[:2], k.shape[2])
    if counts.shape not in ((), lead):
        raise ValueError(
            f"block_counts must be a number or [B, T, K] = {list(lead)}, "
            f"got shape {list(counts.shape)}"
        )
    return jnp.broadcast_to(counts, lead)


def _check_indexer(
    settings: Settings, index_query: Any, index_key: Any, q: Array, k: Array
) -> tuple[Array, Array] | None:
    given = {"index_query": index_query, "index_key": index_key}
    if settings.score != "msa":
        for name, x in given.items():
            if x is not None:
                raise ValueError(
                    f"{name} is for score='msa', but score is {settings.score!r}; leave it out"
                )
        return None
    for name, x in given.items():
        if x is None:
            raise ValueError(f"score='msa' needs {name}")
    found = jnp.asarray(index_query), jnp.asarray(index_key)
    (B, T), K = q.shape[:2], k.shape[2]
    if found[0].ndim != 4 or found[0].shape[:3] != (B, T, K):
        raise ValueError(
            f"index_query must be [B, T, K, Hi] with [B, T, K] = {[B, T, K]}, "
            f"got shape {list(found[0].shape)}"
        )
    Hi = found[0].shape[3]
    if found[1].shape not in ((B, T, K, Hi), (B, T, 1, Hi)):
        raise ValueError(
            f"index_key must be {[B, T, K, Hi]} or {[B, T, 1, Hi]}, "
            f"got shape {list(found[1].shape)}"
        )
    return jax.lax.stop_gradient(found)
