"""What dense attention does with its blocks, measured in one streamed pass over calibration text.

    for every layer and document:
      rows of q against all k ─ softmax p ─┬─ block mass [N, n, n], mean over the row's queries
      (a few row blocks at a time,         ├─ token and block entropy [N]
       so memory is linear in T)           ├─ output sensitivity [N, n, n]
                                           └─ cost curves [N, n, n] by count, for each selector

A cost curve is measured, not modelled: cost["kl"]["pooled"][l, h, i, c - 1] is the mean over
documents and queries of -ln(mass kept) if row i keeps its c best blocks in the order of the
selector `pooled`; cost["output"] is the mean ‖(sparse - dense output) W‖² of the head, relative to
that of the layer. The order of `static` is that of the documents before this one, so that no
document is measured with an order it took part in.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake.hads import budget, rows, select

SCHEMA = 1
ROWS_AT_ONCE = 256  # queries whose p is in memory: 256 · S floats for each head
DENSITIES = np.arange(1, 21) / 20  # of the retained-mass curves
CURVES = (*select.SELECTORS, "oracle")  # orders that cost can be measured for


class Statistics(NamedTuple):
    """One document's attention in one layer; n blocks of queries and of keys."""

    mass: Any  # [N, n, n]: share of attention that row block i gives to block j
    sensitivity: Any  # [N, n, n]: ‖(dense output - output without block j) W‖², see `measure`
    entropy: Any  # [N]: of tokens, ÷ ln(keys seen), mean over queries
    block_entropy: Any  # [N]: of blocks, ÷ ln(blocks seen)
    retained: Any  # [N, 20]: mass kept by each row's best blocks at density 0.05, 0.10 … 1
    cost: Any  # {"kl" | "output": {selector: [N, n, n]}}
    norm: Any  # []: mean ‖attention output W‖² of the layer


