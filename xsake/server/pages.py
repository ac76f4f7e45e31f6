"""The built pages of web/, and what is shown where they are not built."""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

MISSING = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>XSAKE</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:40rem;margin:3rem auto;padding:0 1rem;
color-scheme:light dark}</style>
<h1>XSAKE</h1>
<p>The server runs; its pages are not built. <code>make web</code> in a clone builds them, and needs
Node; the wheel has them.</p>
<ul>
<li><a href="openapi.json">the API, as OpenAPI</a></li>
<li><a href="api/runs">runs</a>, <a href="api/profiles">profiles</a>,
<a href="api/results">results</a></li>
<li><a href="metrics">metrics</a>, <a href="health">health</a></li>
</ul></html>
"""


class Exported(StaticFiles):
    """A Next.js export: /play is play.html or play/index.html."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file of a path; pages are always revalidated, files with a hash in their name not."""
        try:
            answer = await super().get_response(path, scope)
        except HTTPException as error:
            if error.status_code != 404 or Path(path).suffix:
                raise
            answer = await super().get_response(f"{path}.html", scope)
        is_hashed = path.startswith("_next/static/")
        answer.headers["cache-control"] = (
            "public, max-age=31536000, immutable" if is_hashed else "no-cache"
        )
        return answer


def pages(folder: Path) -> ASGIApp:
    """What answers a request that no route matches."""
    if (folder / "index.html").is_file():
        return Exported(directory=folder, html=True)

    async def missing(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in ("", "/") or scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(404, "Not Found")
        await HTMLResponse(MISSING)(scope, receive, send)

    return missing
