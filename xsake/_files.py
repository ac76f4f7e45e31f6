"""Files are read with checks and written whole.

path ─ read_object ─ dict ─ check_fields(cls, …) ─ cls(**dict)   one sentence if it does not fit
replaced(path): write PATH.part, then rename it to PATH          never half a file
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


def parse_json(text: str, where: str) -> Any:
    """The JSON value of `text`; errors name `where`."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be read") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object of `text`; errors name `where`."""
    values = parse_json(text, where)
    if not isinstance(values, dict):
        raise ValueError(f"{where} must hold a JSON object, got {type(values).__name__}")
    return values


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object of a file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return parse_object(text, str(path))


def read_record(
    path: Path, what: str, types: Mapping[str, type | tuple[type, ...]]
) -> dict[str, Any]:
    """The JSON object of a file that the user named.

    Args:
      path: the file.
      what: the file should be, for the error.
      types: of the values that must be there, by key; other keys are not checked.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        found = read_object(path)
    except ValueError as error:
        raise ValueError(f"{path} is not {what}: {error}; name another file") from error
    for key, kind in types.items():
        if key not in found:
            raise ValueError(f"{path} is not {what}: it has no {key!r}; name another file")
        if not isinstance(found[key], kind):
            has = type(found[key]).__name__
            raise ValueError(f"{path} is not {what}: its {key!r} is a {has}; name another file")
    return found


def check_fields(cls: Any, values: Mapping[str, Any], where: str) -> None:
    """Raises unless `values` are the fields of a dataclass, each of its declared type.

    >>> @dataclasses.dataclass
    ... class Size:
    ...     rows: int
    >>> check_fields(Size, {"rows": "x"}, "header")
    Traceback (most recent call last):
    ValueError: header: 'rows' must be a whole number, got 'x'
    """
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        has_default = field.default is not field.default_factory  # else both are MISSING
        if field.name not in values and not has_default:
            raise ValueError(f"{where} lacks {field.name!r}")
    for name, value in values.items():
        if name not in hints:
            raise ValueError(f"{where} has {name!r}, which this version does not know")
        if not fits(value, hints[name]):
            shown = repr(value)
            shown = shown if len(shown) <= 60 else shown[:57] + "…"
            raise ValueError(f"{where}: {name!r} must be {describe(hints[name])}, got {shown}")


def fits(value: Any, kind: Any) -> bool:
    """Whether a plain value is of a declared type; a whole number is a number, a bool is not."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in arguments)
    if origin is dict:
        return isinstance(value, dict) and all(
            fits(x, one) for item in value.items() for x, one in zip(item, arguments, strict=True)
        )
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(fits(x, arguments[0]) for x in value)
    if kind is Any or dataclasses.is_dataclass(kind):
        return True
    if kind in (int, float):
        numbers = int if kind is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, kind)


def describe(kind: Any) -> str:
    """A declared type in words.

    >>> describe(float | None), describe(tuple[str, ...]), describe(list[int])
    ('a number or null', 'a list of text', 'a list of whole numbers')
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(one) for one in arguments)
    if origin in (list, tuple):
        one = describe(arguments[0])
        return f"a list of {one.removeprefix('a ') + 's' if one.startswith('a ') else one}"
    return "an object" if origin is dict else WORDS.get(kind, getattr(kind, "__name__", str(kind)))


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields PATH.part to write to, and renames it to PATH at the end; removes it on an error.

    The file has the permissions that the user's umask gives, whatever wrote it: safetensors makes
    files that only their owner can read.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    part.touch()
    mode = part.stat().st_mode
    try:
        yield part
        part.chmod(mode)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
