"""The certificate measured: python -m xsake.bench.suites.certificate COMMAND.

    coverage   a profile, held-out documents → how often intervals hold the true means, how tight
               the bound is, how many row blocks a threshold does densely and what error is left
    one_key    one query wants one dropped key: how often sample, bound and guarantee notice → JSON
    speed      selection + sparse attention + certificate ÷ dense attention, random inputs → JSON
    model      the same on a model's activations, with the plans of a profile, and what the
               certificate says of them → JSON

A call is timed in a queue of calls, which for small kernels is the host's time to launch them, and
by the profiler: the kernels' own time, as `device_seconds`.

`coverage` computes dense attention for all queries, and then repeats the sample many times.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake import block_scores, dot_product_attention, masks, selection
from xsake.backends.choice import check_name
from xsake.bench import programs
from xsake.bench.method_times import activations, check_is_plain
from xsake.bench.peers import dense_causal
from xsake.bench.suites import Record
from xsake.bench.timing import beside, compiled_together, provenance, time_on_device, time_queued
from xsake.block_mask import BlockMask
from xsake.data.documents import load_documents
from xsake.evaluate.table import to_json
from xsake.hads import Plan, Profile, Report, budget, certified_attention, make
from xsake.hads.certificate import dropped_mass
from xsake.hads.estimates import WIDENED_ERROR, WIDENED_MASS, WINDOW, by_window_and_whole
from xsake.hads.mass_bounds import bounds
from xsake.hads.sampled import EVERY, sample_queries
from xsake.model import huggingface
from xsake.model.observer import Observer

THRESHOLDS = (0.05, 0.1, 0.2, 0.4)


def _write(out: Path, rows: list[Record], **facts: Any) -> None:
    out.write_text(to_json({"provenance": provenance() | facts, "rows": rows}))


# ----------------------------------------------------------------------------------------- coverage


def coverage(
    model: Path,
    documents: Path,
    profile: Path,
    out: Path,
    selector: str = "outlier_queries",
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
      out: the JSON file to write.
      selector: of the plans, with `output` budgets.
      densities: of the plans.
      count: documents.
      samples: repetitions of the sample.
      dtype: the model's compute dtype.
      implementation: the attention backend; default the fastest that can run.
    """
    programs.check_outputs(out)
    with programs.stopping():
        check_name(implementation)
        known = Profile.load(profile)
        length = known.facts.length
        tokens = np.stack(load_documents([documents], None, length, count))
        how: Any = {"dtype": dtype, "implementation": implementation}
        loaded = huggingface.load(model, tokenizer=False, **how).model
        check_is_plain(loaded.config)
    subject = Observer(loaded)
    rows = []
    for density in densities:
        plan = make(known, density, "output", selector)
        found = list(map(_measured(subject, plan, samples), tokens))
        means = jax.tree.map(lambda *xs: float(np.mean(xs)), *found)
        rows.append({"kind": "coverage", "length": length, "density": density, **means})
        print(rows[-1], flush=True)
        _write(out, rows, model=model.name, selector=selector, documents=count, samples=samples)


