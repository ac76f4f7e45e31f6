"""Project URLs of a wheel, from whoever publishes it: `make wheel URLS="Homepage=https://…"`.

The repository names no address of its own. Without URLS the metadata has none.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "XSAKE_PROJECT_URLS"  # Label=URL pairs, separated by spaces


def project_urls(given: str) -> dict[str, str]:
    """Label → URL."""
    found: dict[str, str] = {}
    for pair in given.split():
        label, _, url = pair.partition("=")
        if not label or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ValueError(
                f"{VARIABLE} must be Label=URL pairs separated by spaces, for example "
                f"Homepage=https://example.org/xsake; got {pair!r}"
            )
        found[label] = url
    return found


class ProjectUrls(MetadataHookInterface):
    """Writes `[project.urls]`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the metadata of the project."""
        metadata["urls"] = project_urls(os.environ.get(VARIABLE, ""))
