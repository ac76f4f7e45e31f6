"""Stream: the batch of any step, as a pure function of (seed, step, process).

    tokens     d0 d0 d0 e │ d1 d1 e │ d2 d2 d2 d2 d2 d2 e │ …      documents, concatenated
    windows    └──── T + 1 ────┘                                   a window starts every T tokens
                         └──── T + 1 ────┘                         it shares a token with the next
    segments   0  0  0  0   1  1                                   document within the window
    weights    1  1  1  0   1                                      0: target in another document

With a bos token b every batch row starts with it. If a window starts at a document that has its own
b, no second one is added: the row is one token short, and its last target has weight 0.

    tokens     b  d0 d0 d0 │ d0 e  b  d1 │ d1 d1 d1 e │ …          two documents in windows of T = 4
    rows       b  d0 d0 d0   b  d0 e  b    b  d1 d1 d1
    targets    d0 d0 d0 ·    d0 e  b  d1   d1 d1 d1 e              each once; not the first b
    segments   0  0  0  0    0  0  0  1    0  0  0  0
    weights    1  1  1  0    1  1  0  1    1  1  1  1

Every epoch the windows are reshuffled and shifted by a random offset. There is no state between
steps: a resumed run needs the step number only. Each process gets a contiguous slice of the batch;
together they read what a single process would.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax import Array

from xsake.data.tokens import TokenDataset, boundaries, hash_of_files


class Batch(NamedTuple):
    """A window per batch row. Predict targets[b, t] from tokens[b, : t + 1] of the same segment."""

    tokens: np.ndarray | Array  # int32 [B, T]
    targets: np.ndarray | Array  # int32 [B, T]
    segment_ids: np.ndarray | Array  # int32 [B, T]: 0, 1, 2 … in each batch row
    weights: np.ndarray | Array  # float32 [B, T]: 1 where the target is in the same document


class Stream:
    """Windows of `length` tokens over several datasets, read as if concatenated.

    Without `separate`, a batch row is one segment even if it holds several documents. With `bos`,
    every batch row starts with this token.
    """

    def __init__(
        self,
        files: Sequence[TokenDataset],
        length: int,
        seed: int = 0,
        separate: bool = True,
        bos: int | None = None,
    ) -> None:
        if not files:
            raise ValueError("no tokenized datasets are given; `xsake tokenize` writes them")
        self.files, self.length, self.seed = list(files), length, seed
        self.separate, self.bos = separate, bos
        self._ends = list(itertools.accumulate(len(file) for file in self.files))
        self.starts = boundaries(self.files)
        self.hash = hash_of_files(self.files)
        self.tokens = self._ends[-1]
        self.targets = self.tokens - (bos is None)  # without bos the first token is no target
        self.windows = self.targets // length
        if self.windows < 1:
            raise ValueError(
                f"{self.tokens:,} tokens are too few for a window of {length:,} targets; "
                "give more text or a smaller length"
            )
        self._order = functools.lru_cache(maxsize=2)(self._new_order)

    def batch(self, step: int, rows: int, process: int = 0, processes: int = 1) -> Batch:
        """This process's slice of the batch of `step` (from 0): rows / processes sequences."""
        if rows % processes:
            raise ValueError(f"{rows} batch rows are not divisible by {processes} processes")
        each = rows // processes
        return self.batch_rows(step, rows, range(process * each, (process + 1) * each))

    def batch_rows(self, step: int, rows: int, chosen: Sequence[int]) -> Batch:
        """The chosen rows of the batch of `step`, which has `rows` of them."""
        return self.at([self._begin(step * rows + number) for number in chosen])

    def in_order(self, rows: int, most: int | None = None) -> Iterator[Batch]:
        """All windows, or the first `most` of them, in the order of the text, for evaluation.

        The last batch is padded with rows of weight 0.
        """
        count = self.windows if most is None else min(most, self.windows)
        for first in range(0, count, rows):
            yield self.windows_in_order(range(first, first + rows), count)

    def windows_in_order(self, numbers: Sequence[int], count: int) -> Batch:
        """Windows by their number in the text; from number `count` on, rows of weight 0."""
        wanted = np.asarray(numbers)
        batch = self.at(
            [int(number) * self.length for number in np.where(wanted < count, wanted, 0)]
        )
        return batch._replace(weights=batch.weights * (wanted < count)[:, None])

    def long_windows(self, count: int, step: int) -> np.ndarray:
        """Windows to calibrate on at `step`, int32 [count, T].

        Each lies within one document if any document has T tokens. Documents are sampled in
        proportion to the number of windows that fit. With bos, it replaces a window's first token.
        """
        rng = np.random.default_rng([self.seed, step, 1])
        ends = np.append(self.starts[1:], self.tokens)
        slack = ends - self.starts - self.length  # offsets in a document where a window may start
        starts = self.starts[slack >= 0]
        if not len(starts):
            begins = rng.integers(0, self.targets - self.length + 1, count)
        else:
            offsets = np.cumsum(slack[slack >= 0] + 1)
            chosen = rng.integers(0, offsets[-1], count)
            which = np.searchsorted(offsets, chosen, side="right")
            begins = starts[which] + chosen - np.append(0, offsets)[which]
        windows = np.stack([self._read(int(begin), self.length) for begin in begins])
        if self.bos is not None:
            windows[:, 0] = self.bos
        return windows

    def at(self, begins: Sequence[int]) -> Batch:
        """The windows that start at these token offsets."""
        count = self.length + (self.bos is None)
        rows = np.stack([self._read(begin, count) for begin in begins])
        offsets = np.asarray(begins, np.int64)[:, None] + np.arange(count)
        document = np.searchsorted(self.starts, offsets, side="right")
        segments = (document - document[:, :1]).astype(np.int32) * self.separate
        has_own = np.zeros(len(rows), bool)
        if self.bos is not None:
            is_start = offsets[:, 0] == self.starts[document[:, 0] - 1]
            has_own = is_start & (rows[:, 0] == self.bos)
            rows, segments = (
                _with_first(x, first, has_own) for x, first in ((rows, self.bos), (segments, 0))
            )
        same = segments[:, :-1] == segments[:, 1:]
        same[has_own, -1] = False
        return Batch(rows[:, :-1], rows[:, 1:], segments[:, :-1], same.astype(np.float32))

    def _begin(self, number: int) -> int:
        """Start offset of the `number`-th window that is read since training began."""
        epoch, index = divmod(number, self.windows)
        offset, order = self._order(epoch)
        return int(offset + order[index] * self.length)

    def _new_order(self, epoch: int) -> tuple[int, np.ndarray]:
        rng = np.random.default_rng([self.seed, epoch, 0])
        spare = self.targets - self.windows * self.length
        return int(rng.integers(0, spare + 1)), rng.permutation(self.windows)

    def _read(self, begin: int, count: int) -> np.ndarray:
        """int32 [count], across the boundaries of datasets if needed."""
        parts = []
        while count:
            number = bisect.bisect_right(self._ends, begin)
            file = self.files[number]
            offset = begin - (self._ends[number] - len(file))
            part = file.tokens[offset : offset + count]
            file.check_ids(part)
            parts.append(part)
            begin, count = begin + len(part), count - len(part)
        return np.concatenate(parts).astype(np.int32)


def _with_first(rows: np.ndarray, first: int, has_own: np.ndarray) -> np.ndarray:
    """[B, n + 1]: rows [B, n] with `first` prepended, or appended where a row has its own."""
    before = np.pad(rows, ((0, 0), (1, 0)), constant_values=first)
    return np.where(has_own[:, None], np.roll(before, -1, axis=1), before)
