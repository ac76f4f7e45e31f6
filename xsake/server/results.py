"""Result files: their provenance, and their measurements as flat rows.

{"results": [{…}, …]}                                 a suite of benchmarks
{"rows": [{…}, …], "provenance": {…}}                 a program's
{"densities": {"0.43": {"rows": [{…}, …]}}, …}        a table of methods
{"first": [{…}, …], "second": [{…}, …]}               records by part, if there is none of these
{"load_seconds": …, "prompt": {…}}                    otherwise the file is one record

A row has the scalars of a record; fields of a nested object are joined by a dot, and lists are left
to the file itself.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xsake import shipped
from xsake.observe.event_log import open_regular
from xsake.server.runs import is_inside
from xsake.server.settings import Settings

Cell = str | float | int | bool | None
Flat = dict[str, Cell]

MAX_BYTES = 64 << 20  # of a result file
MAX_DEPTH = 4  # of nested objects that become columns
ORIGIN = (
    *("date", "machine", "versions", "commit", "command", "xla_flags", "provenance", "schema"),
)
FIRST = ("result", "date", "device", "suite", "kind", "case", "method", "direction")  # columns


class Results:
    """The result files of a server, by name; read again when they change."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._read: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def paths(self) -> dict[str, Path]:
        """Files by name, the user's before the package's."""
        roots = [*self.settings.results, *([shipped.RESULTS] if self.settings.published else [])]
        found: dict[str, Path] = {}
        for root in roots:
            for path in sorted(root.glob("*.json")) if root.is_dir() else []:
                if is_inside(path, root):
                    found.setdefault(path.stem, path)
        return found

    def load(self, name: str) -> dict[str, Any]:
        """The JSON object of a file; KeyError if there is none, ValueError if it is not one."""
        path = self.paths()[name]
        with open_regular(path) as file, self._lock:
            found = file_state(path)
            if path not in self._read or self._read[path][0] != found:
                if found[0] > MAX_BYTES:
                    raise ValueError(f"{path.name} has more than {MAX_BYTES:,} bytes")
                self._read[path] = (found, _parsed(file.read(MAX_BYTES + 1), path.name))
            return self._read[path][1]

    def all(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """(every file that can be read, why the others cannot)."""
        found, damaged = {}, {}
        for name in self.paths():
            try:
                found[name] = self.load(name)
            except (ValueError, OSError) as error:
                damaged[name] = str(error)
        return found, damaged

    def by_hashes(self) -> dict[tuple[str, str], list[str]]:
        """Files by the hashes of config and data of the runs that they measured."""
        found: dict[tuple[str, str], list[str]] = {}
        for name, content in self.all()[0].items():
            for row in records(content):
                hashes = (row.get("config_hash"), row.get("data_hash"))
                if all(isinstance(x, str) for x in hashes):
                    found.setdefault((str(hashes[0]), str(hashes[1])), []).append(name)
        return {hashes: sorted(set(names)) for hashes, names in found.items()}

    def tables(self) -> dict[str, dict[str, Any]]:
        """Tables of methods, as `xsake evaluate --table` writes them."""
        return {
            name: x for name, x in self.all()[0].items() if isinstance(x.get("densities"), dict)
        }


def file_state(path: Path) -> tuple[int, int]:
    """(bytes, time of the last change) of a file."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _parsed(content: bytes, name: str) -> dict[str, Any]:
    try:
        found = json.loads(content, parse_constant=lambda name: None, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error!s:.200}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} must hold a JSON object, got {type(found).__name__}")
    return found


def _number(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def provenance(found: dict[str, Any]) -> dict[str, Any]:
    """Date, machine, versions, commit and command of a file."""
    inner = found.get("provenance")
    return inner if isinstance(inner, dict) else found


def device(found: dict[str, Any]) -> str:
    """The machine that a file was measured on, in words."""
    machine = provenance(found).get("machine")
    if not isinstance(machine, dict):
        return "unknown"
    kind = str(machine.get("device", "unknown"))
    return (
        f"{machine.get('processor', kind)}, {machine.get('cores')} cores" if kind == "cpu" else kind
    )


def records(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The measurements of a file."""
    densities = found.get("densities")
    if isinstance(densities, dict):
        for density, part in densities.items():
            for row in _objects(part.get("rows") if isinstance(part, dict) else None):
                shape = {key: found.get(key) for key in ("length", "block", "documents")}
                yield {"density": _density(density), **shape, **row}
        return
    own = [*_objects(found.get("results")), *_objects(found.get("rows"))]
    if own or "results" in found or "rows" in found:
        yield from own
        return
    about = {key: value for key, value in found.items() if key not in ORIGIN}
    parts = [{"part": key, **row} for key, value in about.items() for row in _objects(value)]
    yield from parts or ([about] if any(_flat(about, "", 0)) else [])


def _density(text: str) -> Cell:
    try:
        return _number(text)
    except ValueError:
        return text


def _objects(found: Any) -> Iterable[dict[str, Any]]:
    return [x for x in found if isinstance(x, dict)] if isinstance(found, list) else []


def rows(name: str, found: dict[str, Any]) -> Iterator[Flat]:
    """The measurements of a file as flat rows, each with file, date and machine."""
    origin = provenance(found)
    for record in records(found):
        yield {
            "result": name,
            "date": str(origin.get("date", ""))[:10],
            "device": device(found),
            **dict(_flat(record, "", 0)),
        }


def _flat(record: dict[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Cell]]:
    for key, value in record.items():
        if isinstance(value, dict) and depth < MAX_DEPTH:
            yield from _flat(value, f"{prefix}{key}.", depth + 1)
        elif value is None or isinstance(value, str | float | int | bool):
            yield f"{prefix}{key}", value


def columns(found: Iterable[Flat]) -> list[str]:
    """Every column of some rows, those that name a measurement first."""
    names = dict.fromkeys(name for row in found for name in row)
    return [x for x in FIRST if x in names] + [x for x in names if x not in FIRST]
