"""Documents for calibration and evaluation: token windows of one length, cut from text files.

Here a document is not a whole text but a random window of one. Texts are visited in random order,
all once before any is used again. A .npy file holds documents that are tokenized already.
`disjoint_documents` cuts windows that do not overlap instead, for standard errors over documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from xsake.data import text

CHARACTERS_PER_TOKEN = 8  # above that of real text, so that one window of characters is enough


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
    """`count` documents of exactly `length` tokens, int32 [length] each.

    Texts that are too short for a document are skipped.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(texts))
    found: list[np.ndarray] = []
    too_short: set[int] = set()
    for attempt in range(count * 4 + len(texts)):
        if len(found) == count or len(too_short) == len(texts):
            break
        number = int(order[attempt % len(texts)])
        if number in too_short:
            continue
        whole = texts[number]
        window = length * CHARACTERS_PER_TOKEN
        begin = int(rng.integers(0, max(1, len(whole) - window)))
        if begin:
            begin = whole.find(" ", begin) + 1  # not in the middle of a word
        tokens = encode(whole[begin : begin + window])[:length]
        if len(tokens) < length:
            too_short.add(number)
            continue
        found.append(np.asarray(tokens, np.int32))
    if len(found) < count:
        raise ValueError(
            f"only {len(found)} of {count} documents of {length:,} tokens could be cut from "
            f"{len(texts)} texts; ask for fewer or shorter ones"
        )
    return found


def disjoint_documents(
    whole: str, encode: Callable[[str], Sequence[int]], length: int, count: int
) -> list[np.ndarray]:
    """`count` documents of exactly `length` tokens, spread over one text without overlap.

    Each begins with the tokens that `encode` puts before a text.

    >>> [x.tolist() for x in disjoint_documents("abcdefg", lambda text: [0, *map(ord, text)], 4, 2)]
    [[0, 97, 98, 99], [0, 100, 101, 102]]
    """
    prefix = list(encode(""))
    tokens = np.asarray(encode(whole)[len(prefix) :], np.int32)
    size = length - len(prefix)
    available = len(tokens) // size if size > 0 else 0
    if not 0 < count <= available:
        raise ValueError(
            f"{count} documents of {length:,} tokens were asked for, and {available} can be cut "
            "from the text without overlap; ask for at least one and for no more than that"
        )
    starts = [size * (i * available // count) for i in range(count)]
    first = np.asarray(prefix, np.int32)
    return [np.concatenate([first, tokens[at : at + size]]) for at in starts]
