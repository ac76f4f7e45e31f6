"""xsake calibrate, plan, evaluate: which blocks each head deserves, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import tyro
from rich import box
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Column, Table

from xsake.bench import timing
from xsake.cli.terminal import Out, console

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
    """Profiles a model's attention over text: what each head does with its blocks.

    Args:
      model: a folder of safetensors or a .gguf file.
      text: .txt, .jsonl with a "text" field, either in .xz, or .npy of int [documents, tokens].
      out: the profile, a safetensors file.
      length: tokens of each document.
      documents: how many are cut from the text.
      block: tokens per block, 64 or 128 for the Hopper kernels.
      band: blocks before the diagonal that are always kept.
      selectors: orders of blocks to measure costs for; a plan needs that of its selector.
      seed: of the places where documents are cut.
      dtype: that the model computes in; statistics are float32.
      implementation: of attention; default the fastest that can run.
    """
    from xsake.data import documents as texts

    subject, encode = _subject(model, dtype, implementation, text)
    cut = texts.load_documents(text, encode, length, documents, seed)
    with Progress(console=console) as progress:
        task = progress.add_task(f"{documents} × {length:,} tokens", total=documents)
        profile = subject.profile(
            cut,
            block=block,
            band=band,
            curves=selectors,
            seed=seed,
            tell=lambda done: progress.update(task, completed=done),
        )
    profile.save(out)
    statistics, errors = profile.statistics, profile.errors
    table = Table("layer", "token entropy", "±", "block entropy", "mass kept at 0.20", "at 0.45")
    for layer in range(subject.layers):
        figures = (
            statistics.entropy[layer].mean(),
            errors["entropy"][layer].mean(),
            statistics.block_entropy[layer].mean(),
            statistics.retained[layer, :, 3].mean(),
            statistics.retained[layer, :, 8].mean(),
        )
        table.add_row(str(layer), *(f"{x:.3f}" for x in figures))
    console.print(table)
    for name, value in profile.agreement().items():
        console.print(f"two halves of the documents, {name.replace('_', ' ')}: {value:.3f}")
    console.print(f"written: {out}")


def plan(
    profile: tyro.conf.Positional[Path],
    density: float,
    out: Out,
    policy: str = "output",
    selector: str = "mean_query",
    top_p: float | None = None,
) -> None:
    """Makes a plan: a budget for every row of every head, and a way to choose blocks.

    Args:
      profile: what `xsake calibrate` wrote.
      density: blocks visited ÷ blocks that causality allows, over all layers and heads.
      out: the plan, a safetensors file.
      policy: uniform, entropy, kl or output.
      selector: static, pooled, antidiagonal, gaussian, mean_query or past_query.
      top_p: stop a row at this share of its estimated mass.
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
      text: other text than that of the calibration.
      plan: what `xsake plan` wrote; it is written again with the figures it was measured at.
      profile: instead of a plan: compare all methods, with this profile.
      table: the JSON file of that comparison; the Markdown stands beside it.
      densities: of the comparison; those that the file holds are not measured again.
      others: more profiles for the comparison, as LABEL=FILE.
      length: tokens of each document; default what was calibrated.
      documents: how many are cut from the text.
      seed: of the places where documents are cut.
      dtype: that the model computes in.
      implementation: of attention; default the fastest that can run.
    """
    from xsake import hads
    from xsake.data import documents as texts
    from xsake.evaluate import methods
    from xsake.evaluate import table as tables

    if (plan is None) == (profile is None) or (profile is None) != (table is None):
        raise ValueError("give either --plan, or --profile and --table")
    subject, encode = _subject(model, dtype, implementation, text)
    made = None if plan is None else hads.Plan.load(plan, subject.hash)
    known = None if profile is None else hads.Profile.load(profile)
    length = length or (made.terms.length if made else known.facts.length if known else 0)
    cut = texts.load_documents(text, encode, length, documents, seed)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as shown:
        task = shown.add_task("", total=None)

        def tell(what: str) -> None:
            shown.update(task, description=what)

        if made is not None and plan is not None:
            method = methods.of_plan(made, length)
            found = tables.measure_methods(subject, [method], cut, made.terms.block, tell)
        elif known is not None and table is not None:
            more = {
                label: hads.Profile.load(path)
                for label, path in (other.split("=", 1) for other in others)
            }
            facts = timing.provenance()
            told = tables.run_table(
                subject, known, cut, densities, table, others=more, provenance=facts, tell=tell
            )
    if made is not None and plan is not None:
        console.print(_quality_table(str(made.terms.density), found))
        names = ("realised_density_ratio", *tables.COLUMNS)
        figures = {name: found[0][name] for name in names}
        made.validated(figures | {"length": length, "documents": documents}).save(plan)
        console.print(f"written: {plan}")
    else:
        for density, part in told["densities"].items():
            console.print(_quality_table(density, part["rows"]))
        console.print(f"written: {table} and its .md")


def _subject(
    model: Path, dtype: str, implementation: str | None, text: list[Path]
) -> tuple[Any, Any]:
    """The model, and its tokenizer's encode unless the documents are ready."""
    from xsake.model import huggingface
    from xsake.model.observer import Observer

    ready = text[0].suffix == ".npy"
    loaded = huggingface.load(
        model, dtype=dtype, tokenizer=not ready, implementation=implementation
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
