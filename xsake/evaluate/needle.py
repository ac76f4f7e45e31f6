"""Long-context tasks: how often each method gives a prompt's answer, and how likely it finds it.

    for every length and family:  prompts ─┬─ dense                    accuracy < 0.5: left out
                                           └─ every method × density   paired with dense by prompt

The answer is teacher-forced: its tokens are part of the prompt, and each is predicted from those
before it. accuracy is the share of prompts in which every token of the answer is the most likely
one; loss is -ln p of the answer in nats per token, mean over prompts. The file is written after
each density of a cell; rerun the same command to resume. There is no file before a method has been
measured: a run that fails at its start leaves none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, PyTree

from xsake import _files
from xsake.data import tasks
from xsake.data.tasks import Encode, Prompt
from xsake.evaluate import settings as measured_with
from xsake.evaluate.methods import Method, gradients_of, sources_of, why_not_density
from xsake.evaluate.quality import mean_and_error
from xsake.evaluate.table import to_json
from xsake.hads import row_blocks
from xsake.hads.files import hash_of
from xsake.model.observer import Observer

SCHEMA = 1
WHAT, TYPES = "a table of tasks", {"schema": int, "rows": list}  # of the file
LEAST_ACCURACY = 0.5  # of dense attention; a family below it is left out at that length
ANSWER_TOKENS = 32  # positions whose predictions are computed, whatever the answer's length
RULE = (
    f"a family is left out at a length where dense attention has less than {LEAST_ACCURACY:.0%} "
    "of the answers"
)

MethodsAt = Callable[[float, int], list[Method]]  # the methods at a density for a length


class Answers(NamedTuple):
    """How a model answered each of P prompts."""

    right: Bool[np.ndarray, " P"]  # every token of the answer is the most likely one
    loss: Float[np.ndarray, " P"]  # -ln p of the answer, nats per token
    density: Float[np.ndarray, " P"] | None = None  # that a certified method used


def answer_prompts(
    subject: Observer,
    prompts: Sequence[Prompt],
    method: Method | None,
    block: int,
    sources: tuple[str, ...] | None = None,
) -> Answers:
    """The answers under a method's masks, or of dense attention without a method.

    `sources`, from `sources_of` of several methods, lets these share one compiled program.
    """
    how: Any = {"subject": subject.bare, "count": min(ANSWER_TOKENS, len(prompts[0].tokens) - 1)}
    if (longest := max(prompt.answer for prompt in prompts)) > how["count"]:
        raise ValueError(f"answers have at most {how['count']} tokens here, one has {longest}")
    if method is not None:
        if method.top_p is not None:
            raise ValueError(
                f"the density of {method.name} depends on the input, and tasks are measured at a "
                "known one; measure it on text, or a plan without top_p"
            )
        how |= {"block": block, "sources": _sources(method, sources)}
        method = method.anonymous()
    found = []
    for prompt in prompts:  # not fetched before all are queued
        given = (subject.weights, prompt.tokens, jnp.int32(prompt.answer))
        found.append(_dense(*given, **how) if method is None else _sparse(*given, method, **how))
    right, loss, density = (np.asarray(x) for x in zip(*jax.device_get(found), strict=True))
    is_certified = method is not None and method.certify is not None
    return Answers(right, loss.astype(np.float64), density if is_certified else None)


def _sources(method: Method, sources: tuple[str, ...] | None) -> tuple[str, ...]:
    """Without the one that needs a backward pass, unless it is the method's own."""
    own = sources_of([method])
    if sources is None or "loss_sensitivity" in own:
        return own
    return tuple(name for name in sources if name != "loss_sensitivity")


@functools.partial(jax.jit, static_argnames=("subject", "count"))
def _dense(
    weights: PyTree, tokens: Int[Array, " T"], answer: Array, *, subject: Observer, count: int
) -> tuple[Array, Array, Array]:
    logits = subject.logits(weights, subject.hidden(weights, tokens)[-count - 1 : -1])
    return *score(logits, tokens[-count:], answer), jnp.ones(())


