"""The table: every method at every density on the same documents, with standard errors.

    for every density:  methods ─┬─ on the dense pass's q, k, v:  kl, recall, error
                                 └─ end to end, one sparse pass:  logit_kl, perplexity_gap

Rows are written to JSON after each density; a second run takes up where the first ended.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import selection
from xsake.evaluate.methods import (
    Activations,
    Method,
    at_density,
    left_out,
    places_in,
    scores_of,
    sources_of,
)
from xsake.evaluate.quality import Quality, compare, compare_predictions, mean_and_error
from xsake.hads import Profile, rows
from xsake.hads.profile import hash_of
from xsake.model.observer import Observer

COLUMNS = ("kl", "recall", "error", "logit_kl", "perplexity_gap")
SCHEMA = 1


def measure_methods(
    subject: Observer,
    methods: Sequence[Method],
    documents: Sequence[np.ndarray],
    block: int,
    tell: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """One row for each method: every column's mean over documents and its standard error.

    error is the root of the mean over layers of the squared relative error. Realised density is
    counted from the masks, over all documents.
    """
    tell = tell or (lambda what: None)
    bare = [method.anonymous() for method in methods]
    together = jax.tree.map(lambda *xs: jnp.stack(xs), *(_plain(x) for x in bare))
    corrected = jnp.array([method.corrected for method in methods])
    how: Any = {"subject": subject, "block": block, "sources": sources_of(methods)}
    found: list[dict[str, list[float]]] = [{name: [] for name in COLUMNS} for _ in methods]
    by_head = []
    kept = np.zeros(len(methods))
    for number, tokens in enumerate(documents):
        quality, counts = _dense_pass(subject.weights, tokens, together, corrected, **how)
        quality = jax.tree.map(np.asarray, quality)
        kept += np.asarray(counts)
        by_head.append(quality)
        dense = _dense_hidden(subject.weights, tokens, subject=subject)
        for m, method in enumerate(bare):
            said = _sparse_pass(subject.weights, tokens, dense, method, **how)
            figures = {
                "kl": quality.kl[:, m].mean(),
                "recall": quality.recall[:, m].mean(),
                "error": np.sqrt(quality.error[:, m].mean()),
                "logit_kl": said.logit_kl,
                "perplexity_gap": np.expm1(float(said.loss) - float(said.dense_loss)),
                "loss": said.loss,
                "dense_loss": said.dense_loss,
            }
            for name, value in figures.items():
                found[m].setdefault(name, []).append(float(value))
            tell(f"document {number + 1} of {len(documents)}: {methods[m].name}")
    n = rows.count_blocks(len(documents[0]), block)
    allowed = subject.layers * subject.heads * n * (n + 1) / 2 * len(documents)
    mean = jax.tree.map(lambda *xs: np.mean(xs, 0), *by_head)
    return [
        _row(method, figures, kept[m] / allowed, Quality(*(x[:, m] for x in mean)))
        for m, (method, figures) in enumerate(zip(methods, found, strict=True))
    ]


def _plain(method: Method) -> Method:
    return Method(method.counts, method.given, method.source)


def _row(
    method: Method, figures: dict[str, list[float]], density: float, mean: Quality
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "method": method.name,
        "kind": method.kind,
        "realised_density_ratio": float(density),
    }
    for name, values in figures.items():
        row[name], row[f"{name}_standard_error"] = mean_and_error(values)
        row[f"{name}_by_document"] = values
    row["kl_by_layer_and_head"] = np.round(np.asarray(mean.kl, np.float64), 6).tolist()
    row["error_by_layer"] = np.sqrt(np.asarray(mean.error, np.float64)).round(6).tolist()
    return row


@functools.partial(jax.jit, static_argnames=("subject", "block", "sources"))
def _dense_pass(
    weights: Any,
    tokens: Any,
    methods: Method,
    corrected: Array,
    *,
    subject: Observer,
    block: int,
    sources: tuple[str, ...],
) -> tuple[Quality, Array]:
    """Quality of all methods, [layers, M, …], and the blocks that each keeps in all."""
    M, layers, N, _ = methods.counts.shape

    def fold(layer: Any, seen: Any, carry: Any) -> Any:
        given = Activations(seen.q[0], seen.k[0], seen.v[0], seen.kernel)
        ones = jnp.arange(M)
        blocks = methods.given[ones, layer]
        if sources[1:]:
            looked = jnp.stack([scores_of(name, given, block) for name in sources[1:]])
            place = jnp.maximum(places_in(sources)[methods.source] - 1, 0)
            kept = selection.keep_top(looked[place], methods.counts[ones, layer])
            blocks = jnp.where((methods.source == 0)[:, None, None, None], blocks, kept)
        quality = compare(*given, blocks, block=block, corrected=corrected)
        every, counts = carry
        every = jax.tree.map(lambda all_, x: all_.at[layer].set(x), every, quality)
        return every, counts + blocks.sum((1, 2, 3), dtype=jnp.int32)

    zero = jnp.zeros((layers, M, N))
    start = Quality(zero, zero, zero, zero[..., 0]), jnp.zeros(M, jnp.int32)
    return subject.observe(weights, tokens[None], fold, start)


@functools.partial(jax.jit, static_argnames=("subject",))
def _dense_hidden(weights: Any, tokens: Any, *, subject: Observer) -> Array:
    return subject.hidden(weights, tokens)


@functools.partial(jax.jit, static_argnames=("subject", "block", "sources"))
def _sparse_pass(
    weights: Any,
    tokens: Any,
    dense: Array,
    method: Method,
    *,
    subject: Observer,
    block: int,
    sources: tuple[str, ...],
) -> Any:
    def choose(layer: Any, q: Array, k: Array, v: Array, kernel: Array) -> Any:
        blocks = method.blocks(layer, Activations(q[0], k[0], v[0], kernel), block, sources)
        return selection.to_mask(blocks, q.shape[1], block)

    sparse = subject.sparse_hidden(weights, tokens, choose, method.corrected)
    return compare_predictions(
        dense, sparse, tokens, functools.partial(subject.logits, weights), at_once=512
    )


# -------------------------------------------------------------------------------------------- table


def run_table(
    subject: Observer,
    profile: Profile,
    documents: Sequence[np.ndarray],
    densities: Sequence[float],
    out: Path,
    *,
    others: dict[str, Profile] | None = None,
    provenance: dict[str, Any] | None = None,
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measures every density that `out` does not hold yet, and writes JSON and Markdown.

    `out` is the JSON file; the Markdown stands beside it with the suffix .md.
    """
    facts = {
        "schema": SCHEMA,
        "model_hash": subject.hash,
        "profile_data_hash": profile.facts.data_hash,
        "data_hash": hash_of(documents),
        "length": len(documents[0]),
        "documents": len(documents),
        "block": profile.facts.block,
        "calibration": {
            "length": profile.facts.length,
            "documents": profile.facts.documents,
            "agreement": profile.agreement(),
        },
        "measured_on": {
            "kl, recall, error": "the dense model's activations",
            "logit_kl, perplexity_gap": "the sparse model end to end",
        },
    }
    if profile.facts.model_hash != subject.hash:
        raise ValueError(
            f"the profile is of model {profile.facts.model_hash}, this is {subject.hash}; "
            "calibrate this one with `xsake calibrate`"
        )
    table = _taken_up(out, facts)
    for density in densities:
        if str(density) in table["densities"]:
            continue
        began = time.perf_counter()
        methods = at_density(profile, density, len(documents[0]), others)
        found = measure_methods(
            subject,
            methods,
            documents,
            profile.facts.block,
            None if tell is None else functools.partial(_tell, tell, density),
        )
        seconds = time.perf_counter() - began
        table["densities"][str(density)] = {
            "seconds": seconds,
            "rows": found,
            "left_out": left_out(profile, others),
        }
        table["provenance"] = provenance or {}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(to_json(table))
        out.with_suffix(".md").write_text(to_markdown(table))
    return table


