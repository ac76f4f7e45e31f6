"""Profiles and plans as files: safetensors whose metadata has a JSON header and a checksum.

    {"xsake": {"kind": "plan", "schema": 1, …, "checksum": …}} + arrays

The checksum covers the header and every array, so that a damaged file is refused, not used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xsake import _files


def save(
    path: str | Path, kind: str, schema: int, header: Mapping[str, Any], arrays: Mapping[str, Any]
) -> None:
    """Writes a file that `read` reads; an interrupted call leaves the old one."""
    from safetensors.numpy import save_file

    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; name a file to write the {kind} to")
    if not Path(path).parent.is_dir():
        raise ValueError(f"there is no folder {Path(path).parent} to write the {kind} to")
    kept, metadata = _prepared(kind, schema, header, arrays)
    with _files.replaced(path) as part:
        save_file(kept, part, metadata)


def encoded(kind: str, schema: int, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> bytes:
    """What `save` writes, in memory."""
    from safetensors.numpy import save as to_bytes

    return bytes(to_bytes(*_prepared(kind, schema, header, arrays)))


def _prepared(
    kind: str, schema: int, header: Mapping[str, Any], arrays: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(arrays, metadata) of safetensors."""
    written = {"kind": kind, "schema": schema, **header}
    # the shape again, because ascontiguousarray gives a scalar an axis
    kept = {name: np.ascontiguousarray(x).reshape(np.shape(x)) for name, x in arrays.items()}
    # through JSON and back: what is hashed is what `read` will see
    written = json.loads(json.dumps(written))
    written["checksum"] = checksum(written, kept)
    return kept, {"xsake": json.dumps(written)}


def read(path: str | Path, kind: str, schema: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(header, arrays) of a saved profile or plan.

    Files of before there was a checksum have none, and only their shapes and ranges are checked.
    """
    from safetensors import SafetensorError, safe_open

    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; name the file of a {kind}")
    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get("xsake", "{}")
            arrays = {name: file.get_tensor(name) for name in list(file.keys())}
    except (SafetensorError, OSError, TypeError) as error:  # TypeError: a dtype NumPy lacks
        raise ValueError(f"{path} cannot be read as a {kind}: {error}") from error
    header = _files.parse_object(text, f"the header of {path}")
    if (given := header.get("kind")) != kind:
        what = f"a {given}" if given in ("plan", "profile") else "another file"
        command = "calibrate" if kind == "profile" else "plan"
        raise ValueError(f"{path} is {what}, not a {kind}; `xsake {command}` writes one")
    if (found := header.get("schema")) != schema:
        raise ValueError(
            f"{path} has schema {found}, this version reads {schema}; make the {kind} again"
        )
    expected = header.pop("checksum", None)
    if expected is not None and expected != checksum(header, arrays):
        raise ValueError(
            f"{path} is damaged: its checksum is not that of its contents; "
            f"copy it or make the {kind} again"
        )
    return {name: x for name, x in header.items() if name not in ("kind", "schema")}, arrays


def check_replaceable(path: str | Path, kind: str, *inputs: str | Path) -> None:
    """Raises if a `kind` that is saved to `path` would replace an input or another kind of file.

    A profile may replace a profile, and a plan a plan; an empty file may be replaced by either.
    """
    path = Path(path)
    if not path.is_file() or not path.stat().st_size:
        return
    for each in map(Path, inputs):
        if each.is_file() and each.samefile(path):
            raise ValueError(
                f"{path} is read by this command, and a {kind} would replace it; name another file "
                "to write"
            )
    if (found := kind_of(path)) != kind:
        what = f"a {found}" if found in ("plan", "profile") else "another kind of file"
        raise ValueError(
            f"{path} is {what}, and a {kind} would replace it; name another file to write"
        )


def kind_of(path: str | Path) -> str | None:
    """The kind of a file that `save` wrote, by its header; None of any other file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("xsake", "{}"))
    except (SafetensorError, OSError, ValueError):
        return None
    return header.get("kind") if isinstance(header, dict) else None


def checksum(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """16 hex digits of a SHA-256 over the header and the named arrays."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        x = arrays[name]
        digest.update(f"{name}{x.dtype.str}{x.shape}".encode())
        digest.update(x.tobytes())
    return digest.hexdigest()[:16]


def hash_of(arrays: Iterable[Any]) -> str:
    """The first 16 hex digits of a SHA-256 over arrays, their shapes and types."""
    digest = hashlib.sha256()
    for x in arrays:
        x = np.ascontiguousarray(x)
        digest.update(f"{x.dtype.str}{x.shape}".encode())
        digest.update(x.tobytes())
    return digest.hexdigest()[:16]
