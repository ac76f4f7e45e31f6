"""create_app(settings): the FastAPI app; routes may be added to it, or it may be mounted."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import Receive, Scope, Send

import xsake
from xsake.server.guard import Guard
from xsake.server.openapi import description
from xsake.server.pages import pages
from xsake.server.routes import masks, play, profiles, results, runs, status
from xsake.server.served import Json, Served
from xsake.server.settings import Settings

WARM_TEXT = " and"  # any word: it is only compiled for


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
    app.openapi = functools.partial(description, app)  # type: ignore[method-assign]
    for module in (status, runs, profiles, masks, results, play):
        app.include_router(module.router)
    shown = pages(settings.static)

    async def fallback(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/api/"):
            raise HTTPException(404, f"there is no route {scope['path'][:80]!r}; see /openapi.json")
        await shown(scope, receive, send)

    app.router.default = fallback
    app.add_middleware(GZipMiddleware, compresslevel=5)  # not of event streams
    app.add_middleware(Guard, settings=settings)  # added last: it comes first

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Json:
        return Json({"detail": error.detail}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Json:
        # without the input, which may be what JSON cannot hold
        kept = [{x: found[x] for x in ("type", "loc", "msg")} for found in error.errors()]
        return Json({"detail": kept}, 422)

    return app


def _warm(served: Served) -> None:
    """Loads the model and compiles what the first text needs."""
    reader = served.reader()
    for block, longest in reader.longest.items():
        for words in (longest, longest // 2):  # the two lengths that texts are padded to
            text = reader.read(WARM_TEXT * words, block, words)
            reader.measured(text, reader.methods(block)[0], 1.0)
            reader.words(text, reader.methods(block)[0], 1.0)