def _measured(subject: Observer, plan: Plan, samples: int) -> Callable[[np.ndarray], Record]:
    """A function of tokens [T] that returns the figures of one document, means over layers."""

    def of_layer(layer: Any, q: Array, k: Array, v: Array) -> dict[str, Array]:
        return _of_layer(plan.mask(layer, q, k), q, k, v, samples)

    def fold(layer: Any, seen: Any, carry: Any) -> Any:
        found = of_layer(layer, seen.q, seen.k, seen.v)
        return jax.tree.map(lambda total, x: total + x / subject.layers, carry, found)

    q = jax.ShapeDtypeStruct((1, plan.length, subject.heads, 8), jnp.float32)
    names = jax.eval_shape(functools.partial(of_layer, 0), q, q, q)
    zeros = {name: jnp.zeros(()) for name in names}
    run = jax.jit(lambda weights, tokens: subject.observe(weights, tokens[None], fold, zeros))
    return lambda tokens: jax.device_get(run(subject.weights, jnp.asarray(tokens)))


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
    compared = {"mass": truths["mass"], "error": jnp.sqrt(truths["error"] / size)}
    for (criterion, x), threshold in itertools.product(compared.items(), THRESHOLDS):
        fails = jnp.repeat(x[0, at[0]] >= threshold, EVERY, axis=0)[:T]  # [T, N]
        left = jnp.where(fails, 0, truths["error"][0])
        found[f"dense_rows_at_{criterion}_{threshold:g}"] = fails.mean()
        name = f"relative_squared_error_at_{criterion}_{threshold:g}"
        found[name] = left.mean() / size.mean()
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
        x = truth[0, at].T
        found = by_window_and_whole(x, T, EVERY, window, widened, np.inf)[0]
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

    Args:
      out: the JSON file to write.
      length: tokens.
      block: tokens per block.
      head_size: of q and k.
      samples: repetitions of the sample, each with a key of its own.
      logits: of the query and the key that it wants.
    """
    programs.check_outputs(out)
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
    selectors: tuple[str, ...] = ("mean_query", "outlier_queries"),
    blocks: tuple[int, ...] = (64,),
    dtype: str = "bfloat16",
) -> None:
    """Times dense attention, selection + sparse, and that with the certificate, on random inputs.

    Budgets are uniform. The certificate is timed without and with the bound; `model` times a
    threshold, on activations.

    Args:
      out: the JSON file to write.
      shapes: (B, T, N, H) of q, k and v.
      kv_heads: of k and v; default as many as query heads.
      densities: of the budgets.
      selectors: what selects the blocks.
      blocks: tokens per block.
      dtype: of q, k and v.
    """
    programs.stop_without("gpu", "certificate speed")
    programs.check_outputs(out)
    rows: list[Record] = []
    for shape, block in itertools.product(shapes, blocks):
        for record in _timed(shape, kv_heads or shape[2], densities, selectors, block, dtype):
            print(record, flush=True)
            rows.append(record)
            _write(out, rows)


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
    counts = {
        density: jnp.asarray(budget.uniform(density, 1, N, -(-T // block)).counts[0])
        for density in densities
    }

    def chosen(selector: str, counts: Array, q: Array, k: Array) -> BlockMask:
        return block_scores.select(selector, q, k, counts, block)

    def selected(selector: str, counts: Array, q: Array, k: Array, v: Array) -> BlockMask:
        return chosen(selector, counts, q, k)

    def sparse(selector: str, counts: Array, q: Array, k: Array, v: Array) -> Array:
        return dot_product_attention(q, k, v, mask=chosen(selector, counts, q, k))

    def certified(selector: str, counts: Array, q: Array, k: Array, v: Array, bound: bool) -> Any:
        mask = chosen(selector, counts, q, k)
        return _needed(*certified_attention(q, k, v, mask, jax.random.key(3), bound=bound))

    forms: dict[str, Any] = {
        "selection": selected,
        "selection_and_sparse": sparse,
        "certificate": functools.partial(certified, bound=False),
        "certificate_with_bound": functools.partial(certified, bound=True),
    }
    given = (counts[densities[0]], q, k, v)
    calls: dict[Any, tuple[Any, tuple[Any, ...]]] = {
        (selector, name): (functools.partial(form, selector), given)
        for selector in selectors
        for name, form in forms.items()
    }
    calls["dense"] = (lambda counts, q, k, v: dense_causal(q, k, v), given)
    ready = compiled_together(calls)
    base = _both_times(ready["dense"], *given)
    for density, selector in ((x, y) for x in densities for y in selectors):
        args = counts[density], q, k, v
        found = {name: _both_times(ready[selector, name], *args) for name in forms}
        yield {
            "kind": "speed",
            "inputs": "random",
            "shape": "·".join(map(str, (B, N, T, H))),
            "kv_heads": K,
            "block": block,
            "selector": selector,
            "density": density,
            **_times(found, base),
        }


def _needed(out: Array, report: Report) -> Any:
    """The output and one array of each part of the report; many results are launched slowly.

    Without the report, the compiler would remove the sample.
    """
    return out, report.dropped_mass.mean, report.bound


def _both_times(fn: Any, *args: Any) -> tuple[float, float]:
    """Seconds of a call in a queue, and of its kernels alone."""
    return time_queued(fn, *args, rounds=3).median_seconds, time_on_device(fn, *args)


def _times(
    found: dict[str, tuple[float, float]], dense: tuple[float, float], layers: int = 1
) -> Record:
    """The fields of a record: seconds of one layer, and those ÷ dense attention's."""
    record: Record = {}
    for i, kind in enumerate(("", "device_")):
        record |= {f"{name}_{kind}seconds": x[i] / layers for name, x in found.items()}
        record |= {f"{name}_{kind}over_dense": x[i] / dense[i] for name, x in found.items()}
        record[f"dense_{kind}seconds"] = dense[i] / layers
    return record


# -------------------------------------------------------------------------------------------- model


