"""xsake tokenize, train, runs: from text to a model, and the list of runs."""

from __future__ import annotations

from pathlib import Path

import tyro
from rich import box
from rich.table import Table

from xsake import _extras
from xsake.cli.terminal import Out, console, writable_file


def tokenize(
    text: tyro.conf.Positional[list[Path]],
    out: Out,
    tokenizer: Path | None = None,
    vocabulary: int | None = None,
    end: str = "<|endoftext|>",
    field: str = "text",
) -> None:
    """Writes text as a tokenized dataset, for `xsake train`.

    Args:
      text: one document per .txt file or per line of a .jsonl file; optionally .gz, .xz or .zst.
      out: the folder to write.
      tokenizer: a tokenizer.json. With `vocabulary`, the path where the new one is written.
      vocabulary: first train a byte-level BPE tokenizer with this vocabulary size on the text.
      end: the end-of-document token; a newly trained tokenizer also prepends it as bos.
      field: the JSON field that contains the text.
    """
    from xsake.data import text as texts
    from xsake.data import tokens
    from xsake.data.tokenizer import read_tokenizer

    if any(path.suffix == ".zst" for path in text):
        _extras.require("reading .zst files", "train", "zstandard")
    if out.exists():
        raise FileExistsError(f"{out} exists already; name another folder or remove it")
    writable_file(out)
    if vocabulary is not None:
        if tokenizer is not None and tokenizer.exists():
            raise FileExistsError(f"{tokenizer} exists; leave out --vocabulary to use it")
        if tokenizer is not None:
            writable_file(tokenizer)
        known = tokens.train_tokenizer(texts.documents(text, field), vocabulary, end)
        if tokenizer is not None:
            known.inner.save(str(tokenizer))
    elif tokenizer is None:
        raise ValueError("name a tokenizer.json with --tokenizer, or train one with --vocabulary")
    elif not tokenizer.exists():
        raise FileNotFoundError(f"there is no {tokenizer}; give --vocabulary to train one there")
    else:
        known = tokens.end_token(read_tokenizer(tokenizer), end)
    names = [path.name for path in text]
    with console.status("") as status:
        file = tokens.tokenize(
            texts.documents(text, field),
            known,
            out,
            sources=names,
            report=lambda documents, count: status.update(
                f"{documents:,} documents, {count:,} tokens"
            ),
        )
    header = file.header
    console.print(
        f"written: {out}: {header.tokens:,} tokens of {header.documents:,} documents, "
        f"vocabulary {header.vocab_size:,}, {header.dtype}, hash {header.hash}",
        soft_wrap=True,
    )


def train() -> None:
    """Trains a model, or resumes the run of this name; see docs/training.md."""


def runs(folder: tyro.conf.Positional[Path] = Path("runs"), *, hashes: bool = False) -> None:
    """Lists the runs of a folder: progress and results.

    A run is running, dead (killed or crashed: run its command again to resume), not started, or has
    stopped for the reason given.

    Args:
      folder: the folder that contains the run folders.
      hashes: list where each run comes from instead: hashes of config, data and plan, commit.
    """
    from xsake.observe import registry

    if folder == Path("runs") and not folder.exists():
        console.print("No runs yet: `xsake train` and `xsake demo` write them to the folder runs.")
        return
    found = list(registry.runs(folder))
    if hashes:
        table = _table("run", "config", "data", "plan", "commit", "device")
        for run in found:
            known = (run.config_hash, run.data_hash, run.plan, run.commit)
            table.add_row(run.name, *(x[:8] for x in known), run.device)
        console.print(table)
        return
    table = _table("run", "state", "step", "loss", "density", "perplexity", "saved at")
    for run in found:
        table.add_row(
            run.name,
            run.state,
            f"{run.step}/{run.steps}",
            "" if run.loss_nats is None else f"{run.loss_nats:.3f}",
            f"{run.density_ratio:.2f}",
            "\n".join(f"{file} {x:.2f}" for file, x in run.perplexity.items()),
            "\n".join(map(str, run.checkpoints)),
        )
    console.print(table)


def _table(*names: str) -> Table:
    """A table without vertical lines, which fits a terminal of 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name in ("step", "loss", "density"))
    return table
