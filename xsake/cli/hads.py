"""xsake calibrate, plan, evaluate: profile attention, plan block budgets per head, measure them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tyro
from rich import box
from rich.table import Column, Table

from xsake import _jax
from xsake.bench import timing
from xsake.cli.model_path import checkpoint
from xsake.cli.progress import progress
from xsake.cli.tasks import METHODS, Chosen, measure_tasks
from xsake.cli.terminal import Out, at_least, console, writable_file
from xsake.data.tasks import FAMILIES
from xsake.parallel.mesh import ONE_DEVICE, MeshSizes

if TYPE_CHECKING:
    from xsake.hads import Plan, Profile
    from xsake.model import Config
    from xsake.model.observer import Observer

Dtype = Literal["float32", "bfloat16"]
LENGTH = 8192  # of calibration documents, unless the model's context is shorter


def calibrate(
    model: tyro.conf.Positional[Path],
    text: list[Path],
    out: Out,
    length: int | None = None,
    documents: int = 16,
    block: int = 128,
    band: int = 0,
    selectors: tuple[str, ...] = ("static", "mean_query", "oracle"),
    loss: bool = False,
    retrieval: float = 0.0,
    seed: int = 0,
    dtype: Dtype = "float32",
    implementation: str | None = None,
    mesh: MeshSizes = ONE_DEVICE,
) -> None:
    """Profiles a model's attention over text: statistics of every head over blocks of keys.

    An interrupted calibration keeps its finished documents in OUT.partial; rerun the same command
    to continue from them.

    Args:
      model: a folder of safetensors, a .gguf file, a run's folder, or "shipped".
      text: .txt files or .jsonl files with a "text" field, plain or compressed as .xz; or one .npy
        file of token ids, int [documents, tokens].
      out: the profile, a safetensors file.
      length: tokens of each document; default 8,192, or the model's context if that is shorter.
      documents: number of documents, cut from the text at random and without overlap.
      block: tokens per block, 64 or 128 for the Hopper kernels.
      band: blocks before the diagonal that are always kept.
      selectors: selectors to measure cost curves for; must include the one of the plan.
      loss: measure the policy loss too, which weighs output errors by the gradient of the model's
        loss: one backward pass for each document.
      retrieval: share of the documents into which facts and questions about them are put, so that
        heads that retrieve show what they need.
      seed: the random seed for cutting documents.
      dtype: the model's compute dtype; statistics are float32.
      implementation: the attention backend; default the fastest that can run.
      mesh: devices that share the model: fsdp its parameters, tensor its heads, context the tokens
        of a document.
    """
    from xsake.hads.partial import Partial

    at_least(1, length=length, documents=documents, block=block)
    at_least(0, band=band, seed=seed)
    _check_selectors(selectors)
    writable_file(out)
    partial = Partial(
        out.with_name(out.name + ".partial"), {"dtype": dtype, "implementation": implementation}
    )
    subject = _Subject.load(model, dtype, implementation, text, mesh, length)
    length = length or min(LENGTH, subject.config.context)
    tokens, kinds = _documents(subject, text, length, documents, retrieval, seed)
    size = _size(tokens)
    try:
        with progress(f"calibrating on {size}", documents) as report:
            profile = subject.observer.profile(
                tokens,
                block=block,
                band=band,
                curves=selectors,
                loss=loss,
                seed=seed,
                kinds=kinds,
                report=lambda done: report(f"{done} of {size}", done),
                partial=partial,
            )
    except KeyboardInterrupt:
        kept = f"{partial.path} keeps {partial.documents} of {documents} documents"
        raise KeyboardInterrupt(
            f"stopped by Ctrl-C; {kept}; run the same command again to continue"
            if partial.documents
            else ""
        ) from None
    profile.save(out)
    partial.path.unlink()
    _print_profile(profile)
    console.print(f"written: {out}", soft_wrap=True)


def _documents(
    subject: _Subject, text: list[Path], length: int, documents: int, retrieval: float, seed: int
) -> tuple[list[np.ndarray], str]:
    """Documents, a share of them with facts and questions, and how many there are of each kind."""
    from xsake.data.tasks import recall_documents

    asking = round(retrieval * documents)
    if not 0 <= retrieval <= 1 or (retrieval > 0 and not asking):
        raise ValueError(
            "--retrieval must be a share from 0 to 1 of the documents, and at least one of them, "
            f"got {retrieval} of {documents}"
        )
    tokens = subject.documents(text, length, documents, seed)
    if not asking:
        return tokens, ""
    if subject.encode is None:
        raise ValueError(
            f"--retrieval adds words to text, and {text[0]} holds token ids; give --text a text "
            "file, or leave it out"
        )
    plain = documents - asking
    recall = recall_documents(subject.encode, tokens[plain:], length, seed)
    kinds = f"{plain} documents of plain text and {asking} with facts and questions"
    return tokens[:plain] + recall, kinds


def _size(tokens: list[np.ndarray]) -> str:
    return f"{len(tokens)} document{'s' * (len(tokens) > 1)} of {len(tokens[0]):,} tokens"


def _check_selectors(selectors: tuple[str, ...]) -> None:
    from xsake.hads.statistics import CURVES

    if not selectors:
        raise ValueError(f"--selectors names none; name some of {', '.join(CURVES)}")
    for name in selectors:
        if name not in CURVES:
            raise ValueError(f"--selectors {name!r} is not one of {', '.join(CURVES)}")


def _print_profile(profile: Profile) -> None:
    statistics, errors = profile.statistics, profile.errors
    table = Table(
        "layer", "token entropy", "±", "block entropy", "mass retained at density 0.20", "at 0.45"
    )
    for layer in range(profile.size[0]):
        values = (
            statistics.entropy[layer].mean(),
            errors["entropy"][layer].mean(),
            statistics.block_entropy[layer].mean(),
            statistics.retained[layer, :, 3].mean(),
            statistics.retained[layer, :, 8].mean(),
        )
        table.add_row(str(layer), *("–" if np.isnan(x) else f"{x:.3f}" for x in values))
    console.print(table)
    console.print(
        "Means over the heads of a layer. Entropy is divided by its maximum: 0 if a head attends "
        "to one token or block, 1 if to all alike. Mass retained: the share of its attention that "
        "the best 20% and 45% of its blocks hold."
    )
    for name, value in profile.agreement().items():
        console.print(f"between two halves of the documents: {name.replace('_', ' ')} {value:.3f}")


def plan(
    profile: tyro.conf.Positional[Path],
    density: float,
    out: Out,
    policy: str = "output",
    selector: str = "mean_query",
    top_p: float | None = None,
    end_weight: float = 1.0,
) -> None:
    """Writes a plan: a block budget for every head and row block, and a selector.

    Args:
      profile: what `xsake calibrate` wrote.
      density: blocks visited ÷ causal blocks, over all layers and heads.
      out: the plan, a safetensors file.
      policy: uniform, entropy, kl or output; or loss, of a profile of `calibrate --loss`.
      selector: static, pooled, antidiagonal, gaussian, mean_query, past_query,
        part_queries, outlier_queries or every_query.
      top_p: stop adding blocks to a row block at this share of its estimated attention mass.
      end_weight: weight of the last two row blocks of a text in the budget; the others have 1. A
        prompt ends with its question, and the generated tokens depend on it most. 16 suits prompts
        of 4,096 tokens or more at density 0.20 that look for something; perplexity of plain text
        gets worse.
    """
    from xsake import hads

    writable_file(out)
    found = hads.Profile.load(profile)
    made = hads.make(found, density, policy, selector, top_p=top_p, end_weight=end_weight)
    made.save(out)
    console.print(str(made))
    console.print(f"written: {out}")


def evaluate(
    model: tyro.conf.Positional[Path],
    text: list[Path],
    plan: Path | None = None,
    update: bool = False,
    profile: Path | None = None,
    table: Path | None = None,
    densities: tuple[float, ...] = (0.10, 0.20, 0.30, 0.43, 0.60),
    others: tuple[str, ...] = (),
    tasks: Path | None = None,
    families: tuple[str, ...] = tuple(FAMILIES),
    lengths: tuple[int, ...] = (2048, 4096, 8192),
    prompts: int = 100,
    methods: tuple[str, ...] = (),
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
      densities: densities to compare at; methods that the file has at one are skipped there.
      others: more profiles for the comparison, as LABEL=FILE.
      tasks: instead of perplexity: answers to long-context tasks hidden in the text, as this JSON
        file; rerun the same command to resume. With --plan or --profile.
      families: of tasks; one is left out where dense attention has less than half of the answers.
      lengths: tokens of the tasks' prompts.
      prompts: of each family and length; the text must hold as many documents of the longest
        length.
      methods: names of the methods to compare, such as sink_window mean_query/output; "all" is all
        of them, which is the default but for tasks.
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
    from xsake import hads
    from xsake.hads.profile import check_held_out

    if tasks is not None and (length is not None or documents is not None):
        raise ValueError("--tasks takes --lengths and --prompts, not --length and --documents")
    documents = 8 if documents is None else documents
    at_least(1, documents=documents, prompts=prompts)
    at_least(2, length=length)  # a prediction needs a token before it
    at_least(0, seed=seed)
    _check_files(plan, profile, table, tasks, certify)
    if tasks is not None:
        chosen = Chosen(families, lengths, prompts, densities, methods or METHODS, seed, certify)
        chosen.check(writable_file(tasks), text, update)
        made = hads.Plan.load(plan) if plan is not None else hads.Profile.load(str(profile))
        subject = _Subject.load(model, dtype, implementation, text, mesh, math.gcd(*lengths))
        chosen.check_context(subject.config.context)
        fillers = subject.documents(text, max(lengths), prompts, seed)
        measure_tasks(subject.observer, subject.encode, fillers, made, chosen, tasks)
    elif plan is not None:
        loaded = hads.Plan.load(writable_file(plan) if update else plan)
        length = length or loaded.length
        subject = _Subject.load(model, dtype, implementation, text, mesh, length)
        loaded.check_model(subject.observer.hash)
        tokens = subject.documents(text, length, documents, seed)
        check_held_out(tokens, loaded.terms.data_hash)
        measured = _evaluate_plan(subject.observer, loaded, tokens)
        if update:
            measured.save(plan)
            console.print(f"written: {plan}", soft_wrap=True)
    elif profile is not None and table is not None:
        _check_table(table, densities, update)
        known, more = hads.Profile.load(profile), _labelled(others)
        writable_file(table)
        length = length or known.facts.length
        subject = _Subject.load(model, dtype, implementation, text, mesh, length)
        tokens = subject.documents(text, length, documents, seed)
        only = () if methods == ("all",) else methods
        _compare_methods(subject.observer, known, more, only, tokens, densities, table)
        console.print(f"written: {table} and its .md", soft_wrap=True)


def _check_files(
    plan: Path | None,
    profile: Path | None,
    table: Path | None,
    tasks: Path | None,
    certify: float | None,
) -> None:
    needs_table = profile is not None and tasks is None
    if (plan is None) == (profile is None) or (table is not None) != needs_table:
        raise ValueError(
            "give either --plan, or --profile and --table; with --tasks, --plan or --profile only"
        )
    if certify is not None and tasks is None:
        raise ValueError("--certify measures tasks; give --tasks a file, or leave it out")


def _check_table(table: Path, densities: tuple[float, ...], update: bool) -> None:
    if table.suffix == ".md":
        raise ValueError(f"--table {table} is the JSON file; the .md file is written next to it")
    if not densities:
        raise ValueError("--densities names none; leave it out for the usual five")
    if update:
        raise ValueError("--update adds to the file of --plan, which is not given; leave it out")
    for density in densities:
        if not 0 < density <= 1:
            raise ValueError(f"--densities must be above 0 and at most 1, got {density}")


def _labelled(others: tuple[str, ...]) -> dict[str, Profile]:
    from xsake import hads

    for other in others:
        if "=" not in other:
            raise ValueError(f"--others takes LABEL=FILE, got {other!r}")
    labelled = (other.split("=", 1) for other in others)
    return {label: hads.Profile.load(path) for label, path in labelled}


def _evaluate_plan(subject: Observer, plan: Plan, tokens: list[np.ndarray]) -> Plan:
    """Prints the plan's quality and its time, and returns the plan with the quality."""
    from xsake.bench.method_times import time_attention
    from xsake.evaluate import methods
    from xsake.evaluate import table as tables

    length, began = len(tokens[0]), time.perf_counter()
    with progress(f"measuring on {_size(tokens)}") as report:
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
    with progress(f"measuring on {_size(tokens)}") as report:
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