def _tell(tell: Callable[[str], None], density: float, what: str) -> None:
    tell(f"density {density}, {what}")


def _taken_up(out: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The table in `out` if it is of the same model, text and profile; else a new one."""
    if out.is_file():
        table = json.loads(out.read_text())
        same = ("schema", "model_hash", "profile_data_hash", "data_hash", "length", "block")
        differs = [name for name in same if table.get(name) != facts[name]]
        if differs:
            raise ValueError(
                f"{out} holds a table that differs in {', '.join(differs)}; name another file"
            )
        return table
    return {**facts, "densities": {}}


def to_json(table: dict[str, Any]) -> str:
    """The table as JSON, lists of numbers on one line each."""
    spread = json.dumps(table, indent=1, allow_nan=False)
    return re.sub(r"\[[-+\d.e,\s]*\]", lambda found: " ".join(found[0].split()), spread) + "\n"


def to_markdown(table: dict[str, Any]) -> str:
    """The rows as Markdown, one table for each density, ordered by KL."""
    size = f"{table['documents']} documents of {table['length']:,} tokens"
    how = (
        "KL, recall and output error are taken on the dense model's activations, logit KL and "
        "perplexity on the sparse model end to end. ± is the standard error over documents."
    )
    head = "method | knows | density | attention KL | mass recall | output error | logit KL"
    lines = [f"# Methods at equal density: {size}, blocks of {table['block']}", "", how]
    for density, part in sorted(table["densities"].items(), key=lambda item: float(item[0])):
        lines += ["", f"## density {density}", "", f"| {head} | perplexity gap |", "|---" * 8 + "|"]
        for row in sorted(part["rows"], key=lambda row: row["kl"]):
            cells = [row["method"], row["kind"], f"{row['realised_density_ratio']:.4f}"]
            for name in COLUMNS:
                scale, digits, unit = (100, 2, " %") if name == "perplexity_gap" else (1, 4, "")
                error = row[f"{name}_standard_error"]
                shown = "" if error is None else f" ± {scale * error:.{digits}f}"
                cells.append(f"{scale * row[name]:.{digits}f}{shown}{unit}")
            lines.append("| " + " | ".join(cells) + " |")
        if part["left_out"]:
            lines += ["", f"Left out, for want of a cost curve: {', '.join(part['left_out'])}."]
    return "\n".join(lines) + "\n"