@functools.partial(jax.jit, static_argnames=("block", "band", "curves"))
def measure(
    q: Any,
    k: Any,
    v: Any,
    kernel: Any,
    *,
    block: int = 128,
    band: int = 0,
    curves: tuple[str, ...] = ("oracle",),
    before: Any = None,
) -> Statistics:
    """Statistics of one sequence in one layer; causal, any length, streamed over row blocks.

    Dropping block j and renormalising changes a query's output by (m_j out - u_j) / (1 - m_j), with
    u_j = Σ_{k in j} p_k v_k; sensitivity[i, j] is the mean over the row of ‖(u_j - m_j out) W‖².

    Args:
      q: [T, N, H], as they enter attention.
      k: [T, K, H].
      v: [T, K, Hv].
      kernel: [N, Hv, width], the output projection.
      block: tokens per block.
      band: forced blocks before the diagonal, in the orders of `cost`.
      curves: selectors to measure `cost` for; "oracle" is the order of this input's own mass (of
        its own sensitivity for "output").
      before: (mass, sensitivity), each [N, n, n]: the order of "static".
    """
    T, N, H = q.shape
    K, Hv = v.shape[1:]
    n = rows.count_blocks(T, block)
    S = n * block
    at_once = max(1, ROWS_AT_ONCE // block)
    chunks = -(-n // at_once)
    q = jnp.pad(q, ((0, chunks * at_once * block - T), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, S - T), (0, 0), (0, 0))) for x in (k, v))
    # values as the residual stream feels them: ‖x W‖ = ‖x root‖, in Hv numbers instead of width
    root, unit = factors(kernel)
    felt = jnp.einsum("skh,kghw->kgsw", v.astype(jnp.float32), root.reshape(K, N // K, Hv, Hv))
    felt = felt.reshape(N, n, block, Hv)
    # from the tokens that are there: padding would enter the means of a short last block
    orders = {
        name: select.estimate(name, q[:T], k[:T], block)
        for name in curves
        if name in select.ESTIMATES
    }
    if before is not None:
        orders |= {"static": before[0], "static output": before[1]}
    place = {name: select.ranks(scores, band) for name, scores in orders.items()}
    place = {name: _pad_rows(x, chunks * at_once) for name, x in place.items()}

    def rows_of(chunk: Array) -> Any:
        begins = chunk * at_once
        taken = lax.dynamic_slice_in_dim(q, begins * block, at_once * block)
        p, _, position = softmax_rows(taken, k, begins * block, T)
        real = (position < T).reshape(at_once, block)
        count = jnp.maximum(real.sum(-1), 1)

        def mean(x: Array) -> Array:
            """Over the queries of each row block: [N, R · block, ...] -> [N, R, ...]."""
            x = x.reshape(N, at_once, block, *x.shape[2:])
            weight = real.reshape(1, at_once, block, *[1] * (x.ndim - 3))
            return (x * weight).sum(2) / count.reshape(1, at_once, *[1] * (x.ndim - 3))

        blocks = p.reshape(N, -1, n, block)
        mass = blocks.sum(-1)  # [N, R · block, n]
        parts = jnp.einsum("nrjs,njsh->nrjh", blocks, felt)
        out = parts.sum(2)
        sensitivity = mean(((parts - mass[..., None] * out[:, :, None]) ** 2).sum(-1))
        mean_mass = mean(mass)
        keys = jnp.maximum(position + 1, 2).astype(jnp.float32)
        seen = jnp.maximum(position // block + 1, 2).astype(jnp.float32)
        found: dict[str, Any] = {
            "mass": mean_mass,
            "sensitivity": sensitivity,
            "entropy": entropy_of(p) / jnp.log(keys),
            "block_entropy": entropy_of(mass) / jnp.log(seen),
            "cost": {"kl": {}, "output": {}},
        }
        own = {
            "kl": select.ranks(mean_mass, band, begins),
            "output": select.ranks(sensitivity, band, begins),
        }
        for name in curves:
            for kind in ("kl", "output"):
                if name == "oracle":
                    order = own[kind]
                else:
                    named = "static output" if (name, kind) == ("static", "output") else name
                    order = lax.dynamic_slice_in_dim(place[named], begins, at_once, 1)
                taken_by = order[:, :, None, :] <= jnp.arange(n)[:, None]  # [N, R, count, block j]
                taken_by = taken_by.astype(jnp.float32)
                # a sum of shares must not be rounded to what tensor cores take
                kept = jnp.einsum(
                    "nrqj,nrcj->nrqc",
                    mass.reshape(N, at_once, block, n),
                    taken_by,
                    precision="highest",
                )
                kept = jnp.maximum(kept.reshape(N, -1, n), 1e-30)
                if kind == "kl":
                    found["cost"]["kl"][name] = mean(jnp.maximum(-jnp.log(kept), 0))
                    continue
                sums = jnp.einsum(
                    "nrqjh,nrcj->nrqch", parts.reshape(N, at_once, block, n, Hv), taken_by
                ).reshape(N, -1, n, Hv)
                error = sums / kept[..., None] - out[:, :, None]
                found["cost"]["output"][name] = mean((error**2).sum(-1))
        found["norm"] = (jnp.einsum("nrh,nhw->rw", out, unit) ** 2).sum(-1)
        return found

    found = lax.map(rows_of, jnp.arange(chunks))
    by_row = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found)  # [N, chunks, R, ...]

    def rejoined(x: Array) -> Array:
        return x.reshape(N, -1, *x.shape[3:])[:, :n]

    norm = found["norm"].reshape(-1)[:T].mean()
    entropies = {
        # the first query (block) sees one key (block): its entropy is 0 of 0
        name: by_row[name].reshape(N, -1)[:, least:T].mean(-1) if least < T else jnp.zeros(N)
        for name, least in (("entropy", 1), ("block_entropy", block))
    }
    mass = rejoined(by_row["mass"])
    cost = jax.tree.map(rejoined, by_row["cost"])
    cost["output"] = {name: x / jnp.maximum(norm, 1e-30) for name, x in cost["output"].items()}
    return Statistics(
        mass=mass,
        sensitivity=rejoined(by_row["sensitivity"]) / jnp.maximum(norm, 1e-30),
        retained=retained_mass(mass),
        cost=cost,
        norm=norm,
        **entropies,
    )


def softmax_rows(q: Any, k: Any, begins: Any, T: int) -> tuple[Array, Array, Array]:
    """Attention of some queries to all keys, causal, in float32.

    q [R, N, H] holds positions begins … begins + R - 1; k [S, K, H]; keys from T on are padding.

    Returns:
      p [N, R, S], its logsumexp [N, R], and the queries' positions [R].
    """
    R, N, H = q.shape
    S, K, _ = k.shape
    position = begins + jnp.arange(R)
    grouped = q.reshape(R, K, N // K, H)
    logits = jnp.einsum("rkgh,skh->kgrs", grouped, k, preferred_element_type=jnp.float32)
    logits = logits.reshape(N, R, S) / math.sqrt(H)
    key = jnp.arange(S)
    sees = (key <= position[:, None]) & (key < T)
    logits = jnp.where(sees, logits, -jnp.inf)
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    return jnp.exp(logits - logsumexp[..., None]), logsumexp, position


def factors(kernel: Any) -> tuple[Array, Array]:
    """W = root · unit for each head: kernel [N, H, width] -> root [N, H, H], unit [N, H, width].

    The rows of unit are orthonormal (or 0, where W has no such direction): ‖x W‖ = ‖x root‖.
    """
    kernel = kernel.astype(jnp.float32)
    values, vectors = jnp.linalg.eigh(jnp.einsum("nhw,ngw->nhg", kernel, kernel))
    live = values > 1e-6 * values[:, -1:]
    length = jnp.sqrt(jnp.where(live, values, 1))
    root = vectors * jnp.where(live, length, 0)[:, None, :]
    unit = jnp.einsum("nhg,nhw->ngw", vectors, kernel) / length[..., None]
    return root, unit * live[..., None]


def retained_mass(mass: Array, densities: Any = DENSITIES) -> Array:
    """Mean mass that rows keep in their best ceil(d · (i + 1)) blocks: [..., n, n] -> [..., D]."""
    n = mass.shape[-1]
    best = jnp.cumsum(-jnp.sort(-mass, axis=-1), axis=-1)
    counts = np.ceil(np.asarray(densities) * rows.ceilings(n)[:, None] - 1e-9).astype(np.int32)
    places = jnp.broadcast_to(counts - 1, (*mass.shape[:-1], len(densities)))
    return jnp.take_along_axis(best, places, -1).mean(-2)


def entropy_of(p: Array) -> Array:
    """-Σ p ln p over the last axis, 0 ln 0 = 0."""
    return -(p * jnp.log(jnp.maximum(p, 1e-37))).sum(-1)


def _pad_rows(x: Array, count: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, count - x.shape[1]), (0, 0)))


# ------------------------------------------------------------------------------------------ profile


@dataclasses.dataclass(frozen=True)
class Facts:
    """Where a profile comes from."""

    length: int  # tokens of every document
    block: int
    band: int
    documents: int
    model_hash: str
    data_hash: str
    seed: int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Profile:
    """Means over documents, and how sure they are. Every array has a leading axis of layers."""

    statistics: Any  # Statistics: mean over documents
    errors: Any  # {name: standard error of the mean} of mass, entropy, block_entropy, retained
    mass_halves: Any  # [2, layers, N, n, n]: mass of the even and of the odd documents
    facts: Facts = dataclasses.field(metadata={"static": True})

    @property
    def size(self) -> tuple[int, int, int]:
        """(layers, heads, rows of blocks)."""
        layers, heads, n, _ = self.statistics.mass.shape
        return layers, heads, n

    def scores(self, policy: str = "kl") -> Any:
        """What the static order goes by: mass, or for `output` the sensitivity; [L, N, n, n]."""
        return self.statistics.sensitivity if policy == "output" else self.statistics.mass

    def cost(self, policy: str, selector: str) -> np.ndarray:
        """cost[l, h, i, c - 1] of `policy` with the blocks in the order of `selector`."""
        curves = self.statistics.cost[policy]
        if selector not in curves:
            raise ValueError(
                f"the profile has no cost curves for {selector!r}, only for {sorted(curves)}; "
                "calibrate with that selector"
            )
        return np.asarray(curves[selector])

    def agreement(self, density: float = 0.43) -> dict[str, float]:
        """How far two halves of the documents agree.

        mass_distance: ½ Σ_j |mass of one half - of the other|, mean over rows: 0 to 1.
        budget_correlation: rank correlation of the heads' budgets by `kl` from each half alone, at
          `density` or, where forced blocks leave less to deal out, half of what they leave.
        """
        if self.facts.documents < 2:
            return {}
        least = rows.least_density(self.size[2], self.facts.band)
        density = max(density, (1 + least) / 2) if density < least else density
        first, second = (np.asarray(x) for x in self.mass_halves)
        counts = [
            budget.by_cost(budget.surrogate(x, self.facts.band), density, self.facts.band).counts
            for x in (first, second)
        ]
        ranks = [np.argsort(np.argsort(x.sum(-1).reshape(-1))) for x in counts]
        return {
            "mass_distance": float(np.abs(first - second).sum(-1).mean() / 2),
            "budget_correlation": float(np.corrcoef(ranks[0], ranks[1])[0, 1])
            if ranks[0].size > 1
            else 1.0,
        }

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file with the facts in its header."""
        from safetensors.numpy import save_file

        header = {"kind": "profile", "schema": SCHEMA, **dataclasses.asdict(self.facts)}
        arrays = {
            "/".join(str(part.name if hasattr(part, "name") else part.key) for part in place): x
            for place, x in jax.tree_util.tree_leaves_with_path(self)
        }
        arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
        save_file(arrays, path, {"xsake": json.dumps(header)})

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Reads what `save` wrote."""
        header, arrays = read(path, "profile", SCHEMA)
        tree: dict[str, Any] = {}
        for name, x in arrays.items():
            *folders, leaf = name.split("/")
            place = tree
            for folder in folders:
                place = place.setdefault(folder, {})
            place[leaf] = x
        facts = Facts(**header)
        statistics = Statistics(**tree["statistics"])
        return Profile(statistics, tree["errors"], tree["mass_halves"], facts)


def read(path: str | Path, kind: str, schema: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(header, arrays) of a file that a profile or a plan was saved to, checked."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("xsake", "{}"))
            arrays = {name: file.get_tensor(name) for name in list(file.keys())}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a {kind}: {error}") from error
    if header.pop("kind", None) != kind:
        raise ValueError(f"{path} is not a {kind}; `xsake calibrate` and `xsake plan` write them")
    if (found := header.pop("schema")) != schema:
        raise ValueError(
            f"{path} has schema {found}, this version reads {schema}; make the {kind} again"
        )
    return header, arrays


# ---------------------------------------------------------------------------------------- calibrate

# observe(weights, tokens [1, T], fold, carry) -> carry calls fold(layer, attention, carry) for
# every layer, where attention has q, k, v [1, T, …] and kernel [N, Hv, width]; layer may be traced.
Observe = Callable[[Any, Any, Callable[[Any, Any, Any], Any], Any], Any]


def calibrate(
    observe: Observe,
    weights: Any,
    documents: Iterable[Any],
    *,
    layers: int,
    heads: int,
    block: int = 128,
    band: int = 0,
    curves: tuple[str, ...] = CURVES,
    model_hash: str = "",
    seed: int | None = None,
    tell: Callable[[int], None] | None = None,
) -> Profile:
    """Profiles a model over documents of one length, one pass over each.

    Args:
      observe: hands every layer's q, k, v and output projection to a fold, see `Observe`.
      weights: its first argument, a pytree; kept out of the compiled code.
      documents: int [T] each, all of one length.
      layers: of the model.
      heads: query heads.
      block: tokens per block.
      band: forced blocks before the diagonal.
      curves: selectors to measure cost curves for.
      model_hash: of the model, kept in the profile.
      seed: what the documents were drawn with, kept in the profile.
      tell: called with the number of documents done.
    """
    documents = [np.asarray(document) for document in documents]
    if not documents or any(x.shape != documents[0].shape or x.ndim != 1 for x in documents):
        raise ValueError(
            "calibration needs documents of one length, got lengths "
            f"{sorted({len(x) for x in documents})}"
        )
    length = len(documents[0])
    n = rows.count_blocks(length, block)
    how = {"observe": observe, "block": block, "band": band, "curves": curves}
    state = Running.start(layers, heads, n, curves)
    for number, document in enumerate(documents):
        before = (state.mean.mass, state.mean.sensitivity)
        state = _accumulate(state, _one_document(weights, document, before, **how))
        if tell is not None:
            jax.block_until_ready(state.count)
            tell(number + 1)
    facts = Facts(length, block, band, len(documents), model_hash, hash_of(documents), seed)
    return _finished(state, facts)


@functools.partial(jax.jit, static_argnames=("observe", "block", "band", "curves"))
def _one_document(
    weights: Any, tokens: Any, before: Any, *, observe: Observe, block: int, band: int, curves: Any
) -> Statistics:
    """Statistics of one document [T], every array with a leading axis of layers."""

    def fold(layer: Any, seen: Any, carry: Statistics) -> Statistics:
        statistics = measure(
            seen.q[0],
            seen.k[0],
            seen.v[0],
            seen.kernel,
            block=block,
            band=band,
            curves=curves,
            before=jax.tree.map(lambda x: x[layer], before),
        )
        return jax.tree.map(lambda every, x: every.at[layer].set(x), carry, statistics)

    layers, heads, n, _ = before[0].shape
    return observe(weights, tokens[None], fold, _empty(layers, heads, n, curves))


class Running(NamedTuple):
    """Sums of documents so far, by Welford's rule."""

    count: Any
    mean: Any  # Statistics
    squares: Any  # {name: Σ (x - mean)²}
    halves: Any  # [2, layers, N, n, n]: sums of mass

    @staticmethod
    def start(layers: int, heads: int, n: int, curves: tuple[str, ...]) -> Running:
        """No documents yet."""
        mean = _empty(layers, heads, n, curves)
        squares = {name: jnp.zeros_like(getattr(mean, name)) for name in SPREAD}
        return Running(jnp.zeros((), jnp.int32), mean, squares, jnp.stack([mean.mass] * 2))


SPREAD = ("mass", "entropy", "block_entropy", "retained")


@functools.partial(jax.jit, donate_argnums=0)
def _accumulate(state: Running, new: Statistics) -> Running:
    count = state.count + 1

    def moved(mean: Array, x: Array, count: Array) -> Array:
        return mean + (x - mean) / jnp.maximum(count, 1)

    mean = jax.tree.map(lambda m, x: moved(m, x, count), state.mean, new)
    # the first document had no order before it: the curves of `static` begin with the second
    cost = {
        policy: {
            name: jnp.where(count == 1, 0, moved(old, new.cost[policy][name], count - 1))
            if name == "static"
            else mean.cost[policy][name]
            for name, old in curves.items()
        }
        for policy, curves in state.mean.cost.items()
    }
    squares = {
        name: state.squares[name]
        + (getattr(new, name) - getattr(state.mean, name))
        * (getattr(new, name) - getattr(mean, name))
        for name in SPREAD
    }
    halves = state.halves.at[state.count % 2].add(new.mass)
    return Running(count, mean._replace(cost=cost), squares, halves)


def _finished(state: Running, facts: Facts) -> Profile:
    count = facts.documents
    errors = {
        name: np.sqrt(np.asarray(x) / max(1, count - 1) / count)
        for name, x in state.squares.items()
    }
    each = np.array([(count + 1) // 2, max(1, count // 2)]).reshape(2, 1, 1, 1, 1)
    mean = jax.tree.map(np.asarray, state.mean)
    if count == 1 and "static" in mean.cost["kl"]:  # no second document to measure the order on
        mean.cost["kl"]["static"] = budget.surrogate(mean.mass, facts.band).astype(np.float32)
        mean.cost["output"]["static"] = budget.additive(mean.sensitivity, facts.band).astype(
            np.float32
        )
    return Profile(mean, errors, np.asarray(state.halves) / each, facts)


def _empty(layers: int, heads: int, n: int, curves: tuple[str, ...]) -> Statistics:
    def zeros(*shape: int) -> Array:
        return jnp.zeros((layers, *shape), jnp.float32)

    def square() -> Array:
        return zeros(heads, n, n)

    cost = {policy: {name: square() for name in curves} for policy in ("kl", "output")}
    retained = zeros(heads, len(DENSITIES))
    return Statistics(square(), square(), zeros(heads), zeros(heads), retained, cost, zeros())


def hash_of(arrays: Iterable[Any]) -> str:
    """The first 16 hex digits of a SHA-256 over arrays, their shapes and types."""
    digest = hashlib.sha256()
    for x in arrays:
        x = np.ascontiguousarray(x)
        digest.update(f"{x.dtype.str}{x.shape}".encode())
        digest.update(x.tobytes())
    return digest.hexdigest()[:16]