@dataclasses.dataclass(frozen=True)
class _Subject:
    """The model of a command, and its tokenizer's encode unless the documents are tokenized."""

    observer: Observer
    config: Config
    encode: Callable[[str], Sequence[int]] | None

    @staticmethod
    def load(
        model: Path,
        dtype: str,
        implementation: str | None,
        text: list[Path],
        mesh: MeshSizes,
        length: int | None,
    ) -> _Subject:
        """Loads the model; the tokenizer only if there is text to encode."""
        from xsake.model import huggingface
        from xsake.model.observer import Observer
        from xsake.model.on_mesh import mesh_for_text

        for file in text:
            if not file.is_file():
                raise FileNotFoundError(f"there is no file {file}")
        is_tokenized = text[0].suffix == ".npy"
        path = checkpoint(model)
        config = huggingface.examine(path).config
        loaded = huggingface.load(
            path,
            dtype=dtype,
            tokenizer=not is_tokenized,
            implementation=implementation,
            mesh=mesh_for_text(config, mesh, length or min(LENGTH, config.context)),
        )
        encode = None if loaded.tokenizer is None else loaded.tokenizer.encode
        return _Subject(Observer(loaded.model), loaded.config, encode)

    def documents(self, text: list[Path], length: int, count: int, seed: int) -> list[np.ndarray]:
        """Documents of `length` tokens; raises for what the model cannot read."""
        from xsake.data.documents import load_documents

        if length > self.config.context:
            raise ValueError(
                f"documents of {length:,} tokens exceed the model's context of "
                f"{self.config.context:,}; give --length {self.config.context} or less"
            )
        found = load_documents(text, self.encode, length, count, seed)
        for document in found:
            if document.min() < 0 or document.max() >= self.config.vocab_size:
                wrong = document.min() if document.min() < 0 else document.max()
                raise ValueError(
                    f"{text[0]} has the token id {wrong}, outside 0 … {self.config.vocab_size - 1} "
                    "of the model's vocabulary; was it made by this model's tokenizer?"
                )
        return found


def _quality_table(density: str, found: list[dict[str, Any]]) -> Table:
    # as narrow as a terminal of 80 columns: the methods' names must not be cut
    table = Table(
        Column("method", no_wrap=True),
        *(Column(x, justify="right") for x in ("density", "KL", "recall", "error", "logit KL")),
        Column("gap", justify="right"),
        title=f"density {density}: attention KL, mass recall and output error on dense "
        "activations; logit KL and perplexity gap end to end",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for row in sorted(found, key=lambda row: row["kl"]):
        table.add_row(
            row["method"],
            f"{row['realised_density_ratio']:.4f}",
            *(f"{row[name]:.4f}" for name in ("kl", "recall", "error", "logit_kl")),
            f"{row['perplexity_gap']:+.2%}",
        )
    return table
