"""Documents of one length, cut from the texts of some files.

A document is a window of one text, at a drawn place; texts are taken in a drawn order, each once
before any is taken again. A .npy file holds documents that are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from xsake.data import text

CHARACTERS_PER_TOKEN = 8  # more than any real text has, so that one window of characters is enough


def load_documents(
    paths: Sequence[str | Path],
    encode: Callable[[str], Sequence[int]] | None,
    length: int,
    count: int,
    seed: int = 0,
) -> list[np.ndarray]:
    """Documents from text files, or ready ones from one .npy file of int [documents, tokens].

    Ready ones are taken from the first, each cut to `length`; they need no tokenizer.
    """
    first = Path(paths[0])
    if first.suffix != ".npy":
        if encode is None:
            raise ValueError(f"{first} is text, and the model came without a tokenizer")
        return documents(list(text.documents(paths)), encode, length, count, seed)
    ready = np.load(first, allow_pickle=False)
    if len(paths) > 1 or ready.ndim != 2 or not np.issubdtype(ready.dtype, np.integer):
        raise ValueError(f"{first} must be alone and hold int [documents, tokens]")
    if ready.shape[0] < count or ready.shape[1] < length:
        raise ValueError(
            f"{first} holds {ready.shape[0]} documents of {ready.shape[1]:,} tokens, "
            f"but {count} of {length:,} are asked for"
        )
    return list(ready[:count, :length].astype(np.int32))


def documents(
    texts: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    length: int,
    count: int,
    seed: int = 0,
) -> list[np.ndarray]:
    """`count` documents of exactly `length` tokens, int32 [length] each.

    Texts that are too short for one are passed over.
    """
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(texts))
    found: list[np.ndarray] = []
    spent: set[int] = set()
    for turn in range(count * 4 + len(texts)):
        if len(found) == count or len(spent) == len(texts):
            break
        number = int(order[turn % len(texts)])
        if number in spent:
            continue
        whole = texts[number]
        window = length * CHARACTERS_PER_TOKEN
        begin = int(draw.integers(0, max(1, len(whole) - window)))
        if begin:
            begin = whole.find(" ", begin) + 1  # not in the middle of a word
        tokens = encode(whole[begin : begin + window])[:length]
        if len(tokens) < length:
            spent.add(number)
            continue
        found.append(np.asarray(tokens, np.int32))
    if len(found) < count:
        raise ValueError(
            f"only {len(found)} of {count} documents of {length:,} tokens could be cut from "
            f"{len(texts)} texts; ask for fewer or shorter ones"
        )
    return found
