"""Long-context tasks on one model, resumable: python -m xsake.bench.suites.tasks COMMAND.

    prepare   a model's tokenizer + text files → a folder of .npy documents
    table     calibrates at the length of the prompts on text with and without facts and questions
              (cached), then measures tasks and perplexity at every density → JSON, one length
    merge     the files of several lengths → one, which the tables of docs/ are drawn from
    heads     gives one head at a time all of its blocks, or only the forced ones → JSON

Prompts are made from the seed and the fillers with the model's tokenizer. Tables of several lengths
can be measured at the same time, in processes of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from xsake import _files
from xsake.backends.choice import check_name
from xsake.bench import programs
from xsake.bench.merged_tasks import merge
from xsake.bench.timing import provenance
from xsake.data import documents as text
from xsake.data import tasks
from xsake.data.tasks import Encode
from xsake.evaluate import methods, needle, settings
from xsake.evaluate.methods import Method
from xsake.evaluate.needle import Settings, answer_prompts
from xsake.evaluate.quality import mean_and_error
from xsake.evaluate.table import measure_losses, to_json
from xsake.hads import Certify, Profile, make, row_blocks
from xsake.model import huggingface
from xsake.model.observer import Observer

KINDS = {"text": ("text",), "mixed": ("text", "retrieval")}  # calibrations and their documents
LABEL = "from text"  # of methods that are calibrated on plain text only
DENSITIES = (0.20, 0.43, 0.10, 0.30, 0.60)  # the first two for everything, then the others
METHODS = ("outlier_queries/output", "sink_window", "oracle/output")
CURVES = ("outlier_queries", "oracle")


def prepare(
    model: Path,
    out: Path,
    calibration: list[Path],
    held_out: list[Path],
    lengths: tuple[int, ...] = (8192, 4096, 2048),
    documents: int = 16,
    prompts: int = 100,
    evaluation: int = 8,
    seed: int = 0,
) -> None:
    """Writes out/text-LENGTH.npy, retrieval-LENGTH.npy, fillers.npy and held_out.npy.

    text and retrieval are cut from the calibration files: `documents` of the longest length, and
    the same text in shorter documents for the others. Fillers of prompts and the held-out documents
    for perplexity are cut from the held-out files, with the seed `seed` + 1.

    Args:
      model: a folder of safetensors or a .gguf file, whose tokenizer is used.
      out: a folder.
      calibration: .txt or .jsonl files, plain or compressed.
      held_out: files of other texts.
      lengths: of documents, in tokens.
      documents: of the longest length, of each kind.
      prompts: number of fillers, each of the longest length.
      evaluation: number of held-out documents for perplexity.
      seed: of where documents are cut.
    """
    tokenizer = huggingface.examine(model).tokenizer()
    longest = max(lengths)
    load = functools.partial(text.load_documents, encode=tokenizer.encode, length=longest)
    cut = load(calibration, count=2 * documents, seed=seed)
    made = {
        "fillers": load(held_out, count=prompts, seed=seed + 1),
        "held_out": load(held_out, count=evaluation, seed=seed + 1),
    }
    for length in lengths:
        starts = range(0, longest - length + 1, length)
        plain, fillers = (
            [x[i : i + length] for x in some for i in starts]
            for some in (cut[:documents], cut[documents:])
        )
        made[f"text-{length}"] = plain
        made[f"retrieval-{length}"] = tasks.recall_documents(
            tokenizer.encode, fillers, length, seed
        )
    out.mkdir(parents=True, exist_ok=True)
    for name, found in made.items():
        narrow = np.uint16 if max(x.max() for x in found) < 1 << 16 else np.int32
        np.save(out / f"{name}.npy", np.stack(found).astype(narrow))
        print(f"{name}: {len(found)} × {len(found[0]):,} tokens", flush=True)


@dataclasses.dataclass(frozen=True)
class _Bench:
    """The model, its tokenizer and the folder that `prepare` wrote."""

    subject: Observer
    encode: Encode
    documents: Path

    @staticmethod
    def load(model: Path, documents: Path, dtype: str, implementation: str | None) -> _Bench:
        with programs.stopping():
            check_name(implementation)
            if not (documents / "fillers.npy").is_file():
                raise FileNotFoundError(f"there is no {documents}/fillers.npy; `prepare` writes it")
            loaded = huggingface.load(model, dtype=dtype, implementation=implementation)
        assert loaded.tokenizer is not None
        return _Bench(Observer(loaded.model), loaded.tokenizer.encode, documents)

    def tokens(self, name: str) -> list[np.ndarray]:
        path = self.documents / f"{name}.npy"
        with programs.stopping():
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {path}; `prepare --lengths` writes it")
            return list(np.load(path).astype(np.int32))

    def profile(
        self,
        kind: str,
        length: int,
        folder: Path,
        block: int,
        curves: tuple[str, ...],
        loss: bool = False,
    ) -> Profile:
        """A profile from its file; if there is none, measured now and saved.

        With `loss` the file has another name: those from before have nothing of that policy.
        """
        path = folder / f"{kind}-{length}-{block}{'-loss' * loss}.safetensors"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            began = time.perf_counter()
            found = {name: self.tokens(f"{name}-{length}") for name in KINDS[kind]}
            kinds = " and ".join(f"{len(x)} documents of {name}" for name, x in found.items())
            documents = [x for each in found.values() for x in each]
            measured = self.subject.profile(
                documents, block=block, curves=curves, kinds=kinds, loss=loss
            )
            print(f"profile of {kind}: {time.perf_counter() - began:.1f} s", flush=True)
            measured.save(path)
        with programs.stopping():
            return Profile.load(path)

    def profiles(
        self,
        names: tuple[str, ...],
        length: int,
        folder: Path,
        block: int,
        curves: tuple[str, ...],
    ) -> tuple[Profile, dict[str, Profile]]:
        """The profile of both kinds of documents; by its label that of text, if a name has it."""
        labelled = any(LABEL in name for name in names)
        kinds = ("text", "mixed") if labelled else ("mixed",)
        loss = any(name.split()[0].endswith("/loss") for name in names)
        found = {kind: self.profile(kind, length, folder, block, curves, loss) for kind in kinds}
        return found["mixed"], {LABEL: found["text"]} if labelled else {}


def table(
    model: Path,
    documents: Path,
    profiles: Path,
    out: Path,
    length: int = 8192,
    block: int = 64,
    families: tuple[str, ...] = tuple(tasks.FAMILIES),
    prompts: int = 100,
    densities: tuple[float, ...] = DENSITIES,
    names: tuple[str, ...] = METHODS,
    curves: tuple[str, ...] = CURVES,
    certify: tuple[float, ...] = (),
    criterion: str = "error",
    end_weights: tuple[float, ...] = (1.0,),
    seed: int = 1,
    seconds: float = 1e9,
    dtype: str = "bfloat16",
    implementation: str | None = None,
) -> None:
    """Measures perplexity and tasks of one length; rerun the same command to resume `out`.

    Args:
      model: a folder of safetensors or a .gguf file.
      documents: the folder that `prepare` wrote.
      profiles: a folder for the profiles, which are large.
      out: a JSON file.
      length: of the prompts, and of the documents that are calibrated on.
      block: tokens per block.
      families: of the prompts.
      prompts: of each family.
      densities: the first two are measured for all families before the others.
      names: methods; those with the label "from text" are calibrated on plain text only. Oracles
        are measured after all others but certified attention. With a SELECTOR/loss, calibrations
        measure the policy `loss` too.
      curves: selectors to measure cost curves for.
      certify: thresholds: methods that select blocks at run time are also measured with certified
        attention, at the first two densities.
      criterion: of these thresholds, "mass" or "error".
      end_weights: methods with a plan are measured with each of them, others if 1 is one of them.
      seed: of the prompts.
      seconds: no new family is begun after so many.
      dtype: the model's compute dtype.
      implementation: the attention backend; default the fastest that can run.
    """
    began = time.perf_counter()
    programs.check_outputs(out)
    bench = _Bench.load(model, documents, dtype, implementation)
    fillers = bench.tokens("fillers")
    run = needle.facts_of_run(
        bench.subject, fillers, Settings(families, (length,), prompts, densities, seed), block
    )
    with programs.stopping():
        needle.check_resumable(out, run)
    main, others = bench.profiles(names, length, profiles, block, curves)
    build, certified = _builders(main, others, Certify(criterion=criterion), certify, end_weights)

    def report(line: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {line}", flush=True)

    facts = {
        "calibration_data_hash": main.facts.data_hash,
        "kinds": main.facts.kinds,
        "made_from": settings.of_source(main),
        "others": {label: settings.of_source(each) for label, each in others.items()},
    }
    with programs.stopping():
        known = settings.resumed(out, needle.WHAT, needle.TYPES, run | facts) or {}
    origin = provenance() | {"model": model.name, "dtype": dtype}
    steps = _steps(names, densities, bool(certify))
    perplexity = known.get("perplexity", [])
    for number, (is_certified, some_names, some) in enumerate(steps):
        for family in families if some_names and some else ():
            if time.perf_counter() - began > seconds:
                report(f"no time for {family}, {', '.join(some_names)} at {some}")
                continue
            needle.run_tasks(
                bench.subject,
                functools.partial(certified if is_certified else build, names=some_names),
                bench.encode,
                fillers,
                Settings((family,), (length,), prompts, some, seed),
                block,
                out,
                facts=facts,
                provenance=origin,
                report=report,
            )
        if number == 0:
            made = functools.partial(build, length=length, names=some_names)
            perplexity = _perplexity(bench, made, densities, length, block, perplexity, report)
        if out.is_file():  # not if the first steps are empty, as with oracles alone
            found = json.loads(out.read_text())
            with _files.replaced(out) as part:
                part.write_text(to_json(found | {"perplexity": perplexity}))


def _steps(
    names: tuple[str, ...], densities: tuple[float, ...], certify: bool
) -> list[tuple[bool, tuple[str, ...], tuple[float, ...]]]:
    """(certified, methods, densities) in the order in which they are measured; oracles last."""
    plain = tuple(name for name in names if not name.startswith("oracle"))
    oracles = tuple(name for name in names if name not in plain)
    first, rest = densities[:2], densities[2:]
    return [
        (False, plain, first),
        (False, plain, rest),
        (False, oracles, first),
        (True, plain if certify else (), first),
        (False, oracles, rest),
    ]


Build = Callable[..., list[Method]]  # of (density, length, names)


def _builders(
    main: Profile,
    others: dict[str, Profile],
    how: Certify,
    thresholds: tuple[float, ...],
    end_weights: tuple[float, ...],
) -> tuple[Build, Build]:
    """Methods by their names, and those that select at run time with every threshold."""

    @functools.lru_cache(maxsize=64)
    def build(density: float, length: int, names: tuple[str, ...]) -> list[Method]:
        return [
            method
            for weight in end_weights
            for method in methods.at_density(main, density, length, others, names, weight)
        ]

    def certified(density: float, length: int, names: tuple[str, ...]) -> list[Method]:
        return [
            method.certified(dataclasses.replace(how, threshold=limit))
            for method in build(density, length, names)
            for limit in thresholds
            if method.kind == "run time"
        ]

    return build, certified


def _perplexity(
    bench: _Bench,
    build: Build,
    densities: tuple[float, ...],
    length: int,
    block: int,
    known: list[dict[str, Any]],
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Perplexity gap of every method on the first `length` tokens of the held-out documents.

    Records that are known are returned with the new ones.
    """
    held_out, found = [x[:length] for x in bench.tokens("held_out")], list(known)
    points = {(x["method"], x["density"]) for x in known}
    for density in densities:
        if density < row_blocks.least_density(row_blocks.count_blocks(length, block)):
            continue
        made = [x for x in build(density) if (x.name, density) not in points]
        if not made:
            continue
        losses, dense = measure_losses(bench.subject, made, held_out, block)
        for method, mine in zip(made, losses, strict=True):
            gaps = np.expm1(mine - dense)
            mean, error = mean_and_error(gaps)
            report(f"perplexity, {method.name} at {density}: {mean:+.2%}")
            found.append(
                {
                    "method": method.name,
                    "density": density,
                    "length": length,
                    "documents": len(held_out),
                    "perplexity_gap": mean,
                    "perplexity_gap_standard_error": error,
                }
            )
    return found


