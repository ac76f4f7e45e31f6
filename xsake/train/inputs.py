"""The text that a run reads: datasets opened, checked against the model, and made into streams."""

from __future__ import annotations

from pathlib import Path

from xsake.data.stream import Stream
from xsake.data.tokens import TokenDataset
from xsake.train.config import Config


def training_stream(config: Config) -> Stream:
    """The training text, shuffled by the seed."""
    return _stream(config, _files_of(config), config.seed)


def _files_of(config: Config) -> list[TokenDataset]:
    if not config.data.train:
        raise ValueError(
            "data.train names no tokenized dataset; `xsake tokenize` writes one, "
            "--data.train FOLDER names it"
        )
    return [_checked(config, path) for path in config.data.train]


def held_out(config: Config) -> dict[str, Stream]:
    """The evaluation datasets by name."""
    found: dict[str, Stream] = {}
    for path in config.evaluation.files:
        name = Path(path).name
        if name in found:
            raise ValueError(
                f"evaluation.files has two datasets of the name {name!r}, by which results are "
                "logged; rename a folder"
            )
        found[name] = _stream(config, [_checked(config, path)])
    return found


def vocabulary_note(config: Config, stream: Stream) -> str:
    """What is said of a vocabulary that is larger than the text's."""
    size = max(file.header.vocab_size for file in stream.files)
    if config.model.vocab_size <= size:
        return ""
    return (
        f"model.vocab_size is {config.model.vocab_size:,}, the tokenizer's {size:,}: the other "
        f"rows of the embedding are never trained; --model.vocab-size {size} leaves them out"
    )


def _stream(config: Config, files: list[TokenDataset], seed: int = 0) -> Stream:
    data = config.data
    return Stream(files, data.length, seed, data.separate, config.model.bos if data.bos else None)


def _checked(config: Config, path: str) -> TokenDataset:
    file = TokenDataset.open(path, verify=config.data.verify)
    if file.header.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"{path} has a vocabulary of {file.header.vocab_size:,}, the model one of "
            f"{config.model.vocab_size:,}; set model.vocab_size"
        )
    return file
