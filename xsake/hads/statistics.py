"""Block statistics of dense attention on one sequence, a chunk of row blocks at a time.

    queries of a chunk against all k ─ p ─┬─ mass [N, n, n], mean over the queries of a row block
                                          ├─ token and block entropy [N]
                                          ├─ output sensitivity [N, n, n]
                                          └─ cost curves [N, n, n] by count, for each selector
                       gradient of the loss ┘

A cost curve is measured, not modelled. cost["kl"]["pooled"][h, i, c - 1] is the mean over queries
of -ln(mass kept) if row block i keeps the c blocks that the selector `pooled` ranks highest.
cost["output"] is the head's mean ‖(sparse - dense output) W‖² ÷ the layer's mean ‖dense output W‖².
cost["loss"] is the mean of (g · (sparse - dense output))², where g is the gradient of the summed
loss with respect to the head's output at that query: what dropping does to the loss, to first
order, in nats².
Soft caps, windows and sinks (`chunks.Softmax`) are those of the layer. The mass of sinks is kept
whatever is dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from xsake import block_scores, selection
from xsake.hads import chunks, observed, row_blocks, sensitivity_by_kernel
from xsake.hads.chunks import PLAIN, Chunk, Chunks, Softmax

DENSITIES = np.arange(1, 21) / 20  # of the retained-mass curves
SELECTORS = ("static", *block_scores.ESTIMATES)  # ways to rank the blocks of a row block
CURVES = (*SELECTORS, "oracle")  # rankings that cost curves can be measured for
PASSES = 4  # of `block_sensitivity`: more of them skip more keys, and take longer to compile
POLICIES_WITHOUT_GRADIENT = ("kl", "output")
POLICIES_WITH_COST = (*POLICIES_WITHOUT_GRADIENT, "loss")  # "loss" only where gradients are given

AnyArray = Array | np.ndarray
Curves = Mapping[str, Mapping[str, Float[AnyArray, "*layers N n n"]]]  # {policy: {selector: array}}


class Statistics(NamedTuple):
    """One document's attention in one layer (or in all, with a leading axis of layers)."""

    mass: Float[AnyArray, "*layers N n n"]  # share of attention that row block i gives to block j
    sensitivity: Float[AnyArray, "*layers N n n"]  # error by dropping block j, see `measure`
    entropy: Float[AnyArray, "*layers N"]  # over tokens, ÷ ln(visible keys), mean over queries
    block_entropy: Float[AnyArray, "*layers N"]  # over blocks, ÷ ln(visible blocks)
    retained: Float[AnyArray, "*layers N 20"]  # mass kept by the best blocks at density 0.05 … 1
    cost: Curves
    norm: Float[AnyArray, "*layers"]  # mean ‖attention output W‖² of the layer
    # change of the loss by dropping block j, see `measure`; None without gradients
    loss_sensitivity: Float[AnyArray, "*layers N n n"] | None = None


class _Parts(NamedTuple):
    """Attention mass and output contribution of each kv block for each query of a chunk.

    v is multiplied by `root`, see `factors`.
    """

    mass: Float[Array, "N Q n"]
    output: Float[Array, "N Q n Hv"]
    total: Float[Array, "N Q Hv"]  # output summed over blocks
    slope: Float[Array, "N Q n"] | None = None  # g · (contribution of the block, without root)


class _ChunkStatistics(NamedTuple):
    """`Statistics` of one chunk, before concatenation: per row block (R) or per query (Q)."""

    mass: Float[Array, "*chunks N R n"]
    sensitivity: Float[Array, "*chunks N R n"]  # not yet divided by the layer's norm
    entropy: Float[Array, "*chunks N Q"]
    block_entropy: Float[Array, "*chunks N Q"]
    # the "output" costs are not yet divided by the layer's norm
    cost: dict[str, dict[str, Float[Array, "*chunks N R n"]]]
    norm: Float[Array, "*chunks Q"]
    loss_sensitivity: Float[Array, "*chunks N R n"] | None


