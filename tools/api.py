"""Writes the API reference from the docstrings: `python -m tools.api [FOLDER]`, or `make docs`.

Needs the extra `docs` and no network. The reference is FOLDER/index.html, by default in build/api:
a page for each module below, and a search box.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# What a user of the library imports, as pdoc's specifications: a package brings the modules that it
# lists in __all__, or all if it has none; "!" leaves a module out.
MODULES = (
    "xsake",  # with xsake.masks
    "xsake.attention",
    "xsake.block_mask",
    "xsake.block_mask.input_mask",
    "xsake.backends",
    "!xsake.backends.(hopper|xla|reference|kernel_rule).*",
    "xsake.block_scores",
    "xsake.selection",
    "xsake.decode",
    "xsake.nsa",
    "xsake.hads",
    "xsake.hads.profile",
    "xsake.hads.budget",
    "xsake.hads.plan",
    "xsake.hads.terms",
    "xsake.hads.baselines",
    "xsake.hads.certificate",
    "xsake.hads.estimates",
    "xsake.integrations",
    "xsake.model",
    "xsake.model.huggingface",
    "xsake.model.observer",
    "xsake.data",
    "xsake.evaluate",
    "xsake.train",
    "!xsake.train.command",
    "xsake.observe",
    "xsake.parallel",
    "xsake.server.app",
    "xsake.server.settings",
    "xsake.shipped",
)


class _AsWritten(str):
    """An annotation that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _as_written(annotation: Any, *rest: Any) -> Any:
    return _AsWritten(annotation) if isinstance(annotation, str) else annotation


def write(folder: Path, modules: tuple[str, ...] = MODULES) -> None:
    """Writes the reference of these modules."""
    import pdoc
    import pdoc.doc
    import pdoc.doc_types

    # Shapes are strings, Float[Array, "B T N H"]; pdoc would evaluate them as forward references
    # and print the unions that they stand for.
    readers: tuple[Any, ...] = (pdoc.doc, pdoc.doc_types)
    for reader in readers:
        reader.safe_eval_type = _as_written
    pdoc.render.configure(docformat="google", footer_text="XSAKE")
    pdoc.pdoc(*modules, output_directory=folder)


def main(arguments: list[str]) -> None:
    """Writes the reference into the folder that is named, or into build/api."""
    folder = Path(*arguments[:1]) if arguments else Path("build/api")
    write(folder)
    print(f"written: {folder / 'index.html'}")


if __name__ == "__main__":
    main(sys.argv[1:])
