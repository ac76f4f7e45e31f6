"""Texts for the page Play, from the books that come with the package, and heads to look at.

Which head does what is read from the newest head-roles-*.json of the published results, which were
measured on the shipped model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from xsake import shipped
from xsake.data import text
from xsake.server.schemas import Example

# role of head-roles-*.json: what to look for
ROLES = {
    "previous": "A head that attends to the previous token: its mass lies on the diagonal.",
    "sink": "A head that attends to the first token whatever comes: its mass lies in block 0.",
    "induction": "The text comes twice. This head looks for what followed the current token the "
    "first time: its mass lies on a second diagonal.",
}
SHORT, TWICE, LONG = 1400, 620, 9000  # characters


def examples(results: Mapping[str, Mapping[str, Any]]) -> Iterator[Example]:
    """Texts that show the known heads, and a long one."""
    heads, (novel, story) = _heads(results), _books()
    texts = {
        "previous": _sentences(story, SHORT),
        "sink": _sentences(novel, SHORT),
        "induction": _sentences(story, TWICE) + "\n\n" + _sentences(story, TWICE),
    }
    for role, about in ROLES.items():
        layer, head = heads.get(role, (None, None))
        yield Example(
            name=f"{role} head".replace("previous", "previous-token"),
            text=texts[role],
            about=about,
            layer=layer,
            head=head,
        )
    yield Example(
        name="a long text",
        text=_sentences(story, LONG),
        about="About as much as the model can read, in blocks of 64.",
        layer=None,
        head=None,
    )


@functools.cache
def _books() -> tuple[str, str]:
    (novel,), (story,) = (
        list(text.documents([path])) for path in (shipped.CALIBRATION_TEXT, shipped.HELD_OUT_TEXT)
    )
    return novel, story


def _sentences(whole: str, characters: int) -> str:
    """The beginning of a text, up to the end of a sentence."""
    cut = whole.strip()[:characters]
    return cut[: cut.rfind(".") + 1] or cut


def _heads(results: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """The head that does each role most, (layer, head)."""
    names = sorted(name for name in results if name.startswith("head-roles-"))
    if not names:
        return {}
    found = {}
    for row in results[names[-1]]["results"]:
        weights = np.asarray(row["weight_by_layer_and_head"], np.float64)
        layer, head = np.unravel_index(int(np.nanargmax(weights)), weights.shape)
        found[row["role"]] = (int(layer), int(head))
    return found
