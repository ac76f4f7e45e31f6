"""The certificate measured: python -m xsake.bench.suites.certificate COMMAND.

    coverage   a profile, held-out documents → how often intervals hold the true means, how tight
               the bound is, how many row blocks a threshold does densely and what error is left
    one_key    one query wants one dropped key: how often sample, bound and guarantee notice → JSON
    speed      selection + sparse attention + certificate ÷ dense attention → JSON

`coverage` computes dense attention for all queries, and then repeats the sample many times.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake import block_scores, dot_product_attention, masks, selection
from xsake.bench.suites import Record
from xsake.bench.timing import provenance, time_queued
from xsake.block_mask import BlockMask
from xsake.evaluate.table import to_json
from xsake.hads import Plan, Profile, budget, certified_attention, make
from xsake.hads.certificate import (
    EVERY,
    WIDENED_ERROR,
    WIDENED_MASS,
    WINDOW,
    bounds,
    dropped_mass,
    estimate,
    sample_queries,
)
from xsake.model import huggingface
from xsake.model.observer import Observer

THRESHOLDS = (0.02, 0.05, 0.1, 0.2)


def _write(out: Path, rows: list[Record], **facts: Any) -> None:
    out.write_text(to_json({"provenance": provenance() | facts, "rows": rows}))


# ----------------------------------------------------------------------------------------- coverage


def coverage(
    model: Path,
    documents: Path,
    profile: Path,
    out: Path,
    selector: str = "part_queries",
    densities: tuple[float, ...] = (0.20, 0.43),
    count: int = 4,
    samples: int = 50,
    dtype: str = "bfloat16",
    implementation: str | None = None,
) -> None:
    """Measures estimates, intervals and bounds on a model's activations.

    Args:
      model: a folder of safetensors or a .gguf file.
      documents: an .npy file of held-out token ids, [documents, tokens].
      profile: what the plans are made from; its length is that of the documents.
      out: a JSON file.
      selector: of the plans, with `output` budgets.
      densities: of the plans.
      count: documents.
      samples: repetitions of the sample.
      dtype: the model's compute dtype.
      implementation: the attention backend; default the fastest that can run.
    """
    loaded = huggingface.load(model, dtype=dtype, implementation=implementation, tokenizer=False)
    subject = Observer(loaded.model)
    known = Profile.load(profile)
    length = known.facts.length
    tokens = np.load(documents).astype(np.int32)[:count, :length]
    rows = []
    for density in densities:
        plan = make(known, density, "output", selector)
        found = [_of_document(subject, plan, x, samples) for x in tokens]
        means = jax.tree.map(lambda *xs: float(np.mean(xs)), *found)
        rows.append({"kind": "coverage", "length": length, "density": density, **means})
        print(rows[-1], flush=True)
        _write(out, rows, model=model.name, selector=selector, documents=count, samples=samples)


def _of_document(subject: Observer, plan: Plan, tokens: np.ndarray, samples: int) -> Record:
    """Figures of one document, means over layers."""

    def fold(layer: Any, seen: Any, carry: Any) -> Any:
        found = _of_layer(plan.mask(layer, seen.q, seen.k), seen.q, seen.k, seen.v, samples)
        return jax.tree.map(lambda total, x: total + x / subject.layers, carry, found)

    shapes = jax.eval_shape(
        functools.partial(_of_layer, samples=samples), *_example(subject, plan, tokens)
    )
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    run = _compiled(subject, fold)
    return jax.device_get(run(subject.weights, jnp.asarray(tokens)[None], start))


def _compiled(subject: Observer, fold: Any) -> Any:
    return jax.jit(lambda weights, tokens, start: subject.observe(weights, tokens, fold, start))


def _example(subject: Observer, plan: Plan, tokens: np.ndarray) -> tuple[Any, ...]:
    """A mask and q, k, v of a size that gives `_of_layer`'s figures their shapes."""
    T = plan.terms.block * plan.counts.shape[-1]
    q = jnp.zeros((1, T, subject.heads, 8))
    kept = jnp.ones((1, subject.heads, *plan.counts.shape[-1:] * 2), bool)
    return selection.to_mask(kept, T, plan.terms.block), q, q, q


