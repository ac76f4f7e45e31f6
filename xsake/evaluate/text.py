"""Documents of one length from text files: .txt, .jsonl with a "text" field, and either in .xz.

A document is a window of one source text, at a drawn place; texts are taken in a drawn order, each
once before any is taken again.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

CHARACTERS_PER_TOKEN = 8  # more than any real text has, so that one window of characters is enough


def read_texts(paths: Sequence[str | Path]) -> list[str]:
    """All texts of the files, in order."""
    return [text for path in paths for text in _texts_of(Path(path))]


def _texts_of(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no text file {path}")
    packed = path.suffix == ".xz"
    raw = lzma.decompress(path.read_bytes()) if packed else path.read_bytes()
    kind = Path(path.stem).suffix if packed else path.suffix
    content = raw.decode("utf-8")
    if kind not in (".jsonl", ".txt"):
        raise ValueError(f"{path} is neither .txt nor .jsonl (nor either in .xz)")
    if kind == ".txt":
        yield content
        return
    for line in content.splitlines():
        if line.strip():
            yield json.loads(line)["text"]


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
        text = texts[number]
        window = length * CHARACTERS_PER_TOKEN
        begin = int(draw.integers(0, max(1, len(text) - window)))
        if begin:
            begin = text.find(" ", begin) + 1  # not in the middle of a word
        tokens = encode(text[begin : begin + window])[:length]
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
