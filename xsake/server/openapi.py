"""python -m xsake.server.openapi > openapi.json: the API's description, for TypeScript types."""

from __future__ import annotations

import json

from xsake.server.app import create_app


def text() -> str:
    """The OpenAPI document as JSON."""
    return json.dumps(create_app().openapi(), indent=1) + "\n"


if __name__ == "__main__":
    print(text(), end="")
