"""Documents out of files: plain text or JSON lines, as they are or packed with gzip, xz or zstd.

novel.txt        one document
pages.jsonl      one document a line: the field `text` of each object
pages.jsonl.xz   the same, unpacked on the way; .gz and .zst too
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PACKED = (".gz", ".xz", ".zst")
LINES = (".jsonl", ".ndjson", ".json")


def documents(paths: Iterable[str | Path], field: str = "text") -> Iterator[str]:
    """Every document of some files, in order; empty ones are left out.

    Args:
      paths: files whose names end as above.
      field: of a JSON line's object, which holds the text.
    """
    for path in map(Path, paths):
        read = _lines if _is_lines(path) else _whole
        with _open(path) as file:
            yield from read(path, file, field)


def _is_lines(path: Path) -> bool:
    named = path.with_suffix("") if path.suffix in PACKED else path
    if named.suffix not in (*LINES, ".txt"):
        raise ValueError(
            f"{path} is neither .txt nor .jsonl (nor either in {', '.join(PACKED)}); rename it "
            "if it is text"
        )
    return named.suffix in LINES


@contextlib.contextmanager
def _open(path: Path) -> Iterator[io.TextIOWrapper]:
    """The file as text; damage, wherever it is found, is an error that names the file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with path.open("rb") as raw, io.TextIOWrapper(_unpacked(path, raw), "utf-8") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _unpacked(path: Path, raw: Any) -> Any:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if path.suffix == ".xz":
        return lzma.LZMAFile(raw)
    if path.suffix == ".zst":
        return io.BufferedReader(_Zstandard(path, raw))
    return raw


class _Zstandard(io.RawIOBase):
    """Unpacks zstd and notices an end in the middle of a frame, which the package passes over."""

    def __init__(self, path: Path, raw: Any) -> None:
        import zstandard

        self._path, self._raw, self._error = path, raw, zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._frame, self._left, self._begun = self._new(), b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        if not self._left:
            self._left = self._more()
        view = memoryview(buffer)  # type: ignore[arg-type]
        count = min(len(view), len(self._left))
        view[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def _more(self) -> bytes:
        found = b""
        while not found:
            packed = self._frame.unused_data if self._frame.eof else self._raw.read(1 << 20)
            if self._frame.eof:
                self._frame, self._begun = self._new(), False
                packed = packed or self._raw.read(1 << 20)
            if not packed:
                if self._begun:
                    raise EOFError("the zstd frame has no end")
                return b""
            try:
                found, self._begun = self._frame.decompress(packed), True
            except self._error as error:
                raise ValueError(f"{self._path} is truncated or damaged: {error}") from error
        return found


def _whole(path: Path, file: io.TextIOWrapper, field: str) -> Iterator[str]:
    text = file.read()
    if text.strip():
        yield text


def _lines(path: Path, file: io.TextIOWrapper, field: str) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            has = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise ValueError(
                f"{path}, line {number} has no text field {field!r}, only {has}; "
                "name the right one with field="
            )
        if record[field].strip():
            yield record[field]
