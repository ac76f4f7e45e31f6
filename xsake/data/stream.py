"""Stream: the batch of any step, as a pure function of (seed, step, process).

    tokens     d0 d0 d0 e │ d1 d1 e │ d2 d2 d2 d2 d2 d2 e │ …      documents one after another
    windows    └──── T + 1 ────┘                                   every T tokens a window begins
                         └──── T + 1 ────┘                         it shares one token with the next
    segments   0  0  0  0   1  1                                   which document, in this window
    weights    1  1  1  0   1                                      0 where the target is another's

With a bos token b every row begins with it. A document may begin with its own, by its tokenizer;
where that one is the first of a window it is the row's, and the row's last place has no target.

    tokens     b  d0 d0 d0 │ d0 e  b  d1 │ d1 d1 d1 e │ …          two documents in windows of T = 4
    rows       b  d0 d0 d0   b  d0 e  b    b  d1 d1 d1
    targets    d0 d0 d0 ·    d0 e  b  d1   d1 d1 d1 e              each token once, but that first b
    segments   0  0  0  0    0  0  0  1    0  0  0  0
    weights    1  1  1  0    1  1  0  1    1  1  1  1

Every epoch the windows are shuffled anew and the first begins elsewhere. Nothing is kept between
steps: the step is the position in the data, and it is all that a resumed run needs. Rows are dealt
out in order, so that processes together read what one process alone would.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from xsake.data.tokens import TokenFile, boundaries, hash_of_files


class Batch(NamedTuple):
    """Rows of windows. Predict targets[b, t] from tokens[b, : t + 1] of the same segment."""

    tokens: Any  # int32 [B, T]
    targets: Any  # int32 [B, T]
    segment_ids: Any  # int32 [B, T]: 0, 1, 2 … in each row
    weights: Any  # float32 [B, T]: 1 where the target is of the same document


class Stream:
    """Windows of `length` tokens over some files, which count as one.

    Not `separate`: a row is one segment, whatever documents it holds. `bos`: every row begins with
    this token.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        length: int,
        seed: int = 0,
        separate: bool = True,
        bos: int | None = None,
    ) -> None:
        if not files:
            raise ValueError("no token files are given; `xsake tokenize` writes them")
        self.files, self.length, self.seed = list(files), length, seed
        self.separate, self.bos = separate, bos
        self._ends = list(itertools.accumulate(len(file) for file in self.files))
        self.starts = boundaries(self.files)
        self.hash = hash_of_files(self.files)
        self.tokens = self._ends[-1]
        self.targets = self.tokens - (bos is None)  # nothing precedes the first token but bos
        self.windows = self.targets // length
        if self.windows < 1:
            raise ValueError(
                f"{self.tokens:,} tokens are too few for a window of {length:,} targets; "
                "give more text or a smaller length"
            )
        self._order = functools.lru_cache(maxsize=2)(self._new_order)

    def batch(self, step: int, rows: int, process: int = 0, processes: int = 1) -> Batch:
        """This process's rows // processes rows of the batch of `step`, counted from 0."""
        if rows % processes:
            raise ValueError(f"{rows} rows cannot be dealt out evenly to {processes} processes")
        each = rows // processes
        first = step * rows + process * each
        return self.at([self._begin(number) for number in range(first, first + each)])

    def in_order(self, rows: int, most: int | None = None) -> Iterator[Batch]:
        """All windows, or the first `most` of them, in the order of the text, for evaluation.

        The last batch is filled up with rows of weight 0.
        """
        count = self.windows if most is None else min(most, self.windows)
        for first in range(0, count, rows):
            numbers = range(first, min(first + rows, count))
            filled = [*numbers, *[0] * (rows - len(numbers))]
            batch = self.at([number * self.length for number in filled])
            batch.weights[len(numbers) :] = 0
            yield batch

    def long_windows(self, count: int, step: int) -> np.ndarray:
        """Windows to calibrate on at `step`, int32 [count, T], each of one document if any is long.

        Documents are drawn in proportion to how many windows begin in them. Their first token is
        replaced by bos, if there is one.
        """
        draw = np.random.default_rng([self.seed, step, 1])
        ends = np.append(self.starts[1:], self.tokens)
        room = ends - self.starts - self.length  # places in a document where a window may begin
        starts = self.starts[room >= 0]
        if not len(starts):
            begins = draw.integers(0, self.targets - self.length + 1, count)
        else:
            places = np.cumsum(room[room >= 0] + 1)
            chosen = draw.integers(0, places[-1], count)
            which = np.searchsorted(places, chosen, side="right")
            begins = starts[which] + chosen - np.append(0, places)[which]
        windows = np.stack([self._read(int(begin), self.length) for begin in begins])
        if self.bos is not None:
            windows[:, 0] = self.bos
        return windows

    def at(self, begins: Sequence[int]) -> Batch:
        """The windows that begin at these places."""
        count = self.length + (self.bos is None)
        rows = np.stack([self._read(begin, count) for begin in begins])
        places = np.asarray(begins, np.int64)[:, None] + np.arange(count)
        document = np.searchsorted(self.starts, places, side="right")
        segments = (document - document[:, :1]).astype(np.int32) * self.separate
        has_own = np.zeros(len(rows), bool)
        if self.bos is not None:
            is_start = places[:, 0] == self.starts[document[:, 0] - 1]
            has_own = is_start & (rows[:, 0] == self.bos)
            rows, segments = (_led(x, by, has_own) for x, by in ((rows, self.bos), (segments, 0)))
        same = segments[:, :-1] == segments[:, 1:]
        same[has_own, -1] = False
        return Batch(rows[:, :-1], rows[:, 1:], segments[:, :-1], same.astype(np.float32))

    def _begin(self, number: int) -> int:
        """Where the window begins that is the `number`-th to be read since the start."""
        epoch, place = divmod(number, self.windows)
        offset, order = self._order(epoch)
        return int(offset + order[place] * self.length)

    def _new_order(self, epoch: int) -> tuple[int, np.ndarray]:
        draw = np.random.default_rng([self.seed, epoch, 0])
        spare = self.targets - self.windows * self.length
        return int(draw.integers(0, spare + 1)), draw.permutation(self.windows)

    def _read(self, begin: int, count: int) -> np.ndarray:
        """int32 [count], over the ends of files."""
        parts = []
        while count:
            number = bisect.bisect_right(self._ends, begin)
            file = self.files[number]
            offset = begin - (self._ends[number] - len(file))
            part = file.tokens[offset : offset + count]
            parts.append(part)
            begin, count = begin + len(part), count - len(part)
        return np.concatenate(parts).astype(np.int32)


def _led(rows: np.ndarray, by: int, is_led: np.ndarray) -> np.ndarray:
    """[B, n + 1]: `by` before each row [n], or after it where the row is led already."""
    before = np.pad(rows, ((0, 0), (1, 0)), constant_values=by)
    return np.where(is_led[:, None], np.roll(before, -1, axis=1), before)
