"""Attention cases: the one list of shapes and masks for conformance tests and benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import masks
from xsake.block_mask import BlockMask
from xsake.masks import Rule


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention problem; inputs are sampled from `seed`. Axes are named as in docs/design.md."""

    name: str
    B: int = 1
    T: int = 256
    S: int | None = None  # default T
    N: int = 4
    K: int | None = None  # default N
    H: int = 64
    Hv: int | None = None  # default H
    dtype: str = "float32"
    rule: Rule | None = None
    block: tuple[int, int] = (128, 128)
    head_densities: tuple[float, ...] | None = None  # random blocks per batch row and head
    exact_capacity: bool = False  # capacity = number of sampled blocks, as in a Plan's masks
    mask_heads: int | None = None  # K or 1: lists are shared by query heads; default N
    token_mask: tuple[int, int, int, int] | None = None  # its shape; 0 = the whole axis
    documents: int = 0  # number of segment ids, unsorted, with some negative ones
    lengths: bool = False
    permuted: bool = False  # positions are a permutation
    bias: tuple[int, int, int, int] | None = None  # 0 = the whole axis, 1 = shared
    sinks: int | None = None  # 0: [N]; M: [N, M]
    soft_cap: float | None = None
    scale: float | None = None
    seed: int = 0

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """(B, T, S, N, K, H, Hv)."""
        return (
            self.B,
            self.T,
            self.S or self.T,
            self.N,
            self.K or self.N,
            self.H,
            self.Hv or self.H,
        )

    def arrays(self, normal: Callable[..., Any] | None = None) -> dict[str, Any]:
        """Every array of the case as NumPy, in float32 (rounded to `dtype` by `arguments`).

        `normal(shape)` replaces NumPy's sampler of normal numbers.
        """
        rng = np.random.default_rng(self.seed)
        normal = normal or rng.standard_normal
        B, T, S, N, K, H, Hv = self.sizes
        full = (B, N, T, S)
        out: dict[str, Any] = {
            "query": normal((B, T, N, H)),
            "key": normal((B, S, K, H)),
            "value": normal((B, S, K, Hv)),
        }
        if self.bias is not None:
            out["bias"] = normal(tuple(d or f for d, f in zip(self.bias, full, strict=True)))
        if self.sinks is not None:
            out["sinks"] = normal((N, self.sinks) if self.sinks else (N,))
        out = {name: x.astype(np.float32) for name, x in out.items()}
        if self.token_mask is not None:
            size = [d or f for d, f in zip(self.token_mask, full, strict=True)]
            out["mask"] = rng.random(size) < 0.6
        if self.documents:
            out["q_segment_ids"] = rng.integers(-1, self.documents, (B, T)).astype(np.int32)
            out["kv_segment_ids"] = (
                out["q_segment_ids"]
                if S == T
                else rng.integers(-1, self.documents, (B, S)).astype(np.int32)
            )
        if self.lengths:
            out["query_seq_lengths"] = rng.integers(1, T + 1, B).astype(np.int32)
            out["key_value_seq_lengths"] = rng.integers(1, S + 1, B).astype(np.int32)
        if self.permuted:
            out["q_positions"] = np.stack([rng.permutation(T) for _ in range(B)]).astype(np.int32)
            out["kv_positions"] = np.stack([rng.permutation(S) for _ in range(B)]).astype(np.int32)
        return out

    def blocks(self) -> np.ndarray | None:
        """The random blocks, bool [B|1, heads, nq, nk]; the diagonal is kept."""
        if self.head_densities is None:
            return None
        rng = np.random.default_rng(self.seed + 1)
        nq, nk = (-(-d // b) for d, b in zip(self.sizes[1:3], self.block, strict=True))
        heads = self.mask_heads or self.N
        densities = np.resize(self.head_densities, (self.B, heads))[..., None, None]
        blocks = rng.random((self.B, heads, nq, nk)) < densities
        diagonal = np.arange(min(nq, nk))
        blocks[..., diagonal, diagonal] = True
        return blocks

    def arguments(self, on_device: bool = False) -> dict[str, Any]:
        """Keyword arguments for `dot_product_attention`.

        With `on_device`, the device samples the normal numbers, which then differ from the host's:
        at a benchmark's size the host takes seconds to sample and copy them.
        """
        inputs = {"query", "key", "value", "bias", "sinks"}
        keys = iter(jax.random.split(jax.random.key(self.seed), len(inputs)))

        def normal(shape: tuple[int, ...]) -> Array:
            return jax.random.normal(next(keys), shape, self.dtype)

        out: dict[str, Any] = {
            name: jnp.asarray(x, dtype=self.dtype if name in inputs else None)
            for name, x in self.arrays(normal if on_device else None).items()
        }
        blocks = self.blocks()
        if blocks is not None:
            capacity = int(blocks.sum((2, 3)).max()) if self.exact_capacity else None
            shape = (self.T, self.S or self.T)
            out["mask"] = BlockMask.from_dense(
                blocks, self.rule, shape=shape, block=self.block, capacity=capacity
            )
        elif self.rule is not None and "mask" not in out:
            out["mask"] = self.rule
        out |= {"scale": self.scale, "logits_soft_cap": self.soft_cap}
        return out


@dataclasses.dataclass(frozen=True, eq=False)
class RunCase(Case):
    """A causal case where every query sees one run of keys, as libraries have options for it."""

    window: int | None = None  # keys that a query sees at most, itself included
    mean_document: int | None = None  # tokens; documents are packed, and their lengths random

    def document_starts(self) -> np.ndarray:
        """Whether a token is the first one of a document, bool [B, T]."""
        starts = np.zeros((self.B, self.T), bool)
        if self.mean_document is not None:
            rng = np.random.default_rng(self.seed + 2)
            starts = rng.random((self.B, self.T)) < 1 / self.mean_document
        starts[:, 0] = True
        return starts

    def ids(self) -> np.ndarray:
        """The document of every token, int32 [B, T]; they rise from 0."""
        return (np.cumsum(self.document_starts(), axis=1) - 1).astype(np.int32)

    def arguments(self, on_device: bool = False) -> dict[str, Any]:
        """As of any case; the mask is the rule, with the documents in it."""
        rule = masks.causal()
        if self.window is not None:
            rule = rule & masks.sliding_window(self.window - 1, None)
        if self.mean_document is not None:
            rule = rule & masks.documents(jnp.asarray(self.ids()))
        return super().arguments(on_device) | {"mask": rule}

    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """The first key that each query sees, and the one after the last: int32 [B, T] each."""
        q = np.broadcast_to(np.arange(self.T, dtype=np.int32), (self.B, self.T))
        first = np.maximum.accumulate(np.where(self.document_starts(), q, 0), axis=1)
        if self.window is not None:
            first = np.maximum(first, q - (self.window - 1))
        return first, q + 1


_causal = masks.causal()

CONFORMANCE = (
    Case("dense"),
    Case("causal", rule=_causal),
    Case("odd lengths", T=250, rule=_causal),
    Case("one query", T=1, S=200),
    Case("one token", T=1),
    Case("more keys than queries", T=130, S=300, rule=_causal),
    Case("more queries than keys", T=300, S=130, rule=_causal),
    Case("window", T=300, rule=masks.sliding_window(37, 5)),
    Case("window, causal", T=300, rule=masks.sliding_window(70, None) & _causal),
    Case("chunked, causal", T=300, rule=masks.chunked(48) & _causal),
    Case(
        "first keys and window", T=300, rule=_causal & (masks.first(4) | masks.sliding_window(50))
    ),
    Case("prefix", T=200, rule=masks.prefix(70) | _causal),
    Case("strided", T=200, rule=masks.strided(7) & _causal),
    Case("dilated", T=200, rule=masks.dilated(9, 3)),
    Case("longformer", T=300, rule=masks.longformer(20, 6)),
    Case("bigbird", T=300, rule=masks.bigbird(20, 6, 0.2, seed=3, block=32)),
    Case("not", T=200, rule=~masks.sliding_window(11)),
    Case("grouped heads", N=6, K=2, rule=_causal),
    Case("one kv head", N=5, K=1, H=24, Hv=40, rule=_causal),
    Case("two batch rows, odd sizes", B=2, T=77, S=91, N=3, H=5, Hv=7),
    Case("heads of 256", T=300, N=2, K=1, H=256, rule=_causal),
    Case("values narrower than keys", T=300, N=2, H=192, Hv=128, rule=_causal),
    Case("values half as wide", T=300, N=2, H=128, Hv=64, rule=_causal),
    Case("values twice as wide", T=300, N=2, H=64, Hv=128, rule=_causal),
    Case("head blocks", B=2, N=4, head_densities=(0.1, 0.5, 0.9), block=(32, 32), rule=_causal),
    Case("head blocks, no rule", T=200, S=330, head_densities=(0.3, 0.7), block=(64, 128)),
    Case(
        "kv-head blocks",
        N=8,
        K=2,
        mask_heads=2,
        head_densities=(0.4,),
        block=(64, 64),
        rule=_causal,
    ),
    Case("row blocks of 64", T=300, N=2, head_densities=(0.5,), block=(64, 128), rule=_causal),
    Case("kv blocks of 64", T=300, N=2, head_densities=(0.5,), block=(128, 64), rule=_causal),
    Case(
        "kv blocks of 64, heads of 256",
        T=300,
        N=2,
        H=256,
        head_densities=(0.5,),
        block=(128, 64),
        rule=_causal,
    ),
    Case(
        "more row blocks than a GPU takes at once",
        B=2,
        T=700,
        N=8,
        K=2,
        mask_heads=2,
        head_densities=(0.1, 0.6),
        block=(64, 64),
        rule=_causal,
    ),
    Case("shared blocks", B=2, mask_heads=1, head_densities=(0.4,), block=(16, 64)),
    Case("token mask", T=100, S=140, token_mask=(0, 0, 0, 0)),
    Case("token mask, shared", B=2, T=100, token_mask=(1, 0, 1, 0), rule=None),
    Case("documents", B=2, T=190, documents=4, rule=_causal),
    Case("documents, T ≠ S", B=2, T=90, S=150, documents=3),
    Case("lengths", B=3, T=140, lengths=True, rule=_causal),
    Case("permuted positions", B=2, T=160, permuted=True, rule=masks.sliding_window(40, 3)),
    Case("bias", B=2, T=100, S=140, bias=(0, 0, 0, 0), rule=masks.sliding_window(30)),
    Case("bias per head", B=2, T=100, bias=(1, 0, 1, 0), N=4, K=2, rule=_causal),
    Case("bias per query", T=100, bias=(1, 1, 0, 1), rule=_causal),
    Case("soft cap", soft_cap=2.0, scale=0.7, rule=_causal),
    Case("soft cap and bias", T=140, soft_cap=3.0, bias=(0, 1, 0, 0), rule=_causal),
    Case("sinks", T=140, sinks=0, rule=_causal),
    Case("several sinks, documents", B=2, T=140, sinks=3, documents=5, rule=_causal),
    Case("bfloat16", dtype="bfloat16", N=4, K=2, rule=_causal),
    Case("bfloat16 head blocks", dtype="bfloat16", head_densities=(0.3, 0.8), block=(64, 64)),
    Case("float16", dtype="float16", rule=masks.sliding_window(60, 0), sinks=0),
)


def cpu_case(T: int, density: float | None) -> Case:
    """Eight causal heads of size 64 with mean density `density`; None is dense.

    One head has density 0.9 and seven share the rest; below 0.2, two heads have 0.25 and 0.11. The
    diagonal is always kept, so off-diagonal blocks are sampled with a lower probability.
    """
    if density is None:
        return Case(f"cpu T={T} dense", T=T, N=8, rule=_causal)
    n = T // 128
    heads = (0.9, *[(8 * density - 0.9) / 7] * 7)
    if density < 0.2:
        heads = (0.25, 0.11, *[(8 * density - 0.36) / 6] * 6)
    off_diagonal = tuple(max(0.0, (d * (n + 1) - 2) / (n - 1)) for d in heads)
    return Case(
        f"cpu T={T} density={density}", T=T, N=8, rule=_causal, head_densities=off_diagonal, seed=T
    )


def hopper_case(B: int, T: int, H: int, density: float, heads: tuple[float, ...] = ()) -> Case:
    """Sixteen bfloat16 heads, each with its own random 128 × 128 blocks; the diagonal is kept.

    `heads` are densities per head, cycled over the heads; `density` is then their mean.
    """
    n = T // 128
    off_diagonal = tuple((d * n - 1) / (n - 1) for d in heads or (density,))
    name = f"{B}·16·{T}·{H} density={density}" + (f" heads {heads}" if heads else "")
    return Case(
        name,
        B,
        T,
        N=16,
        H=H,
        dtype="bfloat16",
        head_densities=off_diagonal,
        exact_capacity=True,
        seed=T,
    )
