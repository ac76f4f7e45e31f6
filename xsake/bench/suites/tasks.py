"""Long-context tasks on one model, resumable: python -m xsake.bench.suites.tasks COMMAND.

    prepare   a model's tokenizer + text files → a folder of .npy documents
    table     calibrates on text, and on text with facts and questions too (cached), then measures
              tasks and perplexity at every density → JSON
    heads     gives one head at a time all of its blocks, or only the forced ones → JSON

Prompts are made from the seed and the fillers with the model's tokenizer.
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

from xsake.bench.timing import provenance
from xsake.data import documents as text
from xsake.data import tasks
from xsake.data.tasks import Encode
from xsake.evaluate import methods, needle
from xsake.evaluate.methods import Method
from xsake.evaluate.needle import Settings, answer_prompts
from xsake.evaluate.quality import mean_and_error
from xsake.evaluate.table import measure_losses, to_json
from xsake.hads import Profile, make, row_blocks
from xsake.model import huggingface
from xsake.model.observer import Observer

KINDS = {"text": ("text",), "mixed": ("text", "retrieval")}  # calibrations and their documents
LABEL = "from text"  # of methods that are calibrated on plain text only
DENSITIES = (0.20, 0.43, 0.10, 0.30, 0.60)  # the first two for everything, then the others
METHODS = (
    *("part_queries/output", "mean_query/output", f"mean_query/output {LABEL}"),
    *("sink_window", "oracle/output"),
)
CURVES = ("static", "mean_query", "part_queries", "oracle")


def prepare(
    model: Path,
    out: Path,
    calibration: list[Path],
    held_out: list[Path],
    length: int = 8192,
    documents: int = 16,
    prompts: int = 100,
    evaluation: int = 8,
    seed: int = 0,
) -> None:
    """Writes out/text.npy, retrieval.npy, fillers.npy and held_out.npy.

    text and retrieval are cut from the calibration files; fillers of prompts and the held-out
    documents for perplexity from the held-out files, with the seed `seed` + 1.
    """
    tokenizer = huggingface.examine(model).tokenizer()
    load = functools.partial(text.load_documents, encode=tokenizer.encode, length=length)
    cut = load(calibration, count=2 * documents, seed=seed)
    made = {
        "text": cut[:documents],
        "retrieval": tasks.recall_documents(tokenizer.encode, cut[documents:], length, seed),
        "fillers": load(held_out, count=prompts, seed=seed + 1),
        "held_out": load(held_out, count=evaluation, seed=seed + 1),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, found in made.items():
        narrow = np.uint16 if max(x.max() for x in found) < 1 << 16 else np.int32
        np.save(out / f"{name}.npy", np.stack(found).astype(narrow))
        print(f"{name}: {len(found)} × {length:,} tokens", flush=True)


@dataclasses.dataclass(frozen=True)
class _Bench:
    """The model, its tokenizer and the folder that `prepare` wrote."""

    subject: Observer
    encode: Encode
    documents: Path

    @staticmethod
    def load(model: Path, documents: Path, dtype: str, implementation: str | None) -> _Bench:
        loaded = huggingface.load(model, dtype=dtype, implementation=implementation)
        assert loaded.tokenizer is not None
        return _Bench(Observer(loaded.model), loaded.tokenizer.encode, documents)

    def tokens(self, name: str) -> list[np.ndarray]:
        return list(np.load(self.documents / f"{name}.npy").astype(np.int32))

    def profile(self, kind: str, folder: Path, block: int, curves: tuple[str, ...]) -> Profile:
        """A profile from its file; if there is none, measured now and saved."""
        path = folder / f"{kind}-{block}.safetensors"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            began = time.perf_counter()
            documents = [x for name in KINDS[kind] for x in self.tokens(name)]
            kinds = " and ".join(
                f"{len(self.tokens(name))} documents of {name}" for name in KINDS[kind]
            )
            found = self.subject.profile(documents, block=block, curves=curves, kinds=kinds)
            print(f"profile of {kind}: {time.perf_counter() - began:.1f} s", flush=True)
            found.save(path)
        return Profile.load(path)


def table(
    model: Path,
    documents: Path,
    profiles: Path,
    out: Path,
    block: int = 64,
    lengths: tuple[int, ...] = (8192, 4096, 2048),
    families: tuple[str, ...] = tuple(tasks.FAMILIES),
    prompts: int = 100,
    densities: tuple[float, ...] = DENSITIES,
    names: tuple[str, ...] = METHODS,
    curves: tuple[str, ...] = CURVES,
    seed: int = 1,
    seconds: float = 1e9,
    dtype: str = "bfloat16",
    implementation: str | None = None,
) -> None:
    """Measures perplexity and tasks; writes the JSON file `out`, which a second call resumes.

    Args:
      model: a folder of safetensors or a .gguf file.
      documents: the folder that `prepare` wrote.
      profiles: a folder for the profiles, which are large.
      out: a JSON file.
      block: tokens per block.
      lengths: of the prompts.
      families: of the prompts.
      prompts: of each family and length.
      densities: the first two are measured for all lengths and families before the others.
      names: methods; those with the label "from text" are calibrated on plain text only.
      curves: selectors to measure cost curves for.
      seed: of the prompts.
      seconds: no new length is begun after so many.
      dtype: the model's compute dtype.
      implementation: the attention backend; default the fastest that can run.
    """
    began = time.perf_counter()
    bench = _Bench.load(model, documents, dtype, implementation)
    kinds = {kind: bench.profile(kind, profiles, block, curves) for kind in KINDS}
    main = kinds["mixed"]
    build = functools.lru_cache(maxsize=32)(
        functools.partial(
            methods.at_density, main, others={LABEL: kinds["text"]}, names=tuple(names)
        )
    )

    def report(line: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {line}", flush=True)

    facts = {"calibration_data_hash": main.facts.data_hash, "kinds": main.facts.kinds}
    origin = provenance() | {"model": model.name, "dtype": dtype}
    perplexity = _perplexity(bench, build, densities, block, report)
    for some in (densities[:2], densities[2:]):
        for length in lengths:
            if time.perf_counter() - began > seconds or not some:
                continue
            needle.run_tasks(
                bench.subject,
                build,
                bench.encode,
                bench.tokens("fillers"),
                Settings(families, (length,), prompts, some, seed),
                block,
                out,
                facts=facts,
                provenance=origin,
                report=report,
            )
            found = json.loads(out.read_text())
            out.write_text(to_json(found | {"perplexity": perplexity}))


def _perplexity(
    bench: _Bench,
    build: Callable[[float, int], list[Method]],
    densities: tuple[float, ...],
    block: int,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Perplexity gap of every method on the held-out documents."""
    held_out, found = bench.tokens("held_out"), []
    for density in densities:
        made = build(density, len(held_out[0]))
        losses, dense = measure_losses(bench.subject, made, held_out, block)
        for method, mine in zip(made, losses, strict=True):
            gaps = np.expm1(mine - dense)
            mean, error = mean_and_error(gaps)
            report(f"perplexity, {method.name} at {density}: {mean:+.2%}")
            found.append(
                {
                    "method": method.name,
                    "density": density,
                    "length": len(held_out[0]),
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
    curves: tuple[str, ...] = CURVES,
    seed: int = 0,
    dtype: str = "bfloat16",
    implementation: str | None = None,
) -> None:
    """Which heads carry the answer: changes the budget of one head at a time.

        all     mean_query/output calibrated on text at `density`; one head gets all of its blocks
        starve  every head has all of its blocks; one head keeps the forced ones only

    The change of the answer's loss, in nats per token, is written for every layer and head, with
    the densities that the heads have when calibrated on text and on both kinds of documents.
    """
    bench = _Bench.load(model, documents, dtype, implementation)
    kinds = {kind: bench.profile(kind, profiles, block, curves) for kind in KINDS}
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


if __name__ == "__main__":
    import tyro

    tyro.extras.subcommand_cli_from_dict({"prepare": prepare, "table": table, "heads": heads})
