"""xsake evaluate: measures a plan, or methods at equal density, on text or on tasks."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tyro
from rich import box
from rich.table import Column, Table

from xsake import _jax
from xsake.bench import timing
from xsake.cli.model_and_text import Dtype, ModelAndText, size_of
from xsake.cli.progress import progress
from xsake.cli.tasks import LENGTHS, METHODS, PROMPTS, Chosen, check_tasks, measure_tasks
from xsake.cli.terminal import at_least, check_implementation, console, kept_in, writable_file
from xsake.data.tasks import FAMILIES
from xsake.parallel.mesh import ONE_DEVICE, MeshSizes

if TYPE_CHECKING:
    from xsake.hads import Plan, Profile
    from xsake.model.observer import Observer

DENSITIES = (0.10, 0.20, 0.30, 0.43, 0.60)
DOCUMENTS = 8


def evaluate(
    model: tyro.conf.Positional[Path],
    text: list[Path],
    plan: Path | None = None,
    update: bool = False,
    profile: Path | None = None,
    table: Path | None = None,
    densities: tuple[float, ...] | None = None,
    others: tuple[str, ...] = (),
    tasks: Path | None = None,
    families: tuple[str, ...] | None = None,
    lengths: tuple[int, ...] | None = None,
    prompts: int | None = None,
    methods: tuple[str, ...] | None = None,
    certify: float | None = None,
    length: int | None = None,
    documents: int | None = None,
    seed: int = 1,
    dtype: Dtype = "float32",
    implementation: str | None = None,
    mesh: MeshSizes = ONE_DEVICE,
) -> None:
    """Measures a plan, or methods at several densities, on text or on long-context tasks.

    Args:
      model: a folder of safetensors, a .gguf file, a run's folder, or "shipped".
      text: evaluation text. It must differ from the calibration text: the very documents of the
        calibration are refused, others of the same text are not known here.
      plan: what `xsake plan` wrote.
      update: add the measured quality to the plan's file.
      profile: instead of a plan: compare all methods, with this profile.
      table: the JSON file of that comparison; a .md file is written next to it.
      densities: densities to compare at, default 0.10 0.20 0.30 0.43 0.60; methods that the file
        has at one are skipped there.
      others: with --profile and --table: more profiles of the same model and blocks, as LABEL=FILE;
        their selectors static, mean_query and outlier_queries are compared.
      tasks: instead of perplexity: answers to long-context tasks hidden in the text, as this JSON
        file; rerun the same command to resume. With --plan or --profile.
      families: of tasks, default all: passkey needles lookup variables common_words copy. One is
        left out where dense attention has less than half of the answers.
      lengths: tokens of the tasks' prompts; default 2048 4096 8192.
      prompts: of each family and length, default 100; the text must hold as many documents of the
        longest length.
      methods: names of the methods of the profile to compare, such as sink_window
        mean_query/output; "all" is all of them, which is the default but for tasks.
      certify: with --tasks: methods that select blocks from the input are also measured with
        certified attention, which computes row blocks densely whose output error, in a sample of
        one query in 64, is at least this share of the output.
      length: tokens of each document; default that of the texts that the plan or profile is for.
        Not with --tasks, which has --lengths.
      documents: number of documents, cut from the text at random and without overlap; default 8.
        Not with --tasks, which has --prompts.
      seed: the random seed for cutting documents.
      dtype: the model's compute dtype.
      implementation: the attention backend; default the fastest that can run.
      mesh: devices that share the model: fsdp its parameters, tensor its heads, context the tokens
        of a document.
    """
    at_least(1, documents=documents, prompts=prompts)
    at_least(2, length=length)  # a prediction needs a token before it
    at_least(0, seed=seed)
    _check_files(plan, profile, table, tasks)
    _check_unused(
        tasks is not None,
        "leave it out, or give --tasks a file",
        families=families,
        lengths=lengths,
        prompts=prompts,
        certify=certify,
    )
    _check_unused(
        plan is None,
        "--plan measures that plan alone; leave it out, or give --profile instead of --plan",
        methods=methods,
        densities=densities,
        others=others or None,
    )
    _check_unused(
        tasks is None,
        "--tasks has --lengths and --prompts, and methods of one profile; leave it out",
        length=length,
        documents=documents,
        others=others or None,
    )
    check_implementation(implementation)
    for name, chosen in (("densities", densities), ("methods", methods)):
        if chosen == ():
            raise ValueError(f"--{name} names none; leave it out for the usual ones")
    at = DENSITIES if densities is None else densities
    how: dict[str, Any] = {"dtype": dtype, "implementation": implementation, "mesh": mesh}
    cut = length, documents or DOCUMENTS, seed
    if tasks is not None:
        asked = Chosen(
            tuple(FAMILIES) if families is None else families,
            LENGTHS if lengths is None else lengths,
            PROMPTS if prompts is None else prompts,
            at,
            METHODS if methods is None else methods,
            seed,
            certify,
        )
        asked.check(writable_file(tasks), text, update)
        _measure_tasks(model, text, plan, profile, asked, tasks, how)
    elif plan is not None:
        _measure_plan(model, text, plan, update, cut, how)
    elif profile is not None and table is not None:
        _check_table(table, at, update)
        only = () if methods is None or methods == ("all",) else methods
        _measure_methods(model, text, profile, others, only, at, cut, table, how)


def _measure_tasks(
    model: Path,
    text: list[Path],
    plan: Path | None,
    profile: Path | None,
    asked: Chosen,
    out: Path,
    how: dict[str, Any],
) -> None:
    """Answers under a plan or a profile's methods."""
    from xsake import hads

    made = hads.Plan.load(plan) if plan is not None else hads.Profile.load(str(profile))
    check_tasks(made, asked, out, how["dtype"], how["implementation"])
    subject = ModelAndText.load(model, text=text, length=math.gcd(*asked.lengths), **how)
    asked.check_context(subject.config.context)
    fillers = subject.documents(text, max(asked.lengths), asked.prompts, asked.seed)
    measure_tasks(subject.observer, subject.encode, fillers, made, asked, out)


