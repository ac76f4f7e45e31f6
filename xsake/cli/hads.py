"""xsake calibrate, plan, evaluate: profile attention, plan block budgets per head, measure them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tyro
from rich import box
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Column, Table

from xsake.bench import timing
from xsake.cli.terminal import Out, console

if TYPE_CHECKING:
    from xsake.hads import Plan, Profile
    from xsake.model.observer import Observer

Dtype = Literal["float32", "bfloat16"]


def calibrate(
    model: tyro.conf.Positional[Path],
    text: list[Path],
    out: Out,
    length: int = 8192,
    documents: int = 16,
    block: int = 128,
    band: int = 0,
    selectors: tuple[str, ...] = ("static", "mean_query", "oracle"),
    seed: int = 0,
    dtype: Dtype = "float32",
    implementation: str | None = None,
) -> None:
    """Profiles a model's attention over text: statistics of every head over blocks of keys.

    Args:
      model: a folder of safetensors or a .gguf file.
      text: .txt files or .jsonl files with a "text" field, plain or compressed as .xz; or one .npy
        file of token ids, int [documents, tokens].
      out: the profile, a safetensors file.
      length: tokens of each document.
      documents: number of documents, cut from the text at random.
      block: tokens per block, 64 or 128 for the Hopper kernels.
      band: blocks before the diagonal that are always kept.
      selectors: selectors to measure cost curves for; must include the one of the plan.
      seed: the random seed for cutting documents.
      dtype: the model's compute dtype; statistics are float32.
      implementation: the attention backend; default the fastest that can run.
    """
    from xsake.data import documents as texts

    subject, encode = _subject(model, dtype, implementation, text)
    tokens = texts.load_documents(text, encode, length, documents, seed)
    with Progress(console=console) as progress:
        task = progress.add_task(f"{documents} × {length:,} tokens", total=documents)
        profile = subject.profile(
            tokens,
            block=block,
            band=band,
            curves=selectors,
            seed=seed,
            report=lambda done: progress.update(task, completed=done),
        )
    profile.save(out)
    statistics, errors = profile.statistics, profile.errors
    table = Table(
        "layer", "token entropy", "±", "block entropy", "mass retained at density 0.20", "at 0.45"
    )
    for layer in range(subject.layers):
        values = (
            statistics.entropy[layer].mean(),
            errors["entropy"][layer].mean(),
            statistics.block_entropy[layer].mean(),
            statistics.retained[layer, :, 3].mean(),
            statistics.retained[layer, :, 8].mean(),
        )
        table.add_row(str(layer), *(f"{x:.3f}" for x in values))
    console.print(table)
    for name, value in profile.agreement().items():
        console.print(f"between two halves of the documents: {name.replace('_', ' ')} {value:.3f}")
    console.print(f"written: {out}")


def plan(
    profile: tyro.conf.Positional[Path],
    density: float,
    out: Out,
    policy: str = "output",
    selector: str = "mean_query",
    top_p: float | None = None,
) -> None:
    """Writes a plan: a block budget for every head and row block, and a selector.

    Args:
      profile: what `xsake calibrate` wrote.
      density: blocks visited ÷ causal blocks, over all layers and heads.
      out: the plan, a safetensors file.
      policy: uniform, entropy, kl or output.
      selector: static, pooled, antidiagonal, gaussian, mean_query or past_query.
      top_p: stop adding blocks to a row block at this share of its estimated attention mass.
    """
    from xsake import hads

    made = hads.make(hads.Profile.load(profile), density, policy, selector, top_p=top_p)
    made.save(out)
    console.print(str(made))
    console.print(f"written: {out}")


def evaluate(
    model: tyro.conf.Positional[Path],
    text: list[Path],
    plan: Path | None = None,
    profile: Path | None = None,
    table: Path | None = None,
    densities: tuple[float, ...] = (0.10, 0.20, 0.30, 0.43, 0.60),
    others: tuple[str, ...] = (),
    length: int | None = None,
    documents: int = 8,
    seed: int = 1,
    dtype: Dtype = "float32",
    implementation: str | None = None,
) -> None:
    """Measures a plan, or every method at several densities, on text.

    Args:
      model: a folder of safetensors or a .gguf file.
      text: evaluation text, which must differ from the calibration text.
      plan: what `xsake plan` wrote; the measured quality is added to this file.
      profile: instead of a plan: compare all methods, with this profile.
      table: the JSON file of that comparison; a .md file is written next to it.
      densities: densities to compare at; those in the file already are skipped.
      others: more profiles for the comparison, as LABEL=FILE.
      length: tokens of each document; default the calibrated length.
      documents: number of documents, cut from the text at random.
      seed: the random seed for cutting documents.
      dtype: the model's compute dtype.
      implementation: the attention backend; default the fastest that can run.
    """
    from xsake import hads
    from xsake.data import documents as texts

    if (plan is None) == (profile is None) or (profile is None) != (table is None):
        raise ValueError("give either --plan, or --profile and --table")
    subject, encode = _subject(model, dtype, implementation, text)
    if plan is not None:
        loaded = hads.Plan.load(plan, subject.hash)
        length = length or loaded.terms.length
        tokens = texts.load_documents(text, encode, length, documents, seed)
        _evaluate_plan(subject, loaded, tokens).save(plan)
        console.print(f"written: {plan}")
    elif profile is not None and table is not None:
        known = hads.Profile.load(profile)
        length = length or known.facts.length
        tokens = texts.load_documents(text, encode, length, documents, seed)
        labelled = (other.split("=", 1) for other in others)
        more = {label: hads.Profile.load(path) for label, path in labelled}
        _compare_methods(subject, known, more, tokens, densities, table)
        console.print(f"written: {table} and its .md")


def _evaluate_plan(subject: Observer, plan: Plan, tokens: list[np.ndarray]) -> Plan:
    """Prints the plan's quality, and returns the plan with it."""
    from xsake.evaluate import methods
    from xsake.evaluate import table as tables

    length = len(tokens[0])
    with _progress() as report:
        method = methods.of_plan(plan, length)
        found = tables.measure_methods(subject, [method], tokens, plan.terms.block, report)
    console.print(_quality_table(str(plan.terms.density), found))
    quality = {name: found[0][name] for name in ("realised_density_ratio", *tables.COLUMNS)}
    return plan.validated(quality | {"length": length, "documents": len(tokens)})