@functools.partial(jax.jit, static_argnames=("subject", "count", "block", "sources"))
def _sparse(
    weights: PyTree,
    tokens: Int[Array, " T"],
    answer: Array,
    method: Method,
    *,
    subject: Observer,
    count: int,
    block: int,
    sources: tuple[str, ...],
) -> tuple[Array, Array, Array]:
    """(right, loss, the density that was used; 0 where nothing is certified)."""
    choose = method.chooser(block, sources, gradients_of(subject, weights, tokens, sources))
    used = jnp.zeros(())
    if method.certify is None:
        hidden = subject.sparse_hidden(weights, tokens, choose, method.corrected)
    else:
        hidden, used = subject.certified_hidden(weights, tokens, choose, method.certify)
    logits = subject.logits(weights, hidden[-count - 1 : -1])
    return *score(logits, tokens[-count:], answer), used


def score(
    logits: Float[Array, "count vocab"], targets: Int[Array, " count"], answer: Int[Array, ""]
) -> tuple[Bool[Array, ""], Float[Array, ""]]:
    """(whether all of the last `answer` targets are the most likely ones, their mean -ln p)."""
    real = jnp.arange(len(targets)) >= len(targets) - answer
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[:, None], 1)[:, 0]
    right = ((logits.argmax(-1) == targets) | ~real).all()
    return right, -jnp.where(real, chosen, 0).sum() / answer


# ---------------------------------------------------------------------------------------------- run


class Settings(NamedTuple):
    """Which prompts are made, and at which densities methods are measured."""

    families: Sequence[str]
    lengths: Sequence[int]
    prompts: int  # of each family and length
    densities: Sequence[float]
    seed: int