# -------------------------------------------------------------------------------------------- heads


def heads(
    model: Path,
    documents: Path,
    profiles: Path,
    out: Path,
    block: int = 64,
    length: int = 2048,
    family: str = "passkey",
    prompts: int = 10,
    density: float = 0.20,
    curves: tuple[str, ...] = ("mean_query",),
    seed: int = 0,
    dtype: str = "bfloat16",
    implementation: str | None = None,
) -> None:
    """Which heads carry the answer: changes the budget of one head at a time.

        all     mean_query/output calibrated on text at `density`; one head gets all of its blocks
        starve  every head has all of its blocks; one head keeps the forced ones only

    The change of the answer's loss, in nats per token, is written for every layer and head, with
    the densities that the heads have when calibrated on text and on both kinds of documents.

    Args:
      model: a folder of safetensors or a .gguf file.
      documents: the folder that `prepare` wrote.
      profiles: a folder for the profiles, which are large.
      out: the JSON file to write.
      block: tokens per block.
      length: of the prompts, and of the documents that are calibrated on.
      family: of the prompts.
      prompts: how many.
      density: of the plans.
      curves: selectors to measure cost curves for; mean_query must be one of them.
      seed: of the prompts.
      dtype: the model's compute dtype.
      implementation: the attention backend; default the fastest that can run.
    """
    programs.check_outputs(out)
    bench = _Bench.load(model, documents, dtype, implementation)
    kinds = {kind: bench.profile(kind, length, profiles, block, curves) for kind in KINDS}
    given = tasks.make_prompts(family, bench.encode, bench.tokens("fillers"), length, prompts, seed)
    plans = {
        kind: make(profile, density, "output", "mean_query", length=length)
        for kind, profile in kinds.items()
    }
    base = methods.of_plan(plans["text"], length)
    most = np.broadcast_to(row_blocks.ceilings(base.counts.shape[-1]), base.counts.shape)
    least = np.broadcast_to(row_blocks.floors(base.counts.shape[-1]), base.counts.shape)
    answered = functools.partial(_loss, bench.subject, given, base, block)
    record: dict[str, Any] = {
        "family": family,
        "length": length,
        "density": density,
        "prompts": prompts,
        "share_by_layer_and_head": {k: x.shares.round(4).tolist() for k, x in plans.items()},
    }
    for name, start, other in (("all", np.asarray(base.counts), most), ("starve", most, least)):
        reference = answered(start)
        change = np.zeros(start.shape[:2])
        for l, h in np.ndindex(*change.shape):
            counts = start.copy()
            counts[l, h] = other[l, h]
            change[l, h] = (answered(counts) - reference).mean()
        record[f"{name}_loss"] = float(reference.mean())
        record[f"{name}_change_by_layer_and_head"] = change.round(5).tolist()
        print(name, reference.mean(), change.min(), change.max(), flush=True)
        result = {"provenance": provenance() | {"model": model.name}, "rows": [record]}
        out.write_text(to_json(result))


def _loss(
    subject: Observer, prompts: Any, base: Method, block: int, counts: np.ndarray
) -> np.ndarray:
    changed = dataclasses.replace(base, counts=jnp.asarray(counts, jnp.int32))
    return answer_prompts(subject, prompts, changed, block).loss


COMMANDS: dict[str, Callable[..., Any]] = {
    "prepare": programs.stopping()(prepare),
    "table": table,
    "merge": programs.stopping()(merge),
    "heads": heads,
}

if __name__ == "__main__":
    import tyro

    tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="python -m xsake.bench.suites.tasks")