@functools.partial(jax.jit, static_argnames=("block", "band", "curves", "outputs"))
def measure(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K Hv"],
    kernel: Float[Array, "N Hv width"],
    *,
    block: int = 128,
    band: int = 0,
    curves: tuple[str, ...] = ("oracle",),
    before: tuple[Float[Array, "N n n"], ...] | None = None,
    softmax: Softmax = PLAIN,
    outputs: bool = True,
    gradient: Float[Array, "T N Hv"] | None = None,
) -> Statistics:
    """Statistics of one sequence in one layer; causal, any length, memory linear in it.

    Dropping block j and renormalising changes a query's output by (m_j out - u_j) / (1 - m_j), with
    u_j = Σ_{k in j} p_k v_k. sensitivity[i, j] is the mean over row block i of ‖(u_j - m_j out) W‖²
    ÷ the layer's mean ‖out W‖². loss_sensitivity[i, j] is the mean of (g · (u_j - m_j out))².

    Args:
      q: as it enters attention.
      k: likewise.
      v: likewise.
      kernel: the output projection W.
      block: tokens per block.
      band: forced blocks before the diagonal, which all rankings of `cost` put first.
      curves: selectors to measure `cost` for. "oracle" ranks by this input's own mass (for
        "output" and "loss" by its own sensitivities).
      before: mean (mass, sensitivity) of other documents, by which "static" ranks, and with
        `gradient` their mean loss_sensitivity.
      softmax: the layer's soft cap, window and sinks.
      outputs: False leaves out what depends on values: `sensitivity` and `norm` are NaN, and there
        are no curves. On a Hopper GPU the rest is a by-product of attention, see `observed`.
      gradient: of the summed loss, with respect to the attention output; without it nothing of
        the policy "loss" is measured.
    """
    if not outputs:
        return _without_outputs(q, k, block, softmax)
    T = q.shape[0]
    cut = chunks.cut(q, k, block, softmax=softmax)
    root, unit = factors(kernel)
    values = _projected_values(v, root, block)
    policies = POLICIES_WITHOUT_GRADIENT if gradient is None else POLICIES_WITH_COST
    if before is not None and len(before) != len(policies):
        wanted = "mass, sensitivity" + (", loss_sensitivity" if gradient is not None else "")
        raise ValueError(
            f"before must have {len(policies)} arrays, ({wanted}), got {len(before)}; "
            "loss_sensitivity belongs to it if `gradient` is given, and only then"
        )
    rankings = _rankings(cut, q, k, band, curves, before, policies)
    slopes = None if gradient is None else _Slopes.of(cut, v, gradient)

    def measure_chunk(number: Array) -> _ChunkStatistics:
        chunk = cut.attend(number)
        parts = _parts(chunk, values, slopes)
        mass, sensitivity = chunk.mean(parts.mass), _sensitivity(chunk, parts)
        ranks = {
            policy: {name: cut.part(x, chunk, 1) for name, x in rankings[policy].items()}
            for policy in policies
        }
        ranks["kl"]["oracle"] = selection.ranks(mass, band, chunk.first)
        ranks["output"]["oracle"] = selection.ranks(sensitivity, band, chunk.first)
        loss_sensitivity = None
        if parts.slope is not None:
            loss_sensitivity = _loss_sensitivity(chunk, parts.mass, parts.slope)
            ranks["loss"]["oracle"] = selection.ranks(loss_sensitivity, band, chunk.first)
        keys, blocks = (softmax.outcomes(chunk.positions, size) for size in (1, block))
        return _ChunkStatistics(
            mass=mass,
            sensitivity=sensitivity,
            entropy=chunk.entropy(chunk.p.reshape(*chunk.p.shape[:2], -1)) / jnp.log(keys),
            block_entropy=chunk.entropy(parts.mass) / jnp.log(blocks),
            cost={
                policy: {name: COSTS[policy](chunk, parts, ranks[policy][name]) for name in curves}
                for policy in policies
            },
            norm=(jnp.einsum("nrh,nhw->rw", parts.total, unit) ** 2).sum(-1),
            loss_sensitivity=loss_sensitivity,
        )

    found = _joined(lax.map(measure_chunk, jnp.arange(cut.chunks)), T, cut.n, block)
    return found._replace(retained=_with_sinks(found.retained, found.mass, softmax))