def _of_layer(mask: BlockMask, q: Array, k: Array, v: Array, samples: int) -> dict[str, Array]:
    T, N = q.shape[1:3]
    out, sparse = dot_product_attention(q, k, v, mask=mask, return_residual=True)
    exact, dense = dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    difference = exact.astype(jnp.float32) - out.astype(jnp.float32)
    truths = {"mass": dropped_mass(sparse, dense), "error": (difference**2).sum(-1)}
    size = (exact.astype(jnp.float32) ** 2).sum(-1)
    keys = jax.random.split(jax.random.key(0), samples)
    found: dict[str, Array] = {
        "dropped_mass": truths["mass"].mean(),
        "relative_squared_error": truths["error"].mean() / size.mean(),
    }
    for name, truth in truths.items():
        for where, window in (("window", WINDOW), ("head", T)):
            widened = WIDENED_MASS if name == "mass" else WIDENED_ERROR
            found |= _covered(truth, keys, window, widened, f"{name}_by_{where}")
    kept = mask.blocks() > 0
    dropped = jnp.tri(kept.shape[-1], dtype=bool) & ~kept
    limits = bounds(q, k, sparse, dropped, mask.block)  # [B, N, T]
    found["bound"] = limits.mean()
    for limit in (0.1, 0.5):
        found[f"bound_below_{limit:g}"] = (limits < limit).mean()
    found["bound_violated"] = (limits < jnp.swapaxes(truths["mass"], 1, 2) - 1e-3).mean()
    at = sample_queries(jax.random.key(1), 1, T)
    sampled = truths["mass"][0, at[0]]  # [G, N]
    for threshold in THRESHOLDS:
        fails = jnp.repeat(sampled >= threshold, EVERY, axis=0)[:T]  # [T, N]
        left = jnp.where(fails, 0, truths["error"][0])
        found[f"dense_rows_at_{threshold:g}"] = fails.mean()
        found[f"relative_squared_error_at_{threshold:g}"] = left.mean() / size.mean()
    corrected = certified_attention(
        q, k, v, mask, jax.random.key(1), correct=True, bound=False
    )[0]  # fmt: skip
    after = exact.astype(jnp.float32) - corrected.astype(jnp.float32)
    found["relative_squared_error_corrected"] = (after**2).sum(-1).mean() / size.mean()
    return found


def _covered(truth: Array, keys: Array, window: int, widened: float, name: str) -> dict[str, Array]:
    """Share of intervals that hold the true mean, and their mean half width ÷ the mean."""
    T = truth.shape[1]
    padded = jnp.pad(truth[0], ((0, -T % window), (0, 0)))
    counts = np.minimum(T - np.arange(0, T, window), window)
    means = padded.reshape(-1, window, truth.shape[-1]).sum(1).T / counts  # [N, windows]

    def one(key: Array) -> tuple[Array, Array, Array]:
        at = sample_queries(key, 1, T)[0]
        found = estimate(truth[0, at].T, T, EVERY, window, widened)
        # a mean of 1e-6 is that of rounding: no block with any weight is dropped
        inside = (found.low - 1e-6 <= means) & (means <= found.high + 1e-6)
        return inside.mean(), found.mean.mean() - means.mean(), found.standard_error.mean()

    inside, off, spread = lax.map(one, keys)
    return {
        f"{name}_covered": inside.mean(),
        f"{name}_bias": off.mean(),
        f"{name}_standard_error": spread.mean(),
    }


# ------------------------------------------------------------------------------------------ one key


def one_key(
    out: Path,
    length: int = 8192,
    block: int = 64,
    head_size: int = 64,
    samples: int = 256,
    logits: tuple[float, ...] = (0.0, 8.0, 16.0),
) -> None:
    """One query wants one key of a dropped block; all others are random.

    Written for each logit of that pair: the dropped mass of the query, the share of samples that do
    its row block densely at threshold 0.1, the largest bound, and whether guarantee 0.1 does.
    """
    rows = []
    for logit in logits:
        record = _one_key(length, block, head_size, samples, logit)
        print(record, flush=True)
        rows.append(record)
        _write(out, rows)


