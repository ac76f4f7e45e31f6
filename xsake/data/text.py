"""Reads documents from files: plain text or JSON lines, optionally compressed.

novel.txt        one document
pages.jsonl      one document per line: the field `text` of each object
pages.jsonl.xz   the same, decompressed while it is read; .gz and .zst too
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xsake import _files

COMPRESSED = (".gz", ".xz", ".zst")
LINES = (".jsonl", ".ndjson", ".json")


def documents(paths: Iterable[str | Path], field: str = "text") -> Iterator[str]:
    """Every document of some files, in order; empty documents are skipped.

    Args:
      paths: files with the extensions above.
      field: the field of a JSON line's object that holds the text.
    """
    for path in map(Path, paths):
        read = _lines if _is_lines(path) else _whole
        with _open(path) as file:
            yield from read(path, file, field)


def _is_lines(path: Path) -> bool:
    named = path.with_suffix("") if path.suffix in COMPRESSED else path
    if named.suffix not in (*LINES, ".txt"):
        raise ValueError(
            f"{path} has an unsupported extension; use .txt or .jsonl, optionally with "
            f"{', '.join(COMPRESSED)}"
        )
    return named.suffix in LINES


@contextlib.contextmanager
def _open(path: Path) -> Iterator[io.TextIOWrapper]:
    """Opens the file as UTF-8 text; decompression and decoding errors name the file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with path.open("rb") as raw, io.TextIOWrapper(_decompressed(path, raw), "utf-8") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _decompressed(path: Path, raw: Any) -> Any:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if path.suffix == ".xz":
        return lzma.LZMAFile(raw)
    if path.suffix == ".zst":
        return io.BufferedReader(_Zstandard(path, raw))
    return raw


class _Zstandard(io.RawIOBase):
    """Decompresses zstd and raises at a truncated frame, which the package silently accepts."""

    def __init__(self, path: Path, raw: Any) -> None:
        import zstandard

        self._path, self._raw, self._error = path, raw, zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame, self._pending, self._in_frame = self._new_frame(), b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        if not self._pending:
            self._pending = self._next_bytes()
        view = memoryview(buffer)  # type: ignore[arg-type]
        count = min(len(view), len(self._pending))
        view[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    def _next_bytes(self) -> bytes:
        found = b""
        while not found:
            compressed = self._frame.unused_data if self._frame.eof else self._raw.read(1 << 20)
            if self._frame.eof:
                self._frame, self._in_frame = self._new_frame(), False
                compressed = compressed or self._raw.read(1 << 20)
            if not compressed:
                if self._in_frame:
                    raise EOFError("the zstd frame has no end")
                return b""
            try:
                found, self._in_frame = self._frame.decompress(compressed), True
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
        record = _files.parse_json(line, f"{path}, line {number}")
        if not isinstance(record, dict) or field not in record:
            has = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise ValueError(
                f"{path}, line {number} has no text field {field!r}, only {has}; give every line "
                f"an object whose {field!r} is the document's text"
            )
        if not isinstance(record[field], str):
            raise ValueError(
                f"{path}, line {number}: the field {field!r} is a {type(record[field]).__name__}, "
                f"not text; give every line an object whose {field!r} is the document's text"
            )
        if record[field].strip():
            yield record[field]