def _without_outputs(
    q: Float[Array, "T N H"], k: Float[Array, "T K H"], block: int, softmax: Softmax
) -> Statistics:
    heads = observed.observe(q, k, block=block, softmax=softmax)
    return Statistics(
        mass=heads.mass,
        sensitivity=jnp.full_like(heads.mass, jnp.nan),
        entropy=heads.entropy,
        block_entropy=heads.block_entropy,
        retained=_with_sinks(retained_mass(heads.mass), heads.mass, softmax),
        cost={policy: {} for policy in POLICIES_WITHOUT_GRADIENT},
        norm=jnp.full((), jnp.nan),
    )


def _with_sinks(
    retained: Float[AnyArray, "N D"], mass: Float[AnyArray, "N n n"], softmax: Softmax
) -> Float[AnyArray, "N D"]:
    """The mass that is kept, with that of the sinks, which are always kept."""
    return retained if softmax.sinks is None else retained + (1 - mass.sum(-1)).mean(-1)[:, None]


def _projected_values(
    v: Float[Array, "T K Hv"], root: Float[Array, "N Hv Hv"], block: int
) -> Float[Array, "N n block Hv"]:
    """v · root for each query head. It has the norm of v · W, but only Hv dimensions."""
    K, Hv = v.shape[1:]
    N = root.shape[0]
    v = chunks.pad_keys(v, block).astype(jnp.float32)
    projected = jnp.einsum("skh,kghw->kgsw", v, root.reshape(K, N // K, Hv, Hv))
    return projected.reshape(N, -1, block, Hv)


def _rankings(
    cut: Chunks,
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    band: int,
    curves: tuple[str, ...],
    before: tuple[Array, ...] | None,
    policies: tuple[str, ...],
) -> dict[str, dict[str, Int[Array, "N row_blocks n"]]]:
    """{policy: {selector: ranks}} of the selectors that are known before attention is computed."""
    # q and k without padding, which would enter the means of a short last block
    scores = {
        name: block_scores.estimate(name, q, k, cut.block)
        for name in curves
        if name in block_scores.ESTIMATES
    }

    def ranked(x: Array) -> Array:
        return cut.pad(selection.ranks(x, band), 1)

    of_input = {name: ranked(x) for name, x in scores.items()}
    rankings = {policy: dict(of_input) for policy in policies}
    if before is not None:
        for policy, x in zip(policies, before, strict=True):
            rankings[policy]["static"] = ranked(x)
    return rankings


class _Slopes(NamedTuple):
    """Values and the gradient of the loss, padded to whole blocks and whole chunks."""

    v: Float[Array, "keys K Hv"]
    gradient: Float[Array, "queries K G Hv"]

    @staticmethod
    def of(cut: Chunks, v: Float[Array, "T K Hv"], gradient: Float[Array, "T N Hv"]) -> _Slopes:
        (T, K, Hv), N = v.shape, gradient.shape[1]
        padded = jnp.pad(gradient.astype(jnp.float32), ((0, cut.q.shape[0] - T), (0, 0), (0, 0)))
        values = chunks.pad_keys(v, cut.block).astype(jnp.float32)
        return _Slopes(values, padded.reshape(-1, K, N // K, Hv))

    def by_block(self, chunk: Chunk) -> Float[Array, "N Q n"]:
        """g · Σ_{k in j} p_k v_k for the queries of a chunk and every block j."""
        Q, block = len(chunk.positions), chunk.p.shape[-1]
        g = lax.dynamic_slice_in_dim(self.gradient, chunk.first * block, Q)
        products = jnp.einsum("qkgh,skh->kgqs", g, self.v).reshape(chunk.p.shape)
        return (chunk.p * products).sum(-1)


def _parts(
    chunk: Chunk, values: Float[Array, "N n block Hv"], slopes: _Slopes | None = None
) -> _Parts:
    output = jnp.einsum("nrjs,njsh->nrjh", chunk.p, values)
    slope = None if slopes is None else slopes.by_block(chunk)
    return _Parts(chunk.p.sum(-1), output, output.sum(2), slope)


def _sensitivity(chunk: Chunk, parts: _Parts) -> Float[Array, "N R n"]:
    change = parts.output - parts.mass[..., None] * parts.total[:, :, None]
    return chunk.mean((change**2).sum(-1))


def _loss_sensitivity(
    chunk: Chunk, mass: Float[Array, "N Q n"], slope: Float[Array, "N Q n"]
) -> Float[Array, "N R n"]:
    return chunk.mean((slope - mass * slope.sum(-1, keepdims=True)) ** 2)


def _kept(
    chunk: Chunk, parts: _Parts, ranks: Int[Array, "N R n"]
) -> tuple[Float[Array, "N R n n"], Float[Array, "N Q n"]]:
    """Which blocks the c highest ranked are, [N, R, c - 1, j], and the mass that each query keeps.

    The einsum is in full float32, not TF32: it sums shares that are close to 1.
    """
    N, R, n = ranks.shape
    chosen = (ranks[:, :, None, :] <= jnp.arange(n)[:, None]).astype(jnp.float32)
    kept = jnp.einsum(
        "nrqj,nrcj->nrqc", parts.mass.reshape(N, R, -1, n), chosen, precision="highest"
    )
    kept = kept.reshape(N, -1, n)
    kept = kept if chunk.sinks is None else kept + chunk.sinks[..., None]
    return chosen, jnp.maximum(kept, 1e-30)


def _kl_cost(chunk: Chunk, parts: _Parts, ranks: Int[Array, "N R n"]) -> Float[Array, "N R n"]:
    """Mean -ln(mass kept) of each row block, for every count of blocks kept."""
    _, kept = _kept(chunk, parts, ranks)
    return chunk.mean(jnp.maximum(-jnp.log(kept), 0))


def _output_cost(chunk: Chunk, parts: _Parts, ranks: Int[Array, "N R n"]) -> Float[Array, "N R n"]:
    """Mean ‖(sparse - dense output) W‖² of each row block, for every count of blocks kept."""
    N, R, n = ranks.shape
    chosen, kept = _kept(chunk, parts, ranks)
    Hv = parts.output.shape[-1]
    sums = jnp.einsum("nrqjh,nrcj->nrqch", parts.output.reshape(N, R, -1, n, Hv), chosen)
    error = sums.reshape(N, -1, n, Hv) / kept[..., None] - parts.total[:, :, None]
    return chunk.mean((error**2).sum(-1))


def _loss_cost(chunk: Chunk, parts: _Parts, ranks: Int[Array, "N R n"]) -> Float[Array, "N R n"]:
    """Mean (g · (sparse - dense output))² of each row block, for every count of blocks kept."""
    assert parts.slope is not None
    N, R, n = ranks.shape
    chosen, kept = _kept(chunk, parts, ranks)
    slope = parts.slope.reshape(N, R, -1, n)
    sums = jnp.einsum("nrqj,nrcj->nrqc", slope, chosen, precision="highest").reshape(N, -1, n)
    return chunk.mean((sums / kept - parts.slope.sum(-1, keepdims=True)) ** 2)


COSTS = {"kl": _kl_cost, "output": _output_cost, "loss": _loss_cost}


def _joined(found: _ChunkStatistics, T: int, n: int, block: int) -> Statistics:
    """The chunks' statistics [chunks, N, R or Q, …] in order, without padding and normalised."""

    def by_head(x: Array, end: int) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :end]

    def mean_entropy(x: Array, first: int) -> Array:
        """Without the first query (block), which sees one key (block): 0 ÷ ln 1."""
        N = x.shape[1]
        return by_head(x, T)[:, first:].mean(-1) if first < T else jnp.zeros(N)

    norm = found.norm.reshape(-1)[:T].mean()
    mass = by_head(found.mass, n)
    cost = jax.tree.map(lambda x: by_head(x, n), found.cost)
    cost["output"] = {name: x / jnp.maximum(norm, 1e-30) for name, x in cost["output"].items()}
    return Statistics(
        mass=mass,
        sensitivity=by_head(found.sensitivity, n) / jnp.maximum(norm, 1e-30),
        entropy=mean_entropy(found.entropy, 1),
        block_entropy=mean_entropy(found.block_entropy, block),
        retained=retained_mass(mass),
        cost=cost,
        norm=norm,
        loss_sensitivity=None
        if found.loss_sensitivity is None
        else by_head(found.loss_sensitivity, n),
    )


def block_mass(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    block: int,
    queries_at_once: int = chunks.QUERIES_AT_ONCE,
    softmax: Softmax = PLAIN,
) -> Float[Array, "N n n"]:
    """The mass of `measure` alone: mean attention of every row block to every kv block."""
    if observed.has_by_products(q, k, block, softmax):
        return observed.observe(q, k, block=block, softmax=softmax).mass
    cut = chunks.cut(q, k, block, queries_at_once, softmax)

    def mass(number: Array) -> Array:
        chunk = cut.attend(number)
        return chunk.mean(chunk.p.sum(-1))

    found = lax.map(mass, jnp.arange(cut.chunks))
    return jnp.moveaxis(found, 0, 1).reshape(q.shape[1], -1, cut.n)[:, : cut.n]


@functools.partial(jax.jit, static_argnames=("block", "queries_at_once"))
def block_sensitivity(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K Hv"],
    kernel: Float[Array, "N Hv width"],
    block: int,
    softmax: Softmax = PLAIN,
    queries_at_once: int = 2 * chunks.QUERIES_AT_ONCE,
) -> Float[Array, "N n n"]:
    """The sensitivity of `measure` times the layer's norm: it ranks blocks alike and costs less.

    The chunks are done in PASSES groups, and a group attends only to the keys before its end. A
    Hopper GPU has a kernel, which rounds p and the values to bfloat16.
    """
    values = _projected_values(v, factors(kernel)[0], block)
    if sensitivity_by_kernel.why_not(q, k, v, block, softmax) is None:
        given = values.reshape(q.shape[1], -1, v.shape[-1])[:, : len(q)]
        return sensitivity_by_kernel.block_sensitivity(q, k, given, block, softmax)
    cut = chunks.cut(q, k, block, queries_at_once, softmax)
    found = []
    for numbers in np.array_split(np.arange(cut.chunks), min(PASSES, cut.chunks)):
        n = min(cut.n, (int(numbers[-1]) + 1) * cut.per_chunk)
        part, own = cut._replace(k=cut.k[: n * block], n=n), values[:, :n]

        def sensitivity(number: Array, part: Chunks = part, own: Array = own) -> Array:
            chunk = part.attend(number)
            return _sensitivity(chunk, _parts(chunk, own))

        rows = jnp.moveaxis(lax.map(sensitivity, jnp.asarray(numbers)), 0, 1)
        rows = rows.reshape(q.shape[1], -1, n)
        found.append(jnp.pad(rows, ((0, 0), (0, 0), (0, cut.n - n))))
    return jnp.concatenate(found, axis=1)[:, : cut.n]


def factors(
    kernel: Float[Array, "N Hv width"],
) -> tuple[Float[Array, "N Hv Hv"], Float[Array, "N Hv width"]]:
    """W = root · unit for each head, with ‖x W‖ = ‖x root‖ up to one part in about 10⁴.

    root is the Cholesky factor of W Wᵀ plus a small multiple of the identity, for W that is
    rank-deficient. An eigendecomposition would be exact, but is slow on a GPU.
    """
    kernel = kernel.astype(jnp.float32)
    products = jnp.einsum("nhw,ngw->nhg", kernel, kernel, precision="highest")
    ridge = 1e-6 * jnp.trace(products, axis1=1, axis2=2) + 1e-30
    identity = jnp.eye(kernel.shape[1])[None]
    root = jnp.linalg.cholesky(products + ridge[:, None, None] * identity)
    return root, jax.scipy.linalg.solve_triangular(root, kernel, lower=True)


def retained_mass(
    mass: Float[Array, "*batch n n"], densities: Float[np.ndarray, " D"] = DENSITIES
) -> Float[Array, "*batch D"]:
    """Mean mass that row blocks keep in their best ceil(d · (i + 1)) blocks, for each density d."""
    n = mass.shape[-1]
    best = jnp.cumsum(-jnp.sort(-mass, axis=-1), axis=-1)
    counts = np.ceil(densities * row_blocks.ceilings(n)[:, None] - 1e-9).astype(np.int32)
    indices = jnp.broadcast_to(counts - 1, (*mass.shape[:-1], len(densities)))
    return jnp.take_along_axis(best, indices, -1).mean(-2)