def _one_key(T: int, block: int, H: int, samples: int, logit: float) -> Record:
    n, wants, wanted = -(-T // block), T - block // 2, T // 3
    # keys in a narrow cone, as a bound can only be tight where the keys of a block are alike
    q, k, v = (0.1 * jax.random.normal(jax.random.key(i), (1, T, 1, H)) for i in range(3))
    direction = jnp.zeros(H).at[0].set(float(np.sqrt(logit * np.sqrt(H))))
    q, k = (x.at[0, i, 0].set(direction) for x, i in ((q, wants), (k, wanted)))
    kept = np.ones((1, 1, n, n), bool)
    kept[0, 0, wants // block, wanted // block] = False
    mask = selection.to_mask(jnp.asarray(kept), T, block)
    run = jax.jit(certified_attention, static_argnames=("threshold", "guarantee"))
    caught = [
        bool(
            run(q, k, v, mask, jax.random.key(i), threshold=0.1)[1].dense_row_blocks[
                0, 0, wants // block
            ]
        )
        for i in range(samples)
    ]
    report = run(q, k, v, mask, jax.random.key(0), guarantee=0.1)[1]
    last = (jnp.arange(1) + wants)[None]
    dense, sparse = (
        dot_product_attention(
            q[:, wants : wants + 1], k, v, mask=rule, return_residual=True,
        )[1]
        for rule in (
            masks.at_positions(masks.causal(), last),
            masks.at_positions(masks.causal(), last)
            & masks.array(jnp.repeat(jnp.asarray(kept[0, 0, wants // block]), block)[None, :T]),
        )
    )  # fmt: skip
    return {
        "kind": "one_key",
        "length": T,
        "block": block,
        "logit": logit,
        "dropped_mass": float(dropped_mass(sparse, dense)[0, 0, 0]),
        "samples": samples,
        "caught_by_sample": float(np.mean(caught)),
        "largest_bound": float(report.largest_bound.max()),
        "done_densely_by_guarantee": bool(report.dense_row_blocks[0, 0, wants // block]),
        "dense_rows_by_guarantee": float(report.dense_row_blocks.mean()),
    }


# -------------------------------------------------------------------------------------------- speed


def speed(
    out: Path,
    shapes: tuple[tuple[int, int, int, int], ...] = ((1, 8192, 9, 64), (4, 8192, 16, 128)),
    kv_heads: int | None = None,
    densities: tuple[float, ...] = (0.20, 0.43),
    selectors: tuple[str, ...] = ("mean_query", "part_queries"),
    block: int = 64,
    dtype: str = "bfloat16",
) -> None:
    """Times dense attention, selection + sparse, and that with the certificate, on random inputs.

    Shapes are (B, T, N, H). Budgets are uniform. The certificate is timed without the bound, with
    it, and with a threshold that about a tenth of the row blocks exceed.
    """
    rows: list[Record] = []
    for shape in shapes:
        for record in _timed(shape, kv_heads or shape[2], densities, selectors, block, dtype):
            print(record, flush=True)
            rows.append(record)
            _write(out, rows)


def _dense(q: Array, k: Array, v: Array) -> Array:
    peer: Any = "cudnn" if jax.default_backend() == "gpu" else None
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=peer)


def _timed(
    shape: tuple[int, int, int, int],
    K: int,
    densities: tuple[float, ...],
    selectors: tuple[str, ...],
    block: int,
    dtype: str,
) -> Iterator[Record]:
    B, T, N, H = shape
    q, k, v = (
        jax.random.normal(jax.random.key(i), (B, T, heads, H), dtype)
        for i, heads in enumerate((N, K, K))
    )
    rng = jax.random.key(3)
    base = time_queued(jax.jit(_dense), q, k, v).median_seconds

    def chosen(selector: str, counts: Array, q: Array, k: Array) -> BlockMask:
        def one(q: Array, k: Array) -> Array:
            return selection.keep_top(block_scores.estimate(selector, q, k, block), counts)

        return selection.to_mask(jax.vmap(one)(q, k), T, block)

    def sparse(selector: str, counts: Array, q: Array, k: Array, v: Array) -> Array:
        return dot_product_attention(q, k, v, mask=chosen(selector, counts, q, k))

    def certified(selector: str, how: Any, counts: Array, q: Array, k: Array, v: Array) -> Any:
        return certified_attention(q, k, v, chosen(selector, counts, q, k), rng, **how)

    for density in densities:
        counts = jnp.asarray(budget.uniform(density, 1, N, -(-T // block)).counts[0])
        for selector in selectors:
            select = jax.jit(functools.partial(chosen, selector))
            plain = jax.jit(functools.partial(sparse, selector))
            found = {
                "selection": time_queued(select, counts, q, k),
                "selection_and_sparse": time_queued(plain, counts, q, k, v),
            }
            sampled = jax.jit(functools.partial(certified, selector, {"bound": False}))
            report = jax.block_until_ready(sampled(counts, q, k, v))[1]
            limit = float(report.dropped_mass.mean.mean() + 1.3 * report.dropped_mass.mean.std())
            for name, how in (
                ("certificate", {"bound": False}),
                ("certificate_with_bound", {}),
                ("certificate_with_threshold", {"bound": False, "threshold": min(limit, 1.0)}),
            ):
                run = jax.jit(functools.partial(certified, selector, how))
                found[name] = time_queued(run, counts, q, k, v)
                report = run(counts, q, k, v)[1]
            yield {
                "kind": "speed",
                "shape": "·".join(map(str, (B, N, T, H))),
                "kv_heads": K,
                "block": block,
                "selector": selector,
                "density": density,
                "dense_seconds": base,
                "dense_rows": float(report.dense_row_blocks.mean()),
                **{f"{name}_seconds": x.median_seconds for name, x in found.items()},
                **{f"{name}_over_dense": x.median_seconds / base for name, x in found.items()},
            }


if __name__ == "__main__":
    import tyro

    tyro.extras.subcommand_cli_from_dict({"coverage": coverage, "one_key": one_key, "speed": speed})
