"""TokenDataset: a folder of documents as token ids.

NAME/tokens.bin      uint16 or uint32, all documents concatenated, each with its end token and, if
                     the tokenizer adds one, its bos; memory-mapped
NAME/starts.bin      uint64, the offset of each document's first token; read into memory
NAME/tokenizer.json  the tokenizer; a model trained on the tokens is exported with it
NAME/header.json     sizes, vocabulary, hash; written last: a folder without it is incomplete
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from xsake import _files
from xsake.data.tokenizer import Tokenizer

SCHEMA = 1
CHARACTERS_PER_CALL = 1 << 22  # the tokenizer encodes the texts of one call in parallel


@dataclasses.dataclass(frozen=True)
class Header:
    """The contents of header.json."""

    dtype: str  # uint16 | uint32
    vocab_size: int
    tokens: int
    documents: int
    end: int | None  # the token after each document
    hash: str  # of tokens.bin and starts.bin
    sources: tuple[str, ...]  # names of the text files
    schema: int = SCHEMA


@dataclasses.dataclass(frozen=True, eq=False)
class TokenDataset:
    """Tokens, which are memory-mapped, and the offsets of documents."""

    folder: Path
    header: Header

    @staticmethod
    def open(folder: str | os.PathLike[str], verify: bool = False) -> TokenDataset:
        """Opens what `tokenize` wrote; checks its sizes, and with `verify` its hash."""
        folder = Path(folder)
        header = _read_header(folder)
        width = np.dtype(header.dtype).itemsize
        wanted = {"tokens.bin": header.tokens * width, "starts.bin": header.documents * 8}
        for name, size in wanted.items():
            has = (folder / name).stat().st_size if (folder / name).is_file() else 0
            if has != size:
                raise ValueError(
                    f"{folder / name} has {has:,} bytes where its header says {size:,}: "
                    "it is truncated; copy it or tokenize again"
                )
        file = TokenDataset(folder, header)
        if verify and (found := _hash(folder)) != header.hash:
            raise ValueError(
                f"{folder} has hash {found}, its header says {header.hash}: it is damaged; "
                "copy it or tokenize again"
            )
        starts = file.starts
        if starts[0] or (np.diff(starts.astype(np.int64)) < 0).any() or starts[-1] >= header.tokens:
            raise ValueError(
                f"{folder / 'starts.bin'} does not rise from 0 to below {header.tokens}: "
                "it is damaged; copy it or tokenize again"
            )
        if verify:
            for begin in range(0, header.tokens, 1 << 22):
                file.check_ids(file.tokens[begin : begin + (1 << 22)])
        return file

    def check_ids(self, ids: np.ndarray) -> None:
        """Raises if one of these tokens is not in the vocabulary."""
        if ids.size and (largest := int(ids.max())) >= self.header.vocab_size:
            raise ValueError(
                f"{self.folder} has token id {largest}, but its vocabulary is "
                f"{self.header.vocab_size}; tokenize again"
            )

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """uint16 or uint32 [tokens], memory-mapped."""
        return np.memmap(self.folder / "tokens.bin", self.header.dtype, mode="r")

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """uint64 [documents]: offsets of the documents, rising from 0."""
        return np.fromfile(self.folder / "starts.bin", np.uint64)

    def __len__(self) -> int:
        return self.header.tokens

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's file."""
        return self.folder / "tokenizer.json"


def tokenize(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    out: str | os.PathLike[str],
    *,
    end: int | None = None,
    sources: Iterable[str] = (),
    report: Callable[[int, int], None] | None = None,
) -> TokenDataset:
    """Writes documents as a TokenDataset; an interrupted call leaves no folder of that name.

    Args:
      texts: the documents.
      tokenizer: the bos token that it adds, if any, is kept at the start of every document.
      out: the folder, which must not exist.
      end: a token to append to each document, unless the tokenizer does; default the tokenizer's
        first eos, if it has one.
      sources: names to record in the header.
      report: called with the numbers of documents and tokens written so far.
    """
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists already; name another folder or remove it")
    end = end if end is not None else next(iter(tokenizer.eos), None)
    # the ids of some tokenizers have gaps
    size = max(len(tokenizer), 1 + max(tokenizer.inner.get_vocab().values(), default=0))
    dtype = np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    with (part / "tokens.bin").open("wb") as tokens, (part / "starts.bin").open("wb") as starts:
        count, documents = _write(texts, tokenizer, end, dtype, tokens, starts, report)
    if not documents:
        shutil.rmtree(part)
        raise ValueError(f"no document with text was found in {list(sources) or 'the texts'}")
    tokenizer.inner.save(str(part / "tokenizer.json"), pretty=False)
    header = Header(
        dtype=dtype.name,
        vocab_size=size,
        tokens=count,
        documents=documents,
        end=end,
        hash=_hash(part),
        sources=tuple(sources),
    )
    (part / "header.json").write_text(json.dumps(dataclasses.asdict(header), indent=2) + "\n")
    part.rename(out)
    return TokenDataset.open(out)