def _measure_plan(
    model: Path,
    text: list[Path],
    path: Path,
    update: bool,
    cut: tuple[int | None, int, int],
    how: dict[str, Any],
) -> None:
    """The quality of a plan on documents of this length, number and seed."""
    from xsake import hads
    from xsake.hads.profile import check_held_out

    plan = hads.Plan.load(writable_file(path) if update else path)
    length, documents, seed = cut[0] or plan.length, *cut[1:]
    subject = ModelAndText.load(model, text=text, length=length, **how)
    plan.check_model(subject.observer.hash)
    tokens = subject.documents(text, length, documents, seed)
    check_held_out(tokens, plan.terms.data_hash)
    measured = _evaluate_plan(subject.observer, plan, tokens)
    if update:
        measured.save(path)
        console.print(f"written: {path}", soft_wrap=True)


def _measure_methods(
    model: Path,
    text: list[Path],
    path: Path,
    others: tuple[str, ...],
    only: tuple[str, ...],
    densities: tuple[float, ...],
    cut: tuple[int | None, int, int],
    out: Path,
    how: dict[str, Any],
) -> None:
    """The methods of profiles on documents of this length, number and seed, into a table."""
    from xsake import hads
    from xsake.evaluate import methods, settings
    from xsake.evaluate import table as tables

    writable_file(out)
    labelled = _labelled(others, only)
    profile = hads.Profile.load(path)
    methods.check_others(profile, labelled)
    methods.check_names(only, {"": profile, **labelled})
    facts = settings.of_run(how["dtype"], how["implementation"])
    tables.check_resumable(out, facts | tables.facts_of(profile, labelled))
    length, documents, seed = cut[0] or profile.facts.length, *cut[1:]
    subject = ModelAndText.load(model, text=text, length=length, **how)
    tokens = subject.documents(text, length, documents, seed)
    _compare_methods(subject.observer, profile, labelled, only, tokens, densities, out)
    console.print(f"written: {out} and its .md", soft_wrap=True)


def _check_files(
    plan: Path | None,
    profile: Path | None,
    table: Path | None,
    tasks: Path | None,
) -> None:
    needs_table = profile is not None and tasks is None
    if (plan is None) == (profile is None) or (table is not None) != needs_table:
        raise ValueError(
            "give either --plan, or --profile and --table; with --tasks, --plan or --profile only"
        )


def _check_unused(is_used: bool, remedy: str, **flags: Any) -> None:
    """Raises if one of the flags is given although this call does not use them."""
    for name, value in flags.items():
        if value is not None and not is_used:
            raise ValueError(f"--{name} is not used here: {remedy}")


def _check_table(table: Path, densities: tuple[float, ...], update: bool) -> None:
    if table.suffix == ".md":
        raise ValueError(f"--table {table} is the JSON file; the .md file is written next to it")
    if update:
        raise ValueError("--update adds to the file of --plan, which is not given; leave it out")
    for density in densities:
        if not 0 < density <= 1:
            raise ValueError(f"--densities must be above 0 and at most 1, got {density}")


