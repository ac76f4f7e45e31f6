"""Documents for calibration and evaluation: token windows of one length, cut from text files.

Here a document is not a whole text but a window of one. Windows do not overlap, so that standard
errors over documents are those of different text.

    tokens of a text   │ random offset │ window │ window │ window │ rest │

A .npy file holds documents that are tokenized already.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from xsake.data import text

CHARACTERS_PER_TOKEN = 8  # above that of real text, so that a stretch of it holds a window


def load_documents(
    paths: Sequence[str | Path],
    encode: Callable[[str], Sequence[int]] | None,
    length: int,
    count: int,
    seed: int = 0,
) -> list[np.ndarray]:
    """Documents from text files, or tokenized ones from one .npy file of int [documents, tokens].

    Tokenized documents are used in the file's order, cut to `length`; they need no `encode`.
    """
    for name, value in (("length", length), ("count", count)):
        if value < 1:
            raise ValueError(f"the {name} of documents must be at least 1, got {value}")
    first = Path(paths[0])
    if first.suffix != ".npy":
        if encode is None:
            raise ValueError(f"{first} is text, and the model came without a tokenizer")
        return documents(list(text.documents(paths)), encode, length, count, seed)
    tokenized = _load(first)
    if len(paths) > 1 or tokenized.ndim != 2 or not np.issubdtype(tokenized.dtype, np.integer):
        raise ValueError(f"{first} must be the only file and hold an int [documents, tokens] array")
    if tokenized.shape[0] < count or tokenized.shape[1] < length:
        raise ValueError(
            f"{first} holds {tokenized.shape[0]} documents of {tokenized.shape[1]:,} tokens, "
            f"but {count} of {length:,} are asked for"
        )
    cut = tokenized[:count, :length]
    if cut.min() < -(2**31) or cut.max() >= 2**31:
        raise ValueError(f"{first} has token ids that do not fit 32 bits; was it made of tokens?")
    return list(cut.astype(np.int32))


def _load(path: Path) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not an .npy file of token ids: {error}") from error
    if not isinstance(found, np.ndarray):  # an .npz by another name
        raise ValueError(f"{path} holds several arrays; save one int [documents, tokens] array")
    return found


def documents(
    texts: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    length: int,
    count: int,
    seed: int = 0,
) -> list[np.ndarray]:
    """`count` documents of exactly `length` tokens, int32 [length] each, without overlap.

    Texts are visited in random order, each once before any is used again; texts that are too short
    are skipped. A document begins with the tokens that `encode` puts before a text. Of a long text,
    some stretches are tokenized, each long enough for a document; all of it only if the documents
    of all texts would be too few otherwise.
    """
    stretch = length * CHARACTERS_PER_TOKEN
    longest = stretch * -(-count // max(1, len(texts)))  # text of this length is tokenized as one
    found = _draw(texts, encode, length, count, seed, stretch, longest)
    if len(found) < count and any(len(x) > longest for x in texts):
        longest = max(map(len, texts))
        found = _draw(texts, encode, length, count, seed, stretch, longest)
    if len(found) < count:
        raise ValueError(
            f"only {len(found)} of {count} documents of {length:,} tokens could be cut from "
            f"{len(texts)} texts without overlap; give more text, or ask for fewer (--documents, "
            "--prompts of tasks) or shorter ones (--length, --lengths of tasks)"
        )
    return found


def _draw(
    texts: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    length: int,
    count: int,
    seed: int,
    stretch: int,
    longest: int,
) -> list[np.ndarray]:
    """At most `count` documents; texts of more than `longest` characters are cut into stretches."""
    rng = np.random.default_rng(seed)

    def windows(part: str) -> Iterator[np.ndarray]:
        first, tokens = _split(part, encode)
        size = length - len(first)
        available = len(tokens) // size if size > 0 else 0
        offset = rng.integers(0, len(tokens) - available * size + 1)
        for i in rng.permutation(available):
            yield np.concatenate([first, tokens[offset + i * size :][:size]])

    def of_text(text: str) -> Iterator[np.ndarray]:
        parts = _stretches(text, stretch) if len(text) > longest else [text]
        return _in_turn(windows(parts[i]) for i in rng.permutation(len(parts)))

    every = _in_turn(of_text(texts[i]) for i in rng.permutation(len(texts)))
    return list(itertools.islice(every, count))


def _in_turn(iterators: Iterable[Iterator[np.ndarray]]) -> Iterator[np.ndarray]:
    """The first of each iterator, then the second of each, until all are exhausted."""
    waiting = iterators
    while waiting:
        again = []
        for iterator in waiting:
            for found in itertools.islice(iterator, 1):
                yield found
                again.append(iterator)
        waiting = again


def _stretches(text: str, size: int) -> list[str]:
    """The text in parts of about `size` characters, cut between words."""
    number = len(text) // size
    cuts = [len(text) * i // number for i in range(1, number)]
    cuts = [at if (space := text.find(" ", at, at + size)) < 0 else space + 1 for at in cuts]
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


def _split(text: str, encode: Callable[[str], Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(the tokens that `encode` puts before a text, those of the text itself), int32."""
    around, found = np.asarray(encode(""), np.int32), np.asarray(encode(text), np.int32)
    before = 0
    while before < min(len(around), len(found)) and around[before] == found[before]:
        before += 1
    after = around[before:]  # such as eos
    end = len(found) - len(after)
    if not len(after) or end < before or (found[end:] != after).any():
        end = len(found)
    return found[:before], found[before:end]


def disjoint_documents(
    whole: str, encode: Callable[[str], Sequence[int]], length: int, count: int
) -> list[np.ndarray]:
    """`count` documents of exactly `length` tokens, spread evenly over one text without overlap.

    Like `documents`, with nothing random: the first document is the text's beginning.

    >>> [x.tolist() for x in disjoint_documents("abcdefg", lambda text: [0, *map(ord, text)], 4, 2)]
    [[0, 97, 98, 99], [0, 100, 101, 102]]
    """
    first, tokens = _split(whole, encode)
    size = length - len(first)
    available = len(tokens) // size if size > 0 else 0
    if not 0 < count <= available:
        raise ValueError(
            f"{count} documents of {length:,} tokens were asked for, and {available} can be cut "
            "from the text without overlap; ask for at least one and for no more than that"
        )
    starts = [size * (i * available // count) for i in range(count)]
    return [np.concatenate([first, tokens[at : at + size]]) for at in starts]
