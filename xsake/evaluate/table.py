"""The table: every method at every density on the same documents, with standard errors.

    for every density:  methods ─┬─ on the dense pass's q, k, v:  kl, recall, error
                                 └─ end to end, one sparse pass:  logit_kl, perplexity_gap

The file is written after each density. What it has, by density and method, is not measured again;
rerun the same command to resume.
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
from jaxtyping import Float, Int, PyTree

from xsake import _files
from xsake.evaluate import settings
from xsake.evaluate.methods import (
    Activations,
    Method,
    at_density,
    best_blocks,
    check_names,
    check_others,
    gradients_of,
    indices_in,
    left_out,
    names_of,
    needing_gradients,
    scores_of,
    sources_of,
    why_not_density,
)
from xsake.evaluate.quality import (
    Predictions,
    Quality,
    compare,
    compare_predictions,
    mean_and_error,
)
from xsake.hads import Profile, row_blocks
from xsake.hads.chunks import PLAIN
from xsake.hads.files import hash_of
from xsake.hads.profile import check_held_out
from xsake.hads.subject import Subject

COLUMNS = ("kl", "recall", "error", "logit_kl", "perplexity_gap")
SCHEMA = 1
WHAT, TYPES = "a table of methods", {"schema": int, "densities": dict}  # of the file
# of what is written, not compared with a file that is resumed: other facts imply it
DERIVED = ("profile_data_hash", "documents", "calibration", "measured_on")


def measure_methods(
    subject: Subject,
    methods: Sequence[Method],
    documents: Sequence[Int[np.ndarray, " T"]],
    block: int,
    report: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """One record for each method: every column's mean over documents and its standard error.

    error is the root of the mean over layers of the squared relative error. Realised density is
    counted from the masks, over all documents.
    """
    report = report or (lambda what: None)
    bare = [method.anonymous() for method in methods]
    together = jax.tree.map(lambda *xs: jnp.stack(xs), *(_plain(x) for x in bare))
    corrected = jnp.array([method.corrected for method in methods])
    limits = tuple((method.band, method.top_p) for method in methods)
    how: Any = {"subject": subject.bare, "block": block, "sources": sources_of(methods)}
    found: list[dict[str, list[float]]] = [{name: [] for name in COLUMNS} for _ in methods]
    by_head = []
    kept = np.zeros(len(methods))
    for number, tokens in enumerate(documents):
        slopes = _slopes(subject.weights, tokens, subject=subject.bare, sources=how["sources"])
        quality, counts = _dense_pass(
            subject.weights, tokens, together, corrected, slopes, limits=limits, **how
        )
        quality = jax.tree.map(np.asarray, quality)
        kept += np.asarray(counts)
        by_head.append(quality)
        dense = _dense_hidden(subject.weights, tokens, subject=subject.bare)
        for m, method in enumerate(bare):
            predictions = _sparse_pass(subject.weights, tokens, dense, method, slopes, **how)
            figures = {
                "kl": quality.kl[:, m].mean(),
                "recall": quality.recall[:, m].mean(),
                "error": np.sqrt(quality.error[:, m].mean()),
                "logit_kl": predictions.logit_kl,
                "perplexity_gap": np.expm1(float(predictions.loss) - float(predictions.dense_loss)),
                "loss": predictions.loss,
                "dense_loss": predictions.dense_loss,
            }
            for name, value in figures.items():
                found[m].setdefault(name, []).append(float(value))
            report(f"document {number + 1} of {len(documents)}: {methods[m].name}")
    n = row_blocks.count_blocks(len(documents[0]), block)
    allowed = subject.layers * subject.heads * n * (n + 1) / 2 * len(documents)
    mean = jax.tree.map(lambda *xs: np.mean(xs, 0), *by_head)
    return [
        _record(method, figures, kept[m] / allowed, Quality(*(x[:, m] for x in mean)))
        for m, (method, figures) in enumerate(zip(methods, found, strict=True))
    ]


def measure_losses(
    subject: Subject,
    methods: Sequence[Method],
    documents: Sequence[Int[np.ndarray, " T"]],
    block: int,
    report: Callable[[int], None] | None = None,
) -> tuple[Float[np.ndarray, "M documents"], Float[np.ndarray, " documents"]]:
    """Loss of each method on each document, end to end, and that of dense attention; in nats.

    Without the metrics of `measure_methods`, whose dense pass takes most of the time. `report` gets
    the number of documents that are done.
    """
    bare = [method.anonymous() for method in methods]
    how: Any = {"subject": subject.bare, "block": block, "sources": sources_of(methods)}
    found = np.zeros((len(methods), len(documents)))
    dense_losses = np.zeros(len(documents))
    for number, tokens in enumerate(documents):
        slopes = _slopes(subject.weights, tokens, subject=subject.bare, sources=how["sources"])
        dense = _dense_hidden(subject.weights, tokens, subject=subject.bare)
        for m, method in enumerate(bare):
            predictions = _sparse_pass(subject.weights, tokens, dense, method, slopes, **how)
            found[m, number] = predictions.loss
            dense_losses[number] = predictions.dense_loss
        if report is not None:
            report(number + 1)
    return found, dense_losses


def _plain(method: Method) -> Method:
    return Method(method.counts, method.given, method.source)


def _record(
    method: Method, figures: dict[str, list[float]], density: float, mean: Quality
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "method": method.name,
        "kind": method.kind,
        "realised_density_ratio": float(density),
    }
    for name, values in figures.items():
        record[name], record[f"{name}_standard_error"] = mean_and_error(values)
        record[f"{name}_by_document"] = values
    record["kl_by_layer_and_head"] = np.round(np.asarray(mean.kl, np.float64), 6).tolist()
    record["error_by_layer"] = np.sqrt(np.asarray(mean.error, np.float64)).round(6).tolist()
    return record


@functools.partial(jax.jit, static_argnames=("subject", "block", "sources", "limits"))
def _dense_pass(
    weights: PyTree,
    tokens: Int[Array, " T"],
    methods: Method,
    corrected: Array,
    slopes: Float[Array, "layers T N Hv"] | None = None,
    *,
    subject: Subject,
    block: int,
    sources: tuple[str, ...],
    limits: tuple[tuple[int, float | None], ...],  # (band, top_p) of the methods
) -> tuple[Quality, Array]:
    """Quality of all methods, [layers, M, …], and the number of blocks that each keeps."""
    M, layers, N, _ = methods.counts.shape

    def fold(layer: Any, seen: Any, carry: Any) -> Any:
        softmax = getattr(seen, "softmax", PLAIN)
        whole = (seen.q, seen.k, seen.v, seen.kernel)
        given = Activations.of_layer(layer, *whole, softmax, gradients=slopes)
        each = jnp.arange(M)
        blocks = methods.given[each, layer]
        if sources[1:]:
            scores = jnp.stack([scores_of(name, given, block) for name in sources[1:]])
            index = jnp.maximum(indices_in(sources)[methods.source] - 1, 0)
            kept = blocks
            for limit in dict.fromkeys(limits):  # static; methods of equal ones at once
                those = np.array([m for m, own in enumerate(limits) if own == limit])
                best = best_blocks(scores[index[those]], methods.counts[those, layer], *limit)
                kept = kept.at[those].set(best)
            blocks = jnp.where((methods.source == 0)[:, None, None, None], blocks, kept)
        quality = compare(*given[:4], blocks, block=block, corrected=corrected, softmax=softmax)
        by_layer, counts = carry
        by_layer = jax.tree.map(lambda xs, x: xs.at[layer].set(x), by_layer, quality)
        return by_layer, counts + blocks.sum((1, 2, 3), dtype=jnp.int32)

    zero = jnp.zeros((layers, M, N))
    start = Quality(zero, zero, zero, zero[..., 0]), jnp.zeros(M, jnp.int32)
    return subject.observe(weights, tokens[None], fold, start)


@functools.partial(jax.jit, static_argnames=("subject", "sources"))
def _slopes(
    weights: PyTree, tokens: Int[Array, " T"], *, subject: Subject, sources: tuple[str, ...]
) -> Float[Array, "layers T N Hv"] | None:
    return gradients_of(subject, weights, tokens, sources)


@functools.partial(jax.jit, static_argnames=("subject",))
def _dense_hidden(
    weights: PyTree, tokens: Int[Array, " T"], *, subject: Subject
) -> Float[Array, "T width"]:
    return subject.hidden(weights, tokens)


@functools.partial(jax.jit, static_argnames=("subject", "block", "sources"))
def _sparse_pass(
    weights: PyTree,
    tokens: Int[Array, " T"],
    dense: Float[Array, "T width"],
    method: Method,
    slopes: Float[Array, "layers T N Hv"] | None = None,
    *,
    subject: Subject,
    block: int,
    sources: tuple[str, ...],
) -> Predictions:
    """Predictions of the model under one method's masks, compared with the dense ones."""
    choose = method.chooser(block, sources, slopes)
    sparse = subject.sparse_hidden(weights, tokens, choose, method.corrected)
    return compare_predictions(
        dense, sparse, tokens, functools.partial(subject.logits, weights), at_once=512
    )