def _write(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    end: int | None,
    dtype: np.dtype[Any],
    tokens: BinaryIO,
    starts: BinaryIO,
    report: Callable[[int, int], None] | None,
) -> tuple[int, int]:
    count = documents = 0
    suffix = [] if end is None or _appends(tokenizer, end) else [end]
    for batch in _batches(texts):
        for encoded in tokenizer.inner.encode_batch(batch):
            ids = [*encoded.ids, *suffix]
            if not ids:
                continue
            starts.write(np.uint64(count).tobytes())
            tokens.write(np.asarray(ids, dtype).tobytes())
            count, documents = count + len(ids), documents + 1
        if report is not None:
            report(documents, count)
    return count, documents


def _appends(tokenizer: Tokenizer, end: int) -> bool:
    """Whether `encode` itself appends this token to a text."""
    seen = tokenizer.inner.encode("a")
    return bool(seen.ids[-1:] == [end] and seen.special_tokens_mask[-1])


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if sum(map(len, batch)) >= CHARACTERS_PER_CALL or len(batch) >= 1024:
            yield batch
            batch = []
    if batch:
        yield batch


def train_tokenizer(texts: Iterable[str], size: int, end: str = "<|endoftext|>") -> Tokenizer:
    """Trains a byte-level BPE of at most `size` entries.

    `end` has id 0: `encode` prepends it as bos, and `tokenize` also appends it as eos.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    if size < 257:
        raise ValueError(
            f"the vocabulary size must be at least 257 (256 bytes and an end token), got {size}"
        )
    if not end:
        raise ValueError("the end token is empty; name one that is in no text")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="bos $A", special_tokens=[{"id": "bos", "ids": [0], "tokens": [end]}]
    )
    return Tokenizer(inner, bos=0, eos=(0,))


def end_token(tokenizer: Tokenizer, end: str = "<|endoftext|>") -> Tokenizer:
    """The tokenizer with `end` as its bos and eos; raises if its vocabulary lacks `end`."""
    number = tokenizer.inner.token_to_id(end)
    if number is None:
        raise ValueError(f"the tokenizer has no token {end!r}; name its end-of-document token")
    return Tokenizer(tokenizer.inner, bos=number, eos=(number,))


def _read_header(folder: Path) -> Header:
    path = folder / "header.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} is not a tokenized dataset: it has no header.json; "
            "`xsake tokenize` writes one"
        )
    try:
        values = _files.parse_object(path.read_text(encoding="utf-8"), "it")
        if values.get("schema") != SCHEMA:
            raise ValueError(f"schema {values.get('schema')} where this version reads {SCHEMA}")
        _files.check_fields(Header, values, "it")
        header = Header(**values | {"sources": tuple(values["sources"])})
    except ValueError as error:
        raise ValueError(f"{path} is not the header of a tokenized dataset: {error}") from error
    if header.dtype not in ("uint16", "uint32"):
        raise ValueError(f"{path}: dtype {header.dtype!r} is not uint16 or uint32")
    if header.tokens < 1 or header.documents < 1 or header.vocab_size < 1:
        raise ValueError(
            f"{path} says {header.tokens} tokens in {header.documents} documents, vocabulary "
            f"{header.vocab_size}"
        )
    return header


def _hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in ("tokens.bin", "starts.bin"):
        with (folder / name).open("rb") as file:
            for part in iter(functools.partial(file.read, 1 << 22), b""):
                digest.update(part)
    return digest.hexdigest()[:16]


def hash_of_files(files: Iterable[TokenDataset]) -> str:
    """One hash for several datasets in their order; for a single dataset, its own hash."""
    hashes = [file.header.hash for file in files]
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def boundaries(files: Iterable[TokenDataset]) -> np.ndarray:
    """Offsets of the documents when the datasets are concatenated, int64 [documents]."""
    files = list(files)
    before = itertools.accumulate((len(file) for file in files), initial=0)
    parts = zip(files, before, strict=False)
    return np.concatenate([file.starts.astype(np.int64) + offset for file, offset in parts])
