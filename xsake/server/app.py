"""create_app(settings): the FastAPI app; routes may be added to it, or it may be mounted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import xsake
from xsake.server.guard import Guard
from xsake.server.pages import pages
from xsake.server.routes import masks, play, profiles, results, runs, status
from xsake.server.served import Json, Served
from xsake.server.settings import Settings

WARM_TEXT = "It is a truth universally acknowledged"  # any text: it is only compiled for


def create_app(settings: Settings | None = None, *, warm: bool = False) -> FastAPI:
    """An app that serves what `settings` name.

    Routes that are added to the app later take precedence over the pages. The guard of Host, Origin
    and token protects them too.

    Args:
      settings: default: what comes with the package.
      warm: load the model and compile its passes at the start, in the background.
    """
    settings = settings or Settings()
    served = Served(settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if warm:
            threading.Thread(target=_warm, args=(served,), daemon=True).start()
        yield

    app = FastAPI(
        title="XSAKE",
        version=xsake.__version__,
        description="Runs, profiles, plans, masks and results of XSAKE, and a model to play with.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.served = served
    for module in (status, runs, profiles, masks, results, play):
        app.include_router(module.router)
    shown = pages(settings.static)

    async def fallback(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/api/"):
            raise HTTPException(404, f"there is no route {scope['path'][:80]!r}; see /openapi.json")
        await shown(scope, receive, send)

    app.router.default = fallback
    app.add_middleware(Guard, settings=settings)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Json:
        return Json({"detail": error.detail}, error.status_code, error.headers)

    return app


def _warm(served: Served) -> None:
    """Loads the model and compiles what the first text needs."""
    reader = served.reader()
    text = reader.read(WARM_TEXT)
    for method in reader.methods(text.block):
        reader.measured(text, method, 1.0)
