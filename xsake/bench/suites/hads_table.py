"""HADS on one model, resumable: python -m xsake.bench.suites.hads_table COMMAND.

    prepare   a model's tokenizer + text files → a folder of .npy documents
    profile   times a calibration with the cost curves of all selectors, compilation included → JSON
    table     calibrates (cached), then measures every method at every density → JSON and Markdown
    speed     times selection, sparse and dense attention, and decode → JSON

The package tokenizers is needed by `prepare` only. Profiles and densities that exist already are
not measured again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake import block_scores, dot_product_attention, selection
from xsake.backends.choice import check_name
from xsake.bench import programs
from xsake.bench.method_times import activations, check_is_plain
from xsake.bench.peers import dense_causal
from xsake.bench.suites import Record
from xsake.bench.timing import provenance, time_queued
from xsake.block_mask import BlockMask
from xsake.data import documents as text
from xsake.decode import REFRESH
from xsake.evaluate import table as tables
from xsake.evaluate.decoding import compare_decoding
from xsake.evaluate.quality import compare, mean_and_error
from xsake.hads import Plan, Profile, budget, make
from xsake.hads.statistics import CURVES
from xsake.model import Transformer, huggingface
from xsake.model.generate import stream
from xsake.model.observer import Observer


def prepare(
    model: Path,
    out: Path,
    novels: list[Path],
    held_out: list[Path],
    wikipedia: list[Path],
    length: int = 8192,
    calibration: int = 16,
    evaluation: int = 8,
) -> None:
    """Writes out/novels.npy, out/wikipedia.npy, out/held_out.npy, and their sources.json.

    Args:
      model: a folder of safetensors or a .gguf file, whose tokenizer is used.
      out: a folder.
      novels: .txt or .jsonl files to calibrate on, plain or compressed.
      held_out: other novels, to measure on.
      wikipedia: files of another kind of text to calibrate on.
      length: tokens of each document.
      calibration: documents of each kind to calibrate on.
      evaluation: documents to measure on.
    """
    tokenizer = huggingface.load(model).tokenizer
    assert tokenizer is not None
    out.mkdir(parents=True, exist_ok=True)
    sources = {}
    for name, files, count, seed in (
        ("novels", novels, calibration, 0),
        ("wikipedia", wikipedia, calibration, 0),
        ("held_out", held_out, evaluation, 1),
    ):
        tokens = np.stack(text.load_documents(files, tokenizer.encode, length, count, seed))
        narrow = np.uint16 if tokens.max() < 1 << 16 else np.int32
        np.save(out / f"{name}.npy", tokens.astype(narrow))
        sources[name] = {"files": [file.name for file in files], "seed": seed}
        print(f"{name}: {count} × {length:,} tokens", flush=True)
    (out / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")


def table(
    model: Path,
    documents: Path,
    out: Path,
    profiles: Path,
    block: int = 64,
    length: int = 8192,
    short: int = 2048,
    calibration: int = 16,
    evaluation: int = 8,
    densities: tuple[float, ...] = (0.10, 0.20, 0.30, 0.43, 0.60),
    curves: tuple[str, ...] = CURVES,
    dtype: str = "bfloat16",
    implementation: str | None = None,
) -> None:
    """Calibrates on novels and on Wikipedia, and compares on held-out novels.

    A third calibration uses the same novels, cut to `short` tokens.

    Args:
      model: a folder of safetensors or a .gguf file.
      documents: the folder that `prepare` wrote.
      out: a folder for table-LENGTH-BLOCK.json and .md, and for the plans at density 0.43.
      profiles: a folder for the profiles, which are large.
      block: tokens per block.
      length: tokens of each document.
      short: tokens of the cut novels; plans calibrated on them are extended to `length`.
      calibration: documents to calibrate on.
      evaluation: documents to measure on.
      densities: densities to measure every method at.
      curves: selectors to measure cost curves for.
      dtype: the model's compute dtype.
      implementation: the attention backend; default the fastest that can run.
    """
    held_out = _tokens(documents, "held_out", length, evaluation)
    subject = _subject(model, dtype, implementation)
    name = out / f"table-{length}-{block}.json"
    run = tables.facts_of_run(subject, held_out)
    with programs.stopping():
        tables.check_resumable(name, run)
    profiled = functools.partial(_cached_profile, subject, documents, profiles, block, calibration)
    known = profiled("novels", length, curves)
    others = {
        "from wikipedia": profiled("wikipedia", length, curves),
        f"from {short:,} tokens": profiled("novels", short, ("static", "mean_query")),
    }
    with programs.stopping():
        tables.check_resumable(name, run | tables.facts_of(known, others))
    sources = documents / "sources.json"
    facts = provenance() | {
        "model": model.name,
        "dtype": dtype,
        "profiles": {file.stem: json.loads(file.read_text()) for file in profiles.glob("*.json")},
        "sources": json.loads(sources.read_text()) if sources.is_file() else {},
    }
    out.mkdir(parents=True, exist_ok=True)
    for policy in ("kl", "output"):
        make(known, 0.43, policy).save(out / f"plan-{policy}-0.43-{length}-{block}.safetensors")
    began = time.perf_counter()

    def report(what: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {what}", flush=True)

    tables.run_table(
        subject, known, held_out, densities, name, others=others, provenance=facts, report=report
    )


def _subject(model: Path, dtype: str, implementation: str | None) -> Observer:
    with programs.stopping():
        check_name(implementation)
        how: Any = {"dtype": dtype, "implementation": implementation}
        return Observer(huggingface.load(model, tokenizer=False, **how).model)


def _tokens(documents: Path, name: str, length: int, count: int) -> list[np.ndarray]:
    """Documents of the folder that `prepare` wrote."""
    with programs.stopping():
        return text.load_documents([documents / f"{name}.npy"], None, length, count)


def _cached_profile(
    subject: Observer,
    documents: Path,
    profiles: Path,
    block: int,
    count: int,
    name: str,
    length: int,
    curves: tuple[str, ...],
) -> Profile:
    """A profile from its file; if there is none, measured now and saved with its timing."""
    path = profiles / f"{name}-{length}-{block}.safetensors"
    if not path.exists():
        profiles.mkdir(parents=True, exist_ok=True)
        tokens = _tokens(documents, name, length, count)
        found, facts = _timed_profile(subject, tokens, block, curves)
        print(path.stem, facts, flush=True)
        found.save(path)
        path.with_suffix(".json").write_text(json.dumps(facts) + "\n")
    with programs.stopping():
        return Profile.load(path)


def _timed_profile(
    subject: Observer, documents: list[np.ndarray], block: int, curves: tuple[str, ...]
) -> tuple[Profile, Record]:
    """A profile and its wall time. Most of the compilation happens during the first document."""
    times = [time.perf_counter()]
    found = subject.profile(
        documents, block=block, curves=curves, report=lambda _: times.append(time.perf_counter())
    )
    return found, {
        "documents": len(documents),
        "length": len(documents[0]),
        "curves": list(curves),
        "seconds": time.perf_counter() - times[0],
        "first_document_seconds": times[1] - times[0],
    }


def profile(
    model: Path,
    documents: Path,
    out: Path,
    block: int = 64,
    length: int = 8192,
    calibration: int = 16,
    dtype: str = "bfloat16",
    implementation: str | None = None,
) -> None:
    """Times a calibration on novels with all cost curves; writes the JSON file `out`.

    Args:
      model: a folder of safetensors or a .gguf file.
      documents: the folder that `prepare` wrote.
      out: a JSON file.
      block: tokens per block.
      length: tokens of each document.
      calibration: documents to calibrate on.
      dtype: the model's compute dtype.
      implementation: the attention backend; default the fastest that can run.
    """
    programs.check_outputs(out)
    tokens = _tokens(documents, "novels", length, calibration)
    subject = _subject(model, dtype, implementation)
    _, facts = _timed_profile(subject, tokens, block, CURVES)
    record = {"kind": "profile", "model": model.name, "dtype": dtype, "block": block, **facts}
    print(record, flush=True)
    out.write_text(json.dumps({"provenance": provenance(), "rows": [record]}, indent=1) + "\n")


# -------------------------------------------------------------------------------------------- speed


def speed(
    model: Path,
    documents: Path,
    plan: Path,
    out: Path,
    selectors: tuple[str, ...] = ("mean_query", "gaussian", "pooled", "antidiagonal"),
    shapes: tuple[tuple[int, int], ...] = ((4, 8192), (1, 32768)),
    heads: int = 16,
    head_size: int = 128,
    evaluation: int = 4,
    new: int = 128,
    implementation: str | None = None,
) -> None:
    """Times selection, selection + sparse attention and dense attention, and decode.

    Three kinds of records are written, one by one.

    The kind `headline`: random q, k, v of `shapes`; uniform budgets, and the budgets of `heads`
    heads of the plan, rescaled so that their mean density is that of the plan.

    The kind `activations`: all layers on held-out documents under the plan: time, and attention KL
    of the same masks.

    The kind `decode`: decoding after a long prompt; each head reads a share of the cache, as in
    the plan.

    Args:
      model: a folder of safetensors or a .gguf file.
      documents: the folder that `prepare` wrote.
      plan: the file of a plan, such as `table` writes.
      out: a JSON file.
      selectors: selectors to time.
      shapes: (B, T) of the random q, k, v.
      heads: of the random q, k, v.
      head_size: of the random q, k, v.
      evaluation: held-out documents.
      new: tokens to decode.
      implementation: the attention backend; default the fastest that can run.
    """
    programs.check_outputs(out)
    with programs.stopping():
        check_name(implementation)
        loaded = Plan.load(plan)
        check_is_plain(huggingface.examine(model).config)  # it is loaded after the first timings
    held_out = _tokens(documents, "held_out", loaded.length, evaluation)
    records: list[Record] = []

    def write(record: Record) -> None:
        print(record, flush=True)
        records.append(record)
        facts = provenance() | {"plan": plan.name, "density": loaded.terms.density}
        out.write_text(json.dumps({"provenance": facts, "rows": records}, indent=1) + "\n")

    for B, T in shapes:
        for record in _headline(loaded, selectors, (B, T, heads, head_size), implementation):
            write(record)
    subject = _subject(model, "bfloat16", implementation)
    for selector in selectors:
        terms = dataclasses.replace(loaded.terms, selector=selector)
        selecting = dataclasses.replace(loaded, terms=terms)
        write(_on_activations(subject, selecting, np.stack(held_out), implementation))
    unstacked = huggingface.load(model, dtype="bfloat16", tokenizer=False).model.unstacked()
    quarter = np.full((subject.layers, subject.heads), 0.25, np.float32)
    by_plan, by_plan_less = (loaded.decode_budget(share) for share in (0.43, 0.25))
    policy = loaded.terms.policy
    for name, shares, refresh, batches in (
        ("dense", None, 1, (1, 8)),
        (policy, by_plan, REFRESH, (1, 8)),
        (policy, by_plan_less, REFRESH, (1, 8)),
        (policy, by_plan_less, 1, (1,)),
        (policy, by_plan_less, 4, (1,)),
        ("uniform", quarter, REFRESH, (1,)),
    ):
        for batch in batches:
            record = _decoding(unstacked, held_out, new, batch, shares, refresh)
            write({"budget": name, "refresh": refresh, **record})


def _headline(
    plan: Plan, selectors: tuple[str, ...], shape: tuple[int, ...], implementation: str | None
) -> Iterator[Record]:
    B, T, N, H = shape
    block = plan.terms.block
    q, k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(3))
    dense_seconds = time_queued(jax.jit(dense_causal), q, k, v).median_seconds
    for selector in selectors:

        def select(q: Array, k: Array, counts: Array, selector: str = selector) -> BlockMask:
            scores = jax.vmap(lambda q, k: block_scores.estimate(selector, q, k, block))(q, k)
            return selection.to_mask(selection.keep_top(scores, counts), T, block)

        def both(q: Array, k: Array, v: Array, counts: Array, select: Any = select) -> Array:
            mask = select(q, k, counts)
            return dot_product_attention(q, k, v, mask=mask, implementation=implementation)

        for name, counts in _budgets(plan, T, N).items():
            alone = time_queued(jax.jit(select), q, k, counts).median_seconds
            together = time_queued(jax.jit(both), q, k, v, counts).median_seconds
            yield {
                "kind": "headline",
                "shape": "·".join(map(str, (B, N, T, H))),
                "block": block,
                "selector": selector,
                "budget": name,
                "density_ratio": float(jax.jit(select)(q, k, counts).density()),
                "dense": "cudnn" if jax.default_backend() == "gpu" else "jax.nn",
                "dense_seconds": dense_seconds,
                "selection_seconds": alone,
                "selection_and_sparse_seconds": together,
                "selection_over_dense": alone / dense_seconds,
                "selection_and_sparse_over_dense": together / dense_seconds,
            }


def _budgets(plan: Plan, T: int, N: int) -> dict[str, Array]:
    """Counts [N, T / block]: a uniform budget, and the budgets of N heads of the plan.

    The N heads are evenly spaced in the ranking by density.
    """
    n, density = T // plan.terms.block, plan.terms.density
    every = np.asarray(plan.at(T).counts).reshape(-1, n)
    ranks = np.linspace(0, len(every) - 1, N).round().astype(int)
    heads = np.argsort(every.sum(-1), kind="stable")[ranks]
    return {
        "uniform": jnp.asarray(budget.uniform(density, 1, N, n).counts[0]),
        plan.terms.policy: jnp.asarray(
            budget.filled(every[heads][None].astype(float), density, n).counts[0]
        ),
    }


def _on_activations(
    subject: Observer, plan: Plan, tokens: np.ndarray, implementation: str | None
) -> Record:
    """Time and quality of the plan's masks on the dense model's q, k, v, layer by layer."""
    layers = jnp.arange(subject.layers)
    q, k, v, kernel = activations(subject, tokens)

    def dense(q: Array, k: Array, v: Array) -> Array:
        return lax.map(lambda x: dense_causal(*x), (q, k, v))

    def sparse(q: Array, k: Array, v: Array) -> Array:
        def one(x: Any) -> Array:
            layer, q, k, v = x
            mask = plan.mask(layer, q, k)
            return dot_product_attention(q, k, v, mask=mask, implementation=implementation)

        return lax.map(one, (layers, q, k, v))

    @jax.jit
    def quality(q: Array, k: Array, v: Array, kernel: Array) -> tuple[Array, Array, Array]:
        """(KL [layers], squared error [layers], blocks kept) of one document."""

        def one(x: Any) -> Any:
            layer, q, k, v, kernel = x
            blocks = plan.blocks(layer, q[None], k[None])
            metrics = compare(q, k, v, kernel, blocks, block=plan.terms.block)
            return metrics.kl.mean(), metrics.error[0], blocks.sum()

        return lax.map(one, (layers, q, k, v, kernel))

    found = [quality(q[:, b], k[:, b], v[:, b], kernel) for b in range(len(tokens))]
    kl, kl_error = mean_and_error([float(x[0].mean()) for x in found])
    error, error_error = mean_and_error([float(jnp.sqrt(x[1].mean())) for x in found])
    n = plan.counts.shape[-1]
    kept = np.mean([float(x[2].sum()) for x in found])
    dense_seconds = time_queued(jax.jit(dense), q, k, v).median_seconds / subject.layers
    seconds = time_queued(jax.jit(sparse), q, k, v).median_seconds / subject.layers
    return {
        "kind": "activations",
        "what": "means per layer on held-out documents. The plan selects masks from the dense "
        "model's q and k; time, KL and error are measured with these masks on the same q, k, v",
        "shape": "·".join(map(str, (q.shape[1], q.shape[3], q.shape[2], q.shape[4]))),
        "kv_heads": k.shape[3],
        "block": plan.terms.block,
        "selector": plan.terms.selector,
        "budget": plan.terms.policy,
        "density_ratio": kept / (subject.layers * subject.heads * n * (n + 1) / 2),
        "dense": "cudnn" if jax.default_backend() == "gpu" else "jax.nn",
        "dense_seconds": dense_seconds,
        "selection_and_sparse_seconds": seconds,
        "selection_and_sparse_over_dense": seconds / dense_seconds,
        "kl": kl,
        "kl_standard_error": kl_error,
        "error": error,
        "error_standard_error": error_error,
    }


def _decoding(
    model: Transformer,
    documents: list[np.ndarray],
    new: int,
    batch: int,
    shares: np.ndarray | None,
    refresh: int,
) -> Record:
    """Tokens per second after compilation, and logit KL against decoding with the full cache.

    `shares` [layers, N] are the shares of the cached blocks that each head reads; None is all.
    """
    prompts = [documents[i % len(documents)][:-new].tolist() for i in range(batch)]
    burst = 16
    how: dict[str, Any] = {"budget": shares, "refresh": refresh, "burst": burst}
    tokens = stream(model, prompts, max_tokens=new, stop=(), **how)
    times = [time.perf_counter() for _ in tokens]
    seconds = float(np.median(np.diff(times)[1:]))
    record: Record = {
        "kind": "decode",
        "tokens": len(documents[0]),
        "batch": batch,
        "density_ratio": 1.0 if shares is None else float(np.mean(shares)),
        "tokens_per_second": batch * burst / seconds,
    }
    if shares is None or batch > 1:
        return record
    compared = [compare_decoding(model, tokens, new, shares, refresh) for tokens in documents]
    record["logit_kl"], record["logit_kl_standard_error"] = mean_and_error(
        [float(x.logit_kl) for x in compared]
    )
    record["perplexity_gap"], record["perplexity_gap_standard_error"] = mean_and_error(
        [float(np.expm1(x.loss - x.dense_loss)) for x in compared]
    )
    return record


COMMANDS: dict[str, Callable[..., Any]] = {
    "prepare": programs.stopping()(prepare),
    "profile": profile,
    "table": table,
    "speed": speed,
}

if __name__ == "__main__":
    import tyro

    tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="python -m xsake.bench.suites.hads_table")