def run_tasks(
    subject: Observer,
    methods_at: MethodsAt,
    encode: Encode,
    fillers: Sequence[Int[np.ndarray, " _"]],
    settings: Settings,
    block: int,
    out: Path,
    *,
    band: int = 0,
    facts: dict[str, Any] | None = None,
    provenance: dict[str, Any] | None = None,
    report: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measures what the JSON file `out` does not hold yet, and returns all that it then holds.

    Args:
      subject: the model.
      methods_at: returns the methods at a density for a length.
      encode: of the model's tokenizer.
      fillers: token ids of texts, at least as many as prompts and as long as the longest.
      settings: families, lengths, prompts, densities, seed.
      block: tokens per block of the methods.
      out: the file.
      band: forced blocks before the diagonal, of the methods.
      facts: of what the methods were made from; a file with other facts is refused.
      provenance: recorded with the results, when there are new ones.
      report: is called with a line for every cell.
    """
    report = report or (lambda line: None)
    facts = facts_of_run(subject, fillers, settings, block) | (facts or {})
    how: Any = {"count": settings.prompts, "seed": settings.seed}
    make_prompts = functools.partial(tasks.make_prompts, encode=encode, fillers=fillers, **how)
    # of all cells: one that cannot be made stops the run before anything is measured
    cells = [
        _Cell(family, length, make_prompts(family=family, length=length))
        for length in settings.lengths
        for family in settings.families
    ]
    table = measured_with.resumed(out, WHAT, TYPES, facts) or {**facts, "rows": []}
    if "others" in facts:
        table["others"] |= facts["others"]
    infeasible = _infeasible(settings, block, band)
    table["infeasible"] = _left_out(table, infeasible, settings)
    for cell in cells:
        densities = [x for x in settings.densities if (cell.length, x) not in infeasible]
        for rows in _measure(subject, methods_at, cell, densities, block, table["rows"]):
            if not rows:
                continue
            table["rows"] += rows
            table["provenance"] = provenance or {}
            if out.is_file() or _has_results(rows):
                _write(table, out)
            for row in rows:
                report(_line(row))
    _write(table, out)
    return table


def _write(table: dict[str, Any], out: Path) -> None:
    with _files.replaced(out) as part:
        part.write_text(to_json(table))


def facts_of_run(
    subject: Observer, fillers: Sequence[Int[np.ndarray, " _"]], settings: Settings, block: int
) -> dict[str, Any]:
    """What a file of tasks has of its model, its prompts and these settings."""
    return {
        "model_hash": subject.hash,
        "filler_hash": hash_of(fillers),
        **facts_of(settings, block),
        **measured_with.of_subject(subject),
    }


def facts_of(settings: Settings, block: int) -> dict[str, Any]:
    """What a file of tasks has of these settings; families, lengths and densities may be added."""
    return {
        "schema": SCHEMA,
        "kind": "tasks",
        "prompts": settings.prompts,
        "seed": settings.seed,
        "block": block,
        "rule": RULE,
    }


def check_resumable(out: Path, facts: dict[str, Any]) -> None:
    """Raises if the file `out` has other settings than these, which may be some of a run's."""
    measured_with.resumed(out, WHAT, TYPES, facts)


def _infeasible(settings: Settings, block: int, band: int) -> dict[tuple[int, float], str]:
    """Why lengths and densities are left out."""
    found = {}
    for length in settings.lengths:
        n = row_blocks.count_blocks(length, block)
        for density in settings.densities:
            if (why := why_not_density(density, n, band)) is not None:
                found[length, density] = why
    return found


def _left_out(
    table: dict[str, Any], infeasible: dict[tuple[int, float], str], settings: Settings
) -> list[dict[str, Any]]:
    """What is infeasible now or was in an earlier run, and was not measured by any.

    Methods of a wider band have a higher least density.
    """
    now = set(itertools.product(settings.lengths, settings.densities))
    known = {(x["length"], x["density"]): x["reason"] for x in table.get("infeasible", [])}
    both = {at: why for at, why in known.items() if at not in now} | infeasible
    measured = {(x["length"], x["density"]) for x in table["rows"] if x["method"] != "dense"}
    return [
        {"length": length, "density": density, "reason": why}
        for (length, density), why in both.items()
        if (length, density) not in measured
    ]


def _has_results(rows: list[dict[str, Any]]) -> bool:
    """Whether a method was measured, or a family is left out; not if methods are still to come."""
    return any(row["method"] != "dense" or row["accuracy"] < LEAST_ACCURACY for row in rows)


class _Cell(NamedTuple):
    family: str
    length: int
    prompts: list[Prompt]

    def find(self, rows: list[dict[str, Any]], method: str, density: float) -> dict[str, Any]:
        """The record of a method at a density, {} if there is none yet."""
        wanted = (self.family, self.length, method, density)
        keys = ("family", "length", "method", "density")
        return next((row for row in rows if tuple(row[x] for x in keys) == wanted), {})


def _measure(
    subject: Observer,
    methods_at: MethodsAt,
    cell: _Cell,
    densities: Sequence[float],
    block: int,
    known: list[dict[str, Any]],
) -> Iterator[list[dict[str, Any]]]:
    """Records of dense attention and of the methods at each density; none for those `known`."""
    dense = cell.find(known, "dense", 1.0)
    if not dense:
        answers = answer_prompts(subject, cell.prompts, None, block)
        dense = record(cell.family, cell.prompts, "dense", "dense", 1.0, answers)
        yield [dense]
    if dense["accuracy"] < LEAST_ACCURACY:
        return
    base = Answers(
        np.array([x == "1" for x in dense["right_by_prompt"]]), np.array(dense["loss_by_prompt"])
    )
    for density in densities:
        rows, methods = [], methods_at(density, cell.length)
        sources = sources_of(methods)
        for method in methods:
            if cell.find(known, method.name, density):
                continue
            answers = answer_prompts(subject, cell.prompts, method, block, sources)
            rows.append(
                record(cell.family, cell.prompts, method.name, method.kind, density, answers, base)
                | {"realised_density_ratio": _realised(method, answers)}
            )
        yield rows


def _realised(method: Method, answers: Answers) -> float:
    """The density that was used: with certified attention more than the method's own."""
    if answers.density is not None:
        return float(answers.density.mean())
    layers, heads, n = method.counts.shape
    return float(np.asarray(method.counts).sum() / (layers * heads * n * (n + 1) / 2))


def record(
    family: str,
    prompts: Sequence[Prompt],
    method: str,
    kind: str,
    density: float,
    answers: Answers,
    dense: Answers | None = None,
) -> dict[str, Any]:
    """Accuracy and loss over prompts and by depth; with `dense`, the differences by prompt.

    Every mean has its standard error over prompts, None for a single one.
    """
    found: dict[str, Any] = {
        "family": family,
        "length": len(prompts[0].tokens),
        "method": method,
        "kind": kind,
        "density": density,
        "prompts": len(prompts),
    }
    figures = {"accuracy": answers.right.astype(float), "loss": answers.loss}
    if dense is not None:
        figures["accuracy_difference"] = answers.right.astype(float) - dense.right
        figures["loss_difference"] = answers.loss - dense.loss
    for name, values in figures.items():
        found[name], found[f"{name}_standard_error"] = mean_and_error(values)
    depths = np.array([prompt.depth for prompt in prompts])
    found["by_depth"] = [
        {
            "depth": float(depth),
            "accuracy": float(answers.right[depths == depth].mean()),
            "loss": float(answers.loss[depths == depth].mean()),
        }
        for depth in np.unique(depths)
    ]
    found["right_by_prompt"] = "".join("1" if right else "0" for right in answers.right)
    found["loss_by_prompt"] = [round(float(x), 5) for x in answers.loss]
    return found


def _line(row: dict[str, Any]) -> str:
    where = f"{row['length']:,} tokens, {row['family']}"
    used = row.get("realised_density_ratio", row["density"])
    density = "" if row["method"] == "dense" else f" at {used:.3g}"
    return f"{where}, {row['method']}{density}: {row['accuracy']:.0%}, loss {row['loss']:.3f}"


# ------------------------------------------------------------------------------------------ summary


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each length, method and density: means over the families that dense can do.

    density is the one that was asked for, realised_density_ratio the mean of what was used, which
    is more with certified attention. share_of_dense is the mean accuracy ÷ that of dense on the
    same families. The standard errors of the mean differences assume that the families' prompts are
    independent.
    """
    dense = {(x["length"], x["family"]): x for x in rows if x["method"] == "dense"}
    kept = {key: x for key, x in dense.items() if x["accuracy"] >= LEAST_ACCURACY}
    groups: dict[tuple[int, float, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["method"] != "dense" and (row["length"], row["family"]) in kept:
            groups.setdefault((row["length"], row["density"], row["method"]), []).append(row)
    found = []
    for (length, density, method), members in sorted(groups.items()):
        # of dense attention on the same prompts, in the same run
        base = np.mean([x["accuracy"] - x["accuracy_difference"] for x in members])
        accuracy = np.mean([x["accuracy"] for x in members])
        new = {
            "length": length,
            "density": density,
            "realised_density_ratio": float(
                np.mean([x.get("realised_density_ratio", density) for x in members])
            ),
            "method": method,
            "families": [x["family"] for x in members],
            "accuracy": float(accuracy),
            "dense_accuracy": float(base),
            "share_of_dense": float(accuracy / base) if base else None,
        }
        for name in ("accuracy_difference", "loss_difference"):
            errors = [x[f"{name}_standard_error"] for x in members]
            new[name] = float(np.mean([x[name] for x in members]))
            new[f"{name}_standard_error"] = (
                None if None in errors else float(np.sqrt(np.sum(np.square(errors))) / len(errors))
            )
        found.append(new)
    return found
