"""events.jsonl by line number, read in parts: what is in memory is an index, not the events.

    file    {"event": "RunStarted", …}⏎{"event": "TrainStep", …}⏎{"event": "Tra      half-written
    index   0                          291                                           not yet a line

An id names a line and its contents, as "17-9f3c2a10". A run that resumes replaces its file by one
that has fewer lines; an id of a line that is gone, or is another one now, is then not found.
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from xsake.observe.events import Evaluated, Event, parse

CHUNK = 1 << 20  # bytes that are read at a time
MAX_LINE = 16 << 20  # bytes of a line; a longer one is damage
WINDOW = 256 << 10  # bytes at the end of a file that `newest` reads: some 800 TrainSteps
STEP = b'{"event": "TrainStep"'  # how `Event.to_json` begins a TrainStep
LISTED = b'{"event": "'


class Line(NamedTuple):
    """A line of the file."""

    number: int
    text: bytes

    @property
    def id(self) -> str:
        """Its number and a checksum of its contents."""
        return f"{self.number}-{zlib.crc32(self.text):08x}"


class EventLog:
    """The lines of a file that another process may append to or replace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._starts = np.zeros(1, np.int64)  # where each line begins; the last: where they end
        self._is_step = np.zeros(0, bool)
        self._file_id: tuple[int, int] | None = None
        self._last: Line | None = None  # to notice another file of the same number

    def count(self) -> int:
        """How many complete lines there are."""
        with self._lock, self._opened():
            return len(self._is_step)

    @property
    def index_bytes(self) -> int:
        """Memory that the index takes."""
        return self._starts.nbytes + self._is_step.nbytes

    def lines(self, start: int, stop: int) -> list[Line]:
        """Lines start … stop - 1, as far as there are."""
        with self._lock, self._opened() as file:
            return self._read(file, np.arange(start, min(stop, len(self._is_step))))

    def thinned(self, steps: int) -> list[Line]:
        """Every line that is not a TrainStep, and about `steps` TrainSteps, evenly spread.

        The first and the last TrainStep are among them.
        """
        with self._lock, self._opened() as file:
            where = np.flatnonzero(self._is_step)
            if len(where) > steps:
                where = where[np.unique(np.linspace(0, len(where) - 1, steps).astype(int))]
            return self._read(file, np.union1d(np.flatnonzero(~self._is_step), where))

    def after(self, id_: str) -> int | None:
        """The number of the line after the one with this id; None if there is no such line now."""
        number, _, _ = id_.partition("-")
        if not (number.isascii() and number.isdigit() and len(number) < 16):
            return None
        found = self.lines(int(number), int(number) + 1)
        return found[0].number + 1 if found and found[0].id == id_ else None

    def _read(self, file: BinaryIO, numbers: np.ndarray) -> list[Line]:
        """Lines by number; neighbours are read together."""
        found: list[Line] = []
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
            if not len(run):
                continue
            begin, end = int(self._starts[run[0]]), int(self._starts[run[-1] + 1])
            content = os.pread(file.fileno(), end - begin, begin)
            for number in run:
                first, last = (int(self._starts[number + i]) - begin for i in (0, 1))
                found.append(Line(int(number), content[first : last - 1]))
        return found

    # --------------------------------------------------------------------------------------- index

    def _opened(self) -> BinaryIO:
        """The open file, whose complete lines are all indexed; the lock is held."""
        file = open_regular(self.path)
        try:
            self._refresh(file)
        except BaseException:
            file.close()
            raise
        return file

    def _refresh(self, file: BinaryIO) -> None:
        found = os.fstat(file.fileno())
        end = int(self._starts[-1])
        is_same = self._file_id == (found.st_dev, found.st_ino) and found.st_size >= end
        if is_same and self._last is not None:
            size = len(self._last.text) + 1
            is_same = os.pread(file.fileno(), size, end - size) == self._last.text + b"\n"
        if not is_same:
            self._forget()
            self._file_id = (found.st_dev, found.st_ino)
        if found.st_size == self._starts[-1]:
            return
        starts, is_step, last = [self._starts], [self._is_step], self._last
        for lines, text in _indexed(file, int(self._starts[-1]), self.path):
            starts.append(lines[:, 1])
            is_step.append(lines[:, 2].astype(bool))
            last = Line(0, text)
        self._last = last
        self._starts, self._is_step = np.concatenate(starts), np.concatenate(is_step)


def _indexed(file: BinaryIO, begin: int, path: Path) -> Iterator[tuple[np.ndarray, bytes]]:
    """Complete lines from `begin` on: (start, end, is a TrainStep), and the last of them."""
    file.seek(begin)
    rest = b""
    while chunk := file.read(CHUNK):
        content = rest + chunk
        codes = np.frombuffer(content, np.uint8)
        ends = np.flatnonzero(codes == 10) + 1
        if not len(ends):
            if len(content) > MAX_LINE:
                raise ValueError(
                    f"{path.name} is damaged: a line is longer than {MAX_LINE:,} bytes; remove it"
                )
            rest = content
            continue
        starts = np.concatenate([[0], ends[:-1]])
        is_step = ends - starts > len(STEP)
        for offset, code in enumerate(STEP):
            is_step &= codes[np.minimum(starts + offset, len(codes) - 1)] == code
        last = content[starts[-1] : ends[-1] - 1]
        yield np.stack([starts + begin, ends + begin, is_step], 1), last
        begin += int(ends[-1])
        rest = content[ends[-1] :]


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading; a symbolic link, a pipe or a device raises OSError."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path} is not a regular file")
    return open(number, "rb")


# ------------------------------------------------------------------------------------------ newest


def newest(path: Path, window: int = WINDOW) -> list[Event]:
    """The first event of a file and, among its last `window` bytes, the newest of every kind.

    Of evaluations it is the newest of every file. Only these are parsed, so that a long file takes
    as little time as a short one. A line of another kind than this version knows raises ValueError.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - window)
        head = os.pread(file.fileno(), window, 0) if begin else b""
        tail = os.pread(file.fileno(), window, begin)
    lines = tail.split(b"\n")[1 if begin else 0 : -1]
    found: list[Event] = []
    seen: set[object] = set()
    for line in reversed(lines):
        kind = line[: line.find(b'"', len(LISTED))] if line.startswith(LISTED) else b""
        if not line.strip() or (kind in seen and kind):
            continue
        event = parse(line.decode("utf-8", "replace"))
        if isinstance(event, Evaluated):
            if event.file in seen:
                continue
            seen.add(event.file)
        else:
            seen.add(kind)
        found.append(event)
    first = head.split(b"\n", 1)
    if len(first) == 2 and first[0].strip():
        found.append(parse(first[0].decode("utf-8", "replace")))
    return found[::-1]


def plain(line: Line) -> dict[str, Any] | None:
    """The JSON object of a line, numbers that are not finite as None; None if it is not one."""
    try:
        found = json.loads(line.text, parse_float=_finite, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _finite(text: str) -> float | None:
    value = float(text)  # 1e999 is infinite
    return value if math.isfinite(value) else None
