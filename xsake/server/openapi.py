"""The API's description: its routes, and the events of a run, which the routes send as they are.

`xsake serve --openapi > openapi.json` and `python -m xsake.server.openapi > openapi.json` print it,
for TypeScript types.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from xsake.observe.events import Event

REFERENCE = "#/components/schemas/{model}"


def description(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of an app, with a schema for every kind of event."""
    if app.openapi_schema is None:
        found = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        schemas = found["components"]["schemas"]
        for name, kind in sorted(Event.kinds.items()):
            schema = TypeAdapter(kind).json_schema(ref_template=REFERENCE, mode="serialization")
            schema["properties"] = {"event": {"const": name, "type": "string"}} | schema[
                "properties"
            ]
            schema["required"] = ["event", *schema.get("required", [])]
            schemas[name] = schema
        app.openapi_schema = found
    return app.openapi_schema


def text() -> str:
    """The document of an app without settings, as JSON."""
    from xsake.server.app import create_app

    return json.dumps(create_app().openapi(), indent=1) + "\n"


if __name__ == "__main__":
    print(text(), end="")
