"""Partial: the statistics of the documents that an unfinished calibration has measured, in a file.

    document ─ measure ─ accumulate ─┬─ next document
                                     └─ profile.partial     the same calibration starts from it

The arrays are saved bit for bit, so that an interrupted calibration ends with the same profile.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xsake.hads import files

SCHEMA = 1
KIND = "unfinished profile"
LARGEST_SHARE = 0.05  # of a calibration's time that writing may take, if a write takes seconds


@dataclasses.dataclass
class Partial:
    """A file and the settings of the calibration that it belongs to.

    `hads.calibrate` adds its own settings. The caller names what else the statistics depend on,
    such as the model's dtype, and removes the file when the profile is saved.
    """

    path: Path
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    documents: int = 0  # how many of them are in the file
    _written: float = 0.0  # when, and in how many seconds
    _seconds: float = 0.0

    def load(self, empty: Any, **settings: Any) -> Any:
        """The state in the file, a pytree like `empty`; `empty` itself without a file.

        A file that belongs to other settings raises.
        """
        self.settings = self.settings | settings
        if not self.path.is_file():
            return empty
        header, arrays = files.read(self.path, KIND, SCHEMA)
        settings = json.loads(json.dumps(self.settings))  # tuples become lists, as in the file
        if differing := [name for name in settings if header.get(name) != settings[name]]:
            raise ValueError(
                f"{self.path} keeps the documents of another calibration "
                f"(it differs in {', '.join(differing)}); finish that one with its own command, "
                "or remove the file"
            )
        named, tree = jax.tree_util.tree_flatten_with_path(empty)
        names = [_name(path) for path, _ in named]
        if missing := [name for name in names if name not in arrays]:
            raise ValueError(f"{self.path} has no {missing[0]}: it is damaged; remove it")
        state = jax.tree.unflatten(tree, [jnp.asarray(arrays[name]) for name in names])
        self.documents = int(state.documents)
        return state

    def save(self, state: Any) -> None:
        """Replaces the file, unless the last write took more than a second and is recent."""
        if self._seconds > 1 and time.monotonic() - self._written < self._seconds / LARGEST_SHARE:
            return
        state = jax.device_get(state)  # waits for the document, which is no part of the write
        began = time.monotonic()
        arrays = {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}
        files.save(self.path, KIND, SCHEMA, self.settings, arrays)
        self.documents, self._written = int(state.documents), time.monotonic()
        self._seconds = self._written - began


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