def _compare_methods(
    subject: Observer,
    profile: Profile,
    others: dict[str, Profile],
    tokens: list[np.ndarray],
    densities: tuple[float, ...],
    out: Path,
) -> None:
    """Measures all methods at these densities, writes `out` and its .md, and prints the tables."""
    from xsake.evaluate import table as tables

    facts = timing.provenance()
    with _progress() as report:
        found = tables.run_table(
            subject, profile, tokens, densities, out, others=others, provenance=facts, report=report
        )
    for density, part in found["densities"].items():
        console.print(_quality_table(density, part["rows"]))


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows the elapsed time and the text that the function it yields is called with."""
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as shown:
        task = shown.add_task("", total=None)
        yield lambda what: shown.update(task, description=what)


def _subject(
    model: Path, dtype: str, implementation: str | None, text: list[Path]
) -> tuple[Observer, Callable[[str], Sequence[int]] | None]:
    """The model, and its tokenizer's encode, or None if the documents are tokenized already."""
    from xsake.model import huggingface
    from xsake.model.observer import Observer

    is_tokenized = text[0].suffix == ".npy"
    loaded = huggingface.load(
        model, dtype=dtype, tokenizer=not is_tokenized, implementation=implementation
    )
    return Observer(loaded.model), None if loaded.tokenizer is None else loaded.tokenizer.encode


def _quality_table(density: str, found: list[dict[str, Any]]) -> Table:
    # as narrow as a terminal of 80 columns: the methods' names must not be cut
    table = Table(
        Column("method", no_wrap=True),
        *(Column(x, justify="right") for x in ("density", "KL", "recall", "error", "logit KL")),
        Column("perplexity", justify="right"),
        title=f"density {density}: attention KL, mass recall and output error on dense "
        "activations; logit KL and perplexity gap end to end",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for row in sorted(found, key=lambda row: row["kl"]):
        table.add_row(
            row["method"],
            f"{row['realised_density_ratio']:.4f}",
            *(f"{row[name]:.4f}" for name in ("kl", "recall", "error", "logit_kl")),
            f"{row['perplexity_gap']:+.2%}",
        )
    return table
