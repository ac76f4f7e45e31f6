"""xsake calibrate, plan: profile attention, and plan block budgets per head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tyro
from rich.table import Table

from xsake.cli.model_and_text import LENGTH, Dtype, ModelAndText, size_of
from xsake.cli.progress import progress
from xsake.cli.terminal import Out, at_least, check_implementation, console, writable_file
from xsake.parallel.mesh import ONE_DEVICE, MeshSizes

if TYPE_CHECKING:
    from xsake.hads import Profile


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

    An interrupted calibration keeps its finished documents in OUT.partial, where a write takes more
    than a second not always the last of them; rerun the same command
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
    from xsake.hads.files import check_replaceable
    from xsake.hads.partial import Partial

    at_least(1, length=length, documents=documents, block=block)
    at_least(0, band=band, seed=seed)
    _check_selectors(selectors)
    check_implementation(implementation)
    asking = _asking(retrieval, documents)
    check_replaceable(writable_file(out), "profile", *text)
    partial = Partial(
        out.with_name(out.name + ".partial"), {"dtype": dtype, "implementation": implementation}
    )
    subject = ModelAndText.load(model, dtype, implementation, text, mesh, length)
    length = length or min(LENGTH, subject.config.context)
    _check_choice(length, block, band)
    tokens, kinds = _documents(subject, text, length, documents, asking, seed)
    size = size_of(tokens)
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


def _check_choice(length: int, block: int, band: int) -> None:
    """Raises if all blocks are kept whatever the plan is."""
    from xsake.hads.row_blocks import count_blocks, least_density

    n = count_blocks(length, block)
    if least_density(n, band) >= 1:
        raise ValueError(
            f"{length} tokens are {n} row blocks of {block}, and with a band of {band} all blocks "
            "are always kept; give smaller blocks, a narrower band or longer documents"
        )


def _asking(retrieval: float, documents: int) -> int:
    """How many of the documents get facts and questions."""
    asking = round(retrieval * documents) if 0 <= retrieval <= 1 else 0  # not of NaN
    if retrieval != 0 and not asking:
        raise ValueError(
            "--retrieval must be a share from 0 to 1 of the documents, and at least one of them, "
            f"got {retrieval} of {documents}"
        )
    return asking


def _documents(
    subject: ModelAndText, text: list[Path], length: int, documents: int, asking: int, seed: int
) -> tuple[list[np.ndarray], str]:
    """Documents, `asking` of them with facts and questions, and how many there are of each kind."""
    from xsake.data.tasks import recall_documents

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
      top_p: stop adding blocks to a row block at this share of its estimated attention mass; it
        visits at most its budget. `xsake evaluate --plan` measures the density that remains.
      end_weight: weight of the last two row blocks of a text in the budget; the others have 1. A
        prompt ends with its question, and the generated tokens depend on it most. 16 suits prompts
        of 4,096 tokens or more at density 0.20 that look for something; perplexity of plain text
        gets worse.
    """
    from xsake import hads
    from xsake.hads.files import check_replaceable

    check_replaceable(writable_file(out), "plan", profile)
    found = hads.Profile.load(profile)
    made = hads.make(found, density, policy, selector, top_p=top_p, end_weight=end_weight)
    made.save(out)
    console.print(str(made))
    console.print(f"written: {out}")