def model(
    model: Path,
    documents: Path,
    profile: Path,
    out: Path,
    selectors: tuple[str, ...] = ("mean_query", "outlier_queries"),
    densities: tuple[float, ...] = (0.20, 0.43),
    batch: int = 1,
    threshold: float = 0.2,
    dtype: str = "bfloat16",
) -> None:
    """Times one layer's attention on a model's activations, the mean over all layers.

    Beside the times are the certificate's estimates of what the blocks that are left out cost.

    Args:
      model: a folder of safetensors or a .gguf file.
      documents: an .npy file of token ids, [documents, tokens].
      profile: what the plans are made from, with `output` budgets; it has curves of the selectors.
      out: the JSON file to write.
      selectors: of the plans.
      densities: of the plans.
      batch: documents that are attended to together.
      threshold: row blocks whose estimated relative error reaches it are done densely, in the
        last of the forms that are timed.
      dtype: the model's compute dtype.
    """
    programs.stop_without("gpu", "certificate model")  # the profiler times kernels of GPUs only
    programs.check_outputs(out)
    with programs.stopping():
        known = Profile.load(profile)
        tokens = np.stack(load_documents([documents], None, known.facts.length, batch))
        loaded = huggingface.load(model, dtype=dtype, tokenizer=False).model
        check_is_plain(loaded.config)
    subject = Observer(loaded)
    # one array per layer: slices of stacked layers would be copied in every call
    with beside():
        given = [list(x) for x in jax.block_until_ready(activations(subject, tokens)[:3])]
    plans = {(s, d): make(known, d, "output", s) for s in selectors for d in densities}
    calls: dict[Any, tuple[Any, tuple[Any, ...]]] = {
        (selector, name): (
            functools.partial(_layers, form),
            (plans[selector, densities[0]], *given),
        )
        for selector in selectors
        for name, form in _forms(threshold).items()
    }
    dense = functools.partial(_layers, lambda plan, layer, q, k, v: dense_causal(q, k, v))
    calls["dense"] = (dense, (None, *given))
    ready = compiled_together(calls)
    B, T, N, H = given[0][0].shape
    base = _both_times(ready["dense"], None, *given)
    rows: list[Record] = []
    for (selector, density), plan in plans.items():
        # compiled for the first density, whose terms are part of the program's arguments
        plan = dataclasses.replace(plan, terms=plans[selector, densities[0]].terms)
        found = {
            name: _both_times(ready[selector, name], plan, *given) for name in _forms(threshold)
        }
        rows.append(
            {
                "kind": "speed",
                "inputs": "activations",
                "shape": "·".join(map(str, (B, N, T, H))),
                "kv_heads": given[1][0].shape[2],
                "block": known.facts.block,
                "selector": selector,
                "density": density,
                "threshold": threshold,
                **_estimates(plan, *given),
                **_times(found, base, subject.layers),
            }
        )
        print(rows[-1], flush=True)
        _write(out, rows, model=model.name)


def _layers(
    form: Any, plan: Plan | None, q: list[Array], k: list[Array], v: list[Array]
) -> list[Any]:
    """form(plan, layer, q, k, v) of every layer, one after another."""
    one = jax.jit(form)  # traced once
    return [one(plan, jnp.int32(layer), *x) for layer, x in enumerate(zip(q, k, v, strict=True))]


def _estimates(plan: Plan, q: list[Array], k: list[Array], v: list[Array]) -> Record:
    """What the certificate says of a plan: means over heads and layers."""
    with beside():
        found = jax.device_get(_layers(_estimated, plan, q, k, v))
    return {name: float(np.mean([x[name] for x in found])) for name in found[0]}


def _estimated(plan: Plan, layer: Array, q: Array, k: Array, v: Array) -> dict[str, Array]:
    mask = plan.mask(layer, q, k)
    report = certified_attention(q, k, v, mask, jax.random.key(2), bound=False)[1]
    figures = {
        "visited_density": report.density_given,
        "dropped_mass": report.dropped_mass_by_head.mean,
        "relative_error": report.relative_error,
    }
    return {name: x.mean() for name, x in figures.items()}


def _forms(threshold: float) -> dict[str, Any]:
    """What is timed on activations, functions of (plan, layer, q, k, v)."""

    def selected(plan: Plan, layer: Array, q: Array, k: Array, v: Array) -> BlockMask:
        return plan.mask(layer, q, k)

    def sparse(plan: Plan, layer: Array, q: Array, k: Array, v: Array) -> Array:
        return dot_product_attention(q, k, v, mask=plan.mask(layer, q, k))

    def certified(plan: Plan, layer: Array, q: Array, k: Array, v: Array, **how: Any) -> Any:
        mask = plan.mask(layer, q, k)
        return _needed(*certified_attention(q, k, v, mask, jax.random.key(2), bound=False, **how))

    thresholded = functools.partial(certified, threshold=threshold, criterion="error")
    return {
        "selection": selected,
        "selection_and_sparse": sparse,
        "certificate": certified,
        "certificate_with_threshold": thresholded,
    }


COMMANDS: dict[str, Any] = {x.__name__: x for x in (coverage, one_key, speed, model)}

if __name__ == "__main__":
    import tyro

    tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="python -m xsake.bench.suites.certificate")
