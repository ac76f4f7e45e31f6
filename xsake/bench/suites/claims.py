"""What the earlier XSAKE claimed, measured: python -m xsake.bench.suites.claims COMMAND.

    speed       random q, k, v ─ dense attention, block lists, selection and block lists
                → time and temporary memory → JSON
    baselines   a model, its profile, held-out documents ─ fixed patterns, random blocks by entropy,
                HADS, all at one density → attention KL, perplexity gap, time → JSON

Its page gave a latency and a memory at 4,096 tokens, a KL and a perplexity gap at 43% of the
blocks, and a table of patterns at different densities. Here all methods have the same density.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import block_scores, dot_product_attention
from xsake.bench import programs
from xsake.bench.checks import ERROR_LIMIT
from xsake.bench.method_times import check_is_plain, time_attention
from xsake.bench.peers import dense_causal
from xsake.bench.suites import Record
from xsake.bench.timing import (
    compiled_together,
    provenance,
    temporary_bytes,
    time_calls,
    time_interleaved,
    time_on_device,
)
from xsake.block_mask import BlockMask
from xsake.data.documents import load_documents
from xsake.evaluate import methods
from xsake.evaluate.table import measure_methods, to_json
from xsake.hads import Profile, budget
from xsake.model import huggingface
from xsake.model.observer import Observer

METHODS = (
    "sliding_window",
    "sink_window",
    "longformer",
    "bigbird",
    "strided",
    "random",
    "seed_entropy",
    "mean_query/output",
    "outlier_queries/output",
)
FIGURES = "kl", "logit_kl", "error", "perplexity_gap"


def _write(out: Path, rows: list[Record], **facts: Any) -> None:
    out.write_text(to_json({"provenance": provenance() | facts, "rows": rows}))


def speed(
    out: Path,
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096),
    heads: int = 12,
    head_size: int = 64,
    batch: int = 1,
    density: float = 0.43,
    block: int = 64,
    selectors: tuple[str, ...] = ("mean_query", "outlier_queries"),
    dtype: str = "float32",
) -> None:
    """Times causal attention on random inputs, and XLA's analysis of its temporary memory.

    Dense attention is cuDNN's on a GPU and jax.nn's default elsewhere. On a GPU calls are timed in
    a queue, and their kernels by the profiler. Budgets are uniform. The output of the block lists
    is compared with the definition first.

    Args:
      out: the JSON file to write.
      lengths: tokens.
      heads: of q, k and v.
      head_size: of q, k and v.
      batch: of q, k and v.
      density: of the block lists.
      block: tokens per block.
      selectors: what selects the blocks.
      dtype: of q, k and v.
    """
    programs.check_outputs(out)
    with programs.stopping():
        budgets = {T: budget.uniform(density, 1, heads, -(-T // block)) for T in lengths}
    rows: list[Record] = []
    for T in lengths:
        q, k, v = (
            jax.random.normal(jax.random.key(i), (batch, T, heads, head_size), dtype)
            for i in range(3)
        )
        counts = jnp.asarray(budgets[T].counts[0])
        facts = {"shape": f"{batch}·{heads}·{T}·{head_size}", "length": T, "block": block}
        for record in _timed(q, k, v, counts, block, selectors):
            print(facts | record, flush=True)
            rows.append({"kind": "speed", "dtype": dtype, **facts, **record})
        _write(out, rows)


def _timed(
    q: Array, k: Array, v: Array, counts: Array, block: int, selectors: tuple[str, ...]
) -> list[Record]:
    mask: BlockMask = jax.jit(block_scores.select, static_argnames=("selector", "block"))(
        selectors[0], q, k, counts, block
    )
    density = float(mask.density())
    _check(q, k, v, mask)

    def listed(q: Array, k: Array, v: Array, mask: BlockMask) -> Array:
        return dot_product_attention(q, k, v, mask=mask)

    def selected(selector: str) -> Callable[..., Array]:
        def run(q: Array, k: Array, v: Array, counts: Array) -> Array:
            lists = block_scores.select(selector, q, k, counts, block)
            return dot_product_attention(q, k, v, mask=lists)

        return run

    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "dense, jax.nn": (dense_causal, (q, k, v)),
        "dense, xsake": (lambda *x: dot_product_attention(*x, is_causal=True), (q, k, v)),
        "block lists": (listed, (q, k, v, mask)),
        **{f"{x} and block lists": (selected(x), (q, k, v, counts)) for x in selectors},
    }
    ready = compiled_together(calls)
    compiled = {name: (ready[name], args) for name, (_, args) in calls.items()}
    on_cpu = jax.default_backend() == "cpu"
    times = time_calls(compiled) if on_cpu else time_interleaved(compiled)
    records: list[Record] = [
        {
            "form": name,
            "density": 1.0 if name.startswith("dense") else density,
            "seconds": times[name].median_seconds,
            "over_dense": times[name].over(times["dense, jax.nn"]),
            "temporary_bytes": temporary_bytes(fn, *args),
        }
        for name, (fn, args) in calls.items()
    ]
    if jax.default_backend() != "gpu":
        return records
    # A call of little work ends before the host has queued the next one.
    kernels = {name: time_on_device(fn, *args) for name, (fn, args) in compiled.items()}
    return [
        record
        | {
            "kernel_seconds": kernels[record["form"]],
            "kernels_over_dense": kernels[record["form"]] / kernels["dense, jax.nn"],
        }
        for record in records
    ]


def _check(q: Array, k: Array, v: Array, mask: BlockMask) -> None:
    """Raises unless block lists give what the definition gives, in float32."""
    wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k, v))
    want = dot_product_attention(wide_q, wide_k, wide_v, mask=mask, implementation="reference")
    away = jnp.abs(dot_product_attention(q, k, v, mask=mask) - want).max()
    error, limit = float(away / jnp.abs(want).max()), ERROR_LIMIT[str(q.dtype)]
    if not error <= limit:
        raise ValueError(f"an output is off by {error} of the largest; the limit is {limit}")


def baselines(
    model: Path,
    documents: Path,
    profile: Path,
    out: Path,
    density: float = 0.43,
    count: int = 4,
    names: tuple[str, ...] = METHODS,
    repeats: int = 3,
    dtype: str = "float32",
) -> None:
    """Measures quality and attention time of each method at one density, on a model.

    Args:
      model: a folder of safetensors or a .gguf file.
      documents: an .npy file of held-out token ids, [documents, tokens].
      profile: what budgets are made from; its length is that of the documents.
      out: the JSON file to write.
      density: of every method.
      count: documents.
      names: the methods.
      repeats: of the timing, on the first document.
      dtype: the model's compute dtype.
    """
    programs.check_outputs(out)
    with programs.stopping():
        known = Profile.load(profile)
        tokens = np.stack(load_documents([documents], None, known.facts.length, count))
        loaded = huggingface.load(model, dtype=dtype, tokenizer=False).model
        check_is_plain(loaded.config)
        built = methods.at_density(known, density, known.facts.length, names=names)
    subject, block = Observer(loaded), known.facts.block
    times = time_attention(subject, tokens[0], built, block, repeats)
    dense = times["dense"]
    rows: list[Record] = [{"kind": "baselines", "method": "dense", **_seconds(dense, dense)}]
    for row in measure_methods(subject, built, list(tokens), block, lambda x: print(x, flush=True)):
        figures = {
            f"{x}{end}": row[f"{x}{end}"] for x in FIGURES for end in ("", "_standard_error")
        }
        rows.append(
            {
                "kind": "baselines",
                "method": row["method"],
                "density": row["realised_density_ratio"],
                **_seconds(times[row["method"]], dense),
                **figures,
            }
        )
    _write(out, rows, model=model.name, documents=count, length=known.facts.length, block=block)


def _seconds(own: Any, dense: Any) -> Record:
    return {"seconds": own.median_seconds, "over_dense": own.over(dense)}


COMMANDS: dict[str, Any] = {"speed": speed, "baselines": baselines}

if __name__ == "__main__":
    import tyro

    tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="python -m xsake.bench.suites.claims")
