"""xsake tokenize, train, runs: from text to a model, and what became of every attempt."""

from __future__ import annotations

from pathlib import Path

import tyro
from rich.table import Table

from xsake.cli.terminal import Out, console


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
      end: the tokenizer's token that is put after each document; one that is learned also begins
        each with it.
      field: of JSON lines, which holds the text.
    """
    from xsake.data import text as texts
    from xsake.data import tokens
    from xsake.data.tokenizer import read_tokenizer

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
            report=lambda documents, count: status.update(
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
