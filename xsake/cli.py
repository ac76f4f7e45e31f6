"""The commands of `xsake`: each is a function, its arguments are the flags."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

import xsake
from xsake import BlockMask, _jax, masks
from xsake.bench import run, timing
from xsake.bench.cases import cpu_case

console = Console(highlight=False)

Out = Annotated[Path, tyro.conf.arg(aliases=["-o"])]
Dtype = Literal["float32", "bfloat16"]


def doctor() -> None:
    """Prints versions and devices, and for a standard call every backend's reason."""
    facts = timing.provenance()
    table = Table("what", "is", title=f"xsake {xsake.__version__}")
    for name, value in {**facts["versions"], **facts["machine"]}.items():
        table.add_row(name, str(value))
    table.add_row("devices", ", ".join(map(str, jax.devices())))
    console.print(table)
    dtype = _fast_dtype()
    q = jax.ShapeDtypeStruct((1, 4096, 8, 64), dtype)
    console.print(_reasons(xsake.explain(q, q, q, is_causal=True), f"4,096 tokens, {dtype}"))


def demo(length: int = 2048) -> None:
    """Draws some masks, then times dense against three densities on this machine.

    Args:
      length: tokens of the timed problem, a multiple of 128.
    """
    if length < 512 or length % 128:
        raise ValueError(f"length must be a multiple of 128 and at least 512, got {length}")
    drawn = {
        "a window that no block is aligned with": masks.sliding_window(200) & masks.causal(),
        "the first keys and a window": masks.causal()
        & (masks.first(16) | masks.sliding_window(256)),
        "three documents in one row": masks.documents(jnp.arange(1536) // 600) & masks.causal(),
    }
    for title, rule in drawn.items():
        console.print(f"\n[bold]{title}[/]")
        console.print(str(BlockMask.from_rule(rule, (1536, 1536))))

    console.print(f"\n[bold]{length:,} tokens, 8 heads of 64, causal, {_jax.device_kind()}[/]")
    densities = (0.60, 0.43, 0.25)
    table = Table(
        "", "density", "forward ms", "÷ (density × dense)", "error", "forward+backward ms"
    )
    rows: dict[str, list[str]] = {}
    for row in run.cpu_densities(length, densities, repeats=3):
        if row["direction"] == "forward":
            rows[row["case"]] = [
                "dense" if row["case"].endswith("dense") else "sparse",
                f"{row['density_ratio']:.2f}",
                f"{1e3 * row['median_seconds']:.1f}",
                f"{row['over_density_times_dense']:.2f}",
                f"{row['error']:.1e}",
            ]
            if "jax_nn_seconds" in row:
                rows["jax.nn"] = ["jax.nn", "", f"{1e3 * row['jax_nn_seconds']:.1f}", "", "", ""]
        else:
            rows[row["case"]].append(f"{1e3 * row['median_seconds']:.1f}")
    for cells in rows.values():
        table.add_row(*cells)
    console.print(table)
    mask = cpu_case(length, 0.25).arguments()["mask"]
    console.print("the mask of density 0.25, its second head:")
    console.print(str(mask[0, 1]))


def bench(
    suite: Literal["cpu", "hopper"] = "cpu",
    out: Path | None = None,
    quick: bool = False,
) -> None:
    """Measures a suite and writes JSON with machine, versions, commit and command.

    Args:
      suite: what to measure.
      out: the file; default benchmarks/results/SUITE-DATE.json under the current folder.
      quick: shorter sequences and fewer repeats, to try it out.
    """
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    out = out or Path("benchmarks/results") / f"{suite}-{today}.json"
    run.run_suite(suite, out, quick, tell=lambda row: console.print(_one_line(row)))
    console.print(f"written: {out}")


def _one_line(row: dict[str, Any]) -> str:
    cells = [f"{row['case']:<44}", f"{row.get('direction', ''):<17}"]
    if "median_seconds" in row:
        cells.append(f"{1e3 * row['median_seconds']:9.1f} ms")
    if "over_density_times_dense" in row:
        cells.append(f"÷ (density × dense) {row['over_density_times_dense']:.3f}")
    if "teraflops" in row:
        cells.append(f"{row['teraflops']:.0f} TFLOP/s")
    faster = "times_faster_than_"
    cells += [
        f"{x:.2f}× {name[len(faster) :]}" for name, x in row.items() if name.startswith(faster)
    ]
    if "temporary_bytes" in row:
        cells.append(f"{row['temporary_bytes'] / 2**20:.1f} MiB temporary")
    if "share_of_jax_nn" in row:
        cells.append(f"{row['share_of_jax_nn']:.2%} of jax.nn")
    return "  ".join(cells)


def inspect(path: tyro.conf.Positional[Path]) -> None:
    """Prints a checkpoint's configuration and sizes, and what its attention would run on here.

    Args:
      path: a folder with config.json and safetensors, or a .gguf file; its weights are not read.
    """
    from xsake.model import huggingface, parameter_shapes

    opened = huggingface.examine(path)
    config = opened.config
    table = Table("what", "is", title=str(path))
    for name, value in dataclasses.asdict(config).items():
        table.add_row(name, str(value))
    console.print(table)

    shapes = parameter_shapes(config)
    count = sum(math.prod(shape) for shape in shapes.values())
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    stored = collections.Counter(opened.source.types.values())
    cached = 2 * config.layers * config.kv_heads * config.head_size
    table = Table("size", "")
    table.add_row("parameters", f"{count:,}")
    table.add_row("bytes on disk", f"{sum(file.stat().st_size for file in files):,}")
    table.add_row("bytes in float32", f"{4 * count:,}")
    table.add_row("cache bytes per token", f"{4 * cached:,} in float32, {2 * cached:,} in bfloat16")
    kinds = ", ".join(f"{n} {kind}" for kind, n in stored.most_common())
    table.add_row("tensors", f"{sum(stored.values())}: {kinds}")
    console.print(table)

    table = Table("parameter", "shape", "numbers")
    for name, shape in shapes.items():
        table.add_row(name, " × ".join(map(str, shape)), f"{math.prod(shape):,}")
    console.print(table)

    length = min(config.context, 8192)
    dtype = _fast_dtype()
    q, k = (
        jax.ShapeDtypeStruct((1, length, heads, config.head_size), dtype)
        for heads in (config.heads, config.kv_heads)
    )
    console.print(_reasons(xsake.explain(q, k, k, is_causal=True), f"{length:,} tokens, {dtype}"))


def generate(
    model: Path,
    prompt: str,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16"] | None = None,
    tokenizer: Path | None = None,
    density: float | None = None,
    stream: bool = True,
    unstack: bool = False,
) -> None:
    """Continues a prompt, and says how fast.

    Args:
      model: a folder with config.json and safetensors, or a .gguf file.
      prompt: the text to go on from; - reads it from standard input.
      max_tokens: new tokens at most.
      temperature: 0 takes the likeliest token.
      top_k: draw among the k likeliest tokens only.
      top_p: draw among the likeliest tokens that hold this share of the probability.
      seed: of the draws.
      dtype: what to compute in; default bfloat16, on CPUs float32.
      tokenizer: a tokenizer.json; default the model's own.
      density: share of the cached blocks that each head reads for a token; default all.
      stream: print as tokens come, or all at the end.
      unstack: give every layer arrays of its own: decodes faster, compiles longer.
    """
    from xsake.model import Sampling, huggingface
    from xsake.model import stream as tokens_of

    sampling = Sampling(temperature, top_k, top_p, seed)
    started = time.perf_counter()
    loaded = huggingface.load(model, dtype=dtype or _fast_dtype(), tokenizer=tokenizer or True)
    assert loaded.tokenizer is not None  # load has raised where there is none
    loaded_seconds = time.perf_counter() - started
    ids = loaded.tokenizer.encode(sys.stdin.read() if prompt == "-" else prompt)
    pieces = tokens_of(
        loaded.model.unstacked() if unstack else loaded.model,
        [ids],
        max_tokens=max_tokens,
        sampling=sampling,
        budget=density,
        burst=4,
    )
    marks: list[tuple[int, float]] = []  # tokens so far, and when

    def arriving() -> Iterator[int]:
        made = 0
        for (new,) in pieces:
            made += len(new.tokens)
            marks.append((made, time.perf_counter()))
            yield from new.tokens

    started = time.perf_counter()
    text = loaded.tokenizer.pieces(arriving())
    for piece in text if stream else ["".join(text)]:
        print(piece, end="", flush=True)
    print()
    console.print(_speed(len(ids), loaded_seconds, started, marks), style="dim")


def _speed(prompt: int, loaded: float, started: float, marks: list[tuple[int, float]]) -> str:
    """Loading, the prompt, and tokens per second once everything is compiled."""
    said = f"loaded in {loaded:.1f} s; {prompt} prompt tokens and the first new one "
    said += f"in {marks[0][1] - started:.2f} s; {marks[-1][0]} new tokens"
    # the first burst compiles
    if len(marks) > 2 and marks[-1][0] > marks[1][0]:
        rate = (marks[-1][0] - marks[1][0]) / (marks[-1][1] - marks[1][1])
        said += f", {rate:.1f} tokens/s after the first {marks[1][0]}"
    return f"{said}; {_jax.device_kind()}"


def _fast_dtype() -> str:
    return "float32" if _jax.platform() == "cpu" else "bfloat16"


def _reasons(told: xsake.Explanation, what: str) -> Table:
    table = Table("backend", "this machine", title=f"causal attention, {what}")
    for name, why in told.reasons.items():
        table.add_row(name, "chosen" if name == told.chosen else why or "can run")
    return table


def calibrate(
    model: tyro.conf.Positional[Path],
    text: list[Path],
    out: Out,
    length: int = 8192,
    documents: int = 16,
    block: int = 128,
    band: int = 0,
    selectors: tuple[str, ...] = ("static", "gaussian", "oracle"),
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
    from xsake import hads
    from xsake.evaluate import text as texts

    subject, encode = _subject(model, dtype, implementation, text)
    cut = texts.load_documents(text, encode, length, documents, seed)
    with Progress(console=console) as progress:
        task = progress.add_task(f"{documents} × {length:,} tokens", total=documents)
        profile = hads.calibrate(
            subject.observe,
            subject.weights,
            cut,
            layers=subject.layers,
            heads=subject.heads,
            block=block,
            band=band,
            curves=selectors,
            model_hash=subject.hash,
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
    policy: str = "kl",
    selector: str = "gaussian",
    top_p: float | None = None,
) -> None:
    """Makes a plan: a budget for every row of every head, and a way to choose blocks.

    Args:
      profile: what `xsake calibrate` wrote.
      density: blocks visited ÷ blocks that causality allows, over all layers and heads.
      out: the plan, a safetensors file.
      policy: uniform, entropy, kl or output.
      selector: static, pooled, antidiagonal or gaussian.
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
    from xsake.evaluate import methods
    from xsake.evaluate import table as tables
    from xsake.evaluate import text as texts

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
    from xsake.evaluate.subject import Subject
    from xsake.model import huggingface

    ready = text[0].suffix == ".npy"
    loaded = huggingface.load(
        model, dtype=dtype, tokenizer=not ready, implementation=implementation
    )
    return Subject(loaded.model), None if loaded.tokenizer is None else loaded.tokenizer.encode


def _quality_table(density: str, found: list[dict[str, Any]]) -> Table:
    table = Table(
        "method",
        "density",
        "attention KL",
        "mass recall",
        "output error",
        "logit KL",
        "perplexity gap",
        title=f"density {density}; the first three on dense activations, the last two end to end",
    )
    for row in sorted(found, key=lambda row: row["kl"]):
        table.add_row(
            row["method"],
            f"{row['realised_density_ratio']:.4f}",
            *(f"{row[name]:.4f}" for name in ("kl", "recall", "error", "logit_kl")),
            f"{row['perplexity_gap']:+.2%}",
        )
    return table


def tokenize(
    text: tyro.conf.Positional[list[Path]],
    out: Out,
    tokenizer: Path | None = None,
    vocabulary: int | None = None,
    end: str = "<|endoftext|>",
    field: str = "text",
) -> None:
    """Writes text as a token file, for `xsake train`.

    Args:
      text: .txt, one document each, or .jsonl, one a line; as they are or in .gz, .xz, .zst.
      out: the folder to write.
      tokenizer: a tokenizer.json. With `vocabulary` it is where to write a new one.
      vocabulary: learns a byte-level BPE of so many entries from the text first.
      end: the tokenizer's token that is put after each document.
      field: of JSON lines, which holds the text.
    """
    from xsake.model.tokenizer import read_tokenizer
    from xsake.train import text as texts
    from xsake.train import tokens

    if vocabulary is not None:
        if tokenizer is not None and tokenizer.exists():
            raise FileExistsError(f"{tokenizer} exists; leave out --vocabulary to use it")
        known = tokens.train_tokenizer(texts.documents(text, field), vocabulary, end)
        if tokenizer is not None:
            known.inner.save(str(tokenizer))
    elif tokenizer is None:
        raise ValueError("name a tokenizer.json with --tokenizer, or learn one with --vocabulary")
    else:
        known = tokens.end_token(read_tokenizer(tokenizer), end)
    names = [path.name for path in text]
    with console.status("") as status:
        file = tokens.tokenize(
            texts.documents(text, field),
            known,
            out,
            sources=names,
            tell=lambda documents, count: status.update(
                f"{documents:,} documents, {count:,} tokens"
            ),
        )
    header = file.header
    console.print(
        f"written: {out}: {header.tokens:,} tokens of {header.documents:,} documents, "
        f"vocabulary {header.vocab_size:,}, {header.dtype}, hash {header.hash}"
    )


def train() -> None:
    """Trains a model, or goes on with a run of this name; see docs/training.md."""


def runs(folder: tyro.conf.Positional[Path] = Path("runs")) -> None:
    """Lists the runs of a folder: what they are made of, how far they are, what they reached.

    Args:
      folder: of run folders.
    """
    from xsake.observe import registry

    names = "run state step loss density perplexity checkpoints plan config data commit device"
    table = Table(*names.split())
    for run_ in registry.runs(folder):
        table.add_row(
            run_.name,
            run_.state,
            f"{run_.step}/{run_.steps}",
            "" if run_.loss_nats is None else f"{run_.loss_nats:.3f}",
            f"{run_.density_ratio:.2f}",
            ", ".join(f"{file} {x:.2f}" for file, x in run_.perplexity.items()),
            ", ".join(map(str, run_.checkpoints)),
            run_.plan[:8],
            run_.config_hash[:8],
            run_.data_hash[:8],
            run_.commit[:8],
            run_.device,
        )
    console.print(table)


def main() -> None:
    """The `xsake` command."""
    commands: dict[str, Callable[..., Any]] = {
        "doctor": doctor,
        "demo": demo,
        "bench": bench,
        "inspect": inspect,
        "generate": generate,
        "calibrate": calibrate,
        "plan": plan,
        "evaluate": evaluate,
        "tokenize": tokenize,
        "train": train,
        "runs": runs,
    }
    try:
        if sys.argv[1:2] == ["train"]:  # its flags need packages that the others do without
            from xsake.train import command

            commands["train"] = command.train_from(sys.argv[2:])
        tyro.extras.subcommand_cli_from_dict(commands, prog="xsake")
    except ModuleNotFoundError as error:
        console.print(f"xsake: {error}; pip install 'xsake\\[model]' has it", style="red")
        sys.exit(1)
    except (ArithmeticError, ValueError, OSError, run.WrongResultError) as error:
        console.print(f"xsake: {error}", style="red", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
