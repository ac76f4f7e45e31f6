"""xsake tokenize, train, runs: from text to a model, and the list of runs."""

from __future__ import annotations

from pathlib import Path

import tyro
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


def runs(folder: tyro.conf.Positional[Path] = Path("runs")) -> None:
    """Lists the runs of a folder: configuration, progress and results.

    Args:
      folder: the folder that contains the run folders.
    """
    from xsake.observe import registry

    names = "run state step loss density perplexity checkpoints plan config data commit device"
    table = Table(*names.split())
    for run in registry.runs(folder):
        table.add_row(
            run.name,
            run.state,
            f"{run.step}/{run.steps}",
            "" if run.loss_nats is None else f"{run.loss_nats:.3f}",
            f"{run.density_ratio:.2f}",
            ", ".join(f"{file} {x:.2f}" for file, x in run.perplexity.items()),
            ", ".join(map(str, run.checkpoints)),
            run.plan[:8],
            run.config_hash[:8],
            run.data_hash[:8],
            run.commit[:8],
            run.device,
        )
    console.print(table)
