"""read_object(path, …): a JSON object with the right keys, or an error that names the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_object(
    path: Path, what: str, types: Mapping[str, type | tuple[type, ...]]
) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
      path: the file.
      what: the file should be, for the error.
      types: of the values that must be there, by key; other keys are not checked.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not {what}: {error}; name another file") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} is not {what}: it holds a {type(found).__name__}; name another file"
        )
    for key, kind in types.items():
        if key not in found:
            raise ValueError(f"{path} is not {what}: it has no {key!r}; name another file")
        if not isinstance(found[key], kind):
            has = type(found[key]).__name__
            raise ValueError(f"{path} is not {what}: its {key!r} is a {has}; name another file")
    return found


def parse(text: str) -> Any:
    """`json.loads` that raises ValueError for all that it cannot read, deep nesting too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