def _labelled(others: tuple[str, ...], methods: tuple[str, ...]) -> dict[str, Profile]:
    """The profiles of --others by label; raises for one that no method of --methods is of."""
    from xsake import hads

    found = {}
    for other in others:
        label, is_given, path = other.partition("=")
        if not is_given or not label:
            raise ValueError(f"--others takes LABEL=FILE, got {other!r}")
        if label in found:
            raise ValueError(f"--others has the label {label!r} twice; name them differently")
        if methods and not any(method.endswith(f" {label}") for method in methods):
            raise ValueError(
                f"--others {other} is not used by --methods {' '.join(methods)}; name a method of "
                f"it too, such as 'mean_query/output {label}', or leave out --methods"
            )
        found[label] = hads.Profile.load(path)
    return found


def _evaluate_plan(subject: Observer, plan: Plan, tokens: list[np.ndarray]) -> Plan:
    """Prints the plan's quality and its time, and returns the plan with the quality."""
    from xsake.bench.method_times import time_attention
    from xsake.evaluate import methods
    from xsake.evaluate import table as tables

    length, began = len(tokens[0]), time.perf_counter()
    with progress(f"measuring on {size_of(tokens)}") as report:
        method = methods.of_plan(plan, length)
        block = plan.terms.block
        (found,) = tables.measure_methods(subject, [method], tokens, block, report)
        report("timing attention")
        times = time_attention(subject, tokens[0], [method], block)
    console.print(_quality_table(str(plan.terms.density), [found]))
    error = found["perplexity_gap_standard_error"]
    spread = " (one document, no standard error)"
    if error is not None:
        spread = f" ± {100 * error:.2f}% (standard error over {len(tokens)} documents)"
    console.print(
        f"perplexity {np.exp(found['dense_loss']):.3f} dense, {np.exp(found['loss']):.3f} with the "
        f"plan; mean gap of the documents: {found['perplexity_gap']:+.2%}{spread}",
        soft_wrap=True,
    )
    dense, sparse = (times[name].median_seconds for name in ("dense", method.name))
    console.print(
        f"attention of all layers on one document, with block selection: {1e3 * dense:.1f} ms "
        f"dense, {1e3 * sparse:.1f} ms with the plan, {sparse / dense:.2f} of dense; "
        f"{_jax.device_kind()}; measured in {time.perf_counter() - began:.0f} s",
        soft_wrap=True,
    )
    quality = {name: found[name] for name in ("realised_density_ratio", *tables.COLUMNS)}
    return plan.validated(quality | {"length": length, "documents": len(tokens)})


def _compare_methods(
    subject: Observer,
    profile: Profile,
    others: dict[str, Profile],
    only: tuple[str, ...],
    tokens: list[np.ndarray],
    densities: tuple[float, ...],
    out: Path,
) -> None:
    """Measures all methods at these densities, writes `out` and its .md, and prints the tables."""
    from xsake.evaluate import table as tables

    facts = timing.provenance()
    with progress(f"measuring on {size_of(tokens)}") as report, kept_in(out, "the densities"):
        found = tables.run_table(
            subject,
            profile,
            tokens,
            densities,
            out,
            others=others,
            only=only,
            provenance=facts,
            report=report,
        )
    for density, part in found["densities"].items():
        console.print(_quality_table(density, part["rows"]))
    for density in map(str, densities):
        if density in found["infeasible"]:
            console.print(f"left out: {found['infeasible'][density]}", soft_wrap=True)


def _quality_table(density: str, found: list[dict[str, Any]]) -> Table:
    # as narrow as a terminal of 80 columns: of what is wider, names are wrapped and numbers are not
    numbers = ("density", "KL", "recall", "error", "logit KL", "gap")
    table = Table(
        Column("method", overflow="fold"),
        *(Column(x, justify="right", no_wrap=True) for x in numbers),
        title=f"density {density}: attention KL, mass recall and output error on dense "
        "activations; logit KL and perplexity gap end to end",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,  # the box has a space between columns
    )
    for row in sorted(found, key=lambda row: row["kl"]):
        table.add_row(
            row["method"],
            f"{row['realised_density_ratio']:.4f}",
            *(f"{row[name]:.4f}" for name in ("kl", "recall", "error", "logit_kl")),
            f"{row['perplexity_gap']:+.2%}",
        )
    return table