# -------------------------------------------------------------------------------------------- table


def run_table(
    subject: Subject,
    profile: Profile,
    documents: Sequence[Int[np.ndarray, " T"]],
    densities: Sequence[float],
    out: Path,
    *,
    others: dict[str, Profile] | None = None,
    only: Sequence[str] = (),
    provenance: dict[str, Any] | None = None,
    report: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measures what the JSON file `out` does not hold yet, by density and method, and updates it.

    The same table is written as Markdown to a file of that name with the suffix .md. `only` names
    the methods to measure; default all that this model and these profiles allow. The documents that
    a profile was calibrated on are refused, and so is a file that was measured with other settings.
    Densities below that of the forced blocks are left out, which the file records.
    """
    if not densities:
        raise ValueError("no density is given to measure at")
    check_others(profile, others or {})
    for each in (profile, *(others or {}).values()):
        check_held_out(documents, each.facts.data_hash)
    table = _resumed(out, _facts(subject, profile, documents, others or {}))
    wanted = list(only or names_of(profile, others))
    check_names(wanted, {"": profile, **(others or {})})
    n = row_blocks.count_blocks(len(documents[0]), profile.facts.block)
    band = max(each.facts.band for each in (profile, *(others or {}).values()))
    for density in densities:
        if (why := why_not_density(density, n, band)) is not None:
            if str(density) not in table["densities"]:
                table["infeasible"] |= {str(density): why}
            elif report is not None:  # measured by a run of profiles with a narrower band
                report(f"left out now: {why}")
            continue
        table["infeasible"].pop(str(density), None)  # of a run of profiles with a wider band
        empty = {"seconds": 0.0, "rows": [], "left_out": []}
        part = table["densities"].get(str(density), empty)
        known = {row["method"] for row in part["rows"]}
        impossible = [] if only else needing_gradients(subject, wanted)
        names = [name for name in wanted if name not in known and name not in impossible]
        if not names:
            continue
        began = time.perf_counter()
        found = measure_methods(
            subject,
            at_density(profile, density, len(documents[0]), others, names),
            documents,
            profile.facts.block,
            None if report is None else functools.partial(_report, report, density),
        )
        table["densities"][str(density)] = {
            "seconds": part["seconds"] + time.perf_counter() - began,
            "rows": part["rows"] + found,
            "left_out": list(
                dict.fromkeys(part["left_out"] + left_out(profile, others) + impossible)
            ),
        }
        table["provenance"] = provenance or {}
        _write(table, out)
    if not table["densities"]:
        raise ValueError(
            f"no density can be measured: {'; '.join(table['infeasible'].values())}; give higher "
            "ones, or longer documents"
        )
    _write(table, out)
    return table


def _write(table: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with _files.replaced(out) as part:
        part.write_text(to_json(table))
    out.with_suffix(".md").write_text(to_markdown(table))


def check_resumable(out: Path, facts: dict[str, Any]) -> None:
    """Raises if the file `out` has other settings than these, which may be some of a run's."""
    settings.resumed(out, WHAT, TYPES, {"schema": SCHEMA, **facts})


def facts_of(profile: Profile, others: dict[str, Profile]) -> dict[str, Any]:
    """What a table has of its profiles; those by label may be added."""
    labelled = {label: settings.of_source(each) for label, each in others.items()}
    return {"profile": settings.of_source(profile), "others": labelled}


def facts_of_run(subject: Subject, documents: Sequence[Int[np.ndarray, " T"]]) -> dict[str, Any]:
    """What a table has of its model and its documents."""
    return {
        "model_hash": subject.hash,
        "data_hash": hash_of(documents),
        "length": len(documents[0]),
        "documents": len(documents),
        **settings.of_subject(subject),
    }


def _facts(
    subject: Subject,
    profile: Profile,
    documents: Sequence[Int[np.ndarray, " T"]],
    others: dict[str, Profile],
) -> dict[str, Any]:
    """What a table is measured on; raises if the profile is of another model."""
    profile.check_model(subject.hash)
    return {
        "schema": SCHEMA,
        **facts_of_run(subject, documents),
        "profile_data_hash": profile.facts.data_hash,
        "block": profile.facts.block,
        **facts_of(profile, others),
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


def _report(report: Callable[[str], None], density: float, what: str) -> None:
    report(f"density {density}, {what}")


def _resumed(out: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The table in `out`, or a new one; raises if `out` was measured with other settings."""
    own = {name: facts[name] for name in facts if name not in DERIVED}
    table = settings.resumed(out, WHAT, TYPES, own)
    if table is None:
        return {**facts, "densities": {}, "infeasible": {}}
    table["others"] |= facts["others"]
    table.setdefault("infeasible", {})
    return table


def to_json(table: dict[str, Any]) -> str:
    """The table as JSON, lists of numbers on one line each."""
    spread = json.dumps(table, indent=1, allow_nan=False)
    return re.sub(r"\[[-+\d.e,\s]*\]", lambda found: " ".join(found[0].split()), spread) + "\n"


def to_markdown(table: dict[str, Any]) -> str:
    """The records as Markdown, one table for each density, ordered by KL."""
    size = f"{table['documents']} documents of {table['length']:,} tokens"
    how = (
        "KL, recall and output error are measured on the dense model's activations, logit KL and "
        "perplexity on the sparse model end to end. ± is the standard error over documents."
    )
    head = (
        "method | information used | density | attention KL | mass recall | output error | logit KL"
    )
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
            skipped = ", ".join(part["left_out"])
            reason = "no cost curve in the profile"
            if "oracle/loss" in part["left_out"]:
                reason += " or, for oracle/loss, no gradients of the model's loss"
            lines += ["", f"Skipped, {reason}: {skipped}."]
    lines += [x for why in table.get("infeasible", {}).values() for x in ("", f"Left out: {why}.")]
    return "\n".join(lines) + "\n"
