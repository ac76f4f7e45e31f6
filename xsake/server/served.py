"""Served: what the routes of an app share. A route takes it as an argument: `served: Here`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import Depends, HTTPException, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from xsake.server.profiles import Profiles
from xsake.server.reader import LargeTextError, Reader, UnknownTextError
from xsake.server.results import Results
from xsake.server.runs import Run, Runs
from xsake.server.settings import Settings

T = TypeVar("T")
BUSY = {"Retry-After": "2"}


class Served:
    """Files, the model, and what limits their use."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runs = Runs(settings)
        self.results = Results(settings)
        self.profiles = Profiles(settings)
        self.listeners = 0
        self._reader: Reader | None = None
        self._loading = threading.Lock()
        self._waiting = 0

    def reader(self) -> Reader:
        """The model, loaded at the first call."""
        with self._loading:
            if self._reader is None:
                settings = self.settings
                limits = settings.limits
                self._reader = Reader(
                    settings.model,
                    self.profiles.all(),
                    limits.texts,
                    limits.text_bytes,
                    settings.mesh,
                )
            return self._reader

    @property
    def model_hash(self) -> str | None:
        """Of the model, if it is loaded."""
        return None if self._reader is None else self._reader.subject.hash

    @functools.cached_property
    def _slots(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self.settings.limits.model_calls)

    async def compute(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Calls a function that computes, in a thread, when it is its turn.

        The library's ValueError is the caller's error (422), an unknown text 404, one that is too
        large 413; a full queue 503.
        """
        limits = self.settings.limits
        if self._waiting >= limits.model_waiting + limits.model_calls:
            raise HTTPException(503, "too many calls of the model wait already; try again", BUSY)
        self._waiting += 1
        try:
            async with self._slots:
                with asked():
                    return await run_in_threadpool(function, *arguments, **options)
        finally:
            self._waiting -= 1

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Counts a listener of live events; raises 503 if there are too many."""
        if self.listeners >= self.settings.limits.listeners:
            most = self.settings.limits.listeners
            raise HTTPException(503, f"{most} listeners are connected, the most there may be", BUSY)
        self.listeners += 1
        try:
            yield
        finally:
            self.listeners -= 1

    def run(self, name: str) -> Run:
        """The run of a name, or 404."""
        run = self.runs.find(name)
        if run is None:
            raise HTTPException(404, f"there is no run {name[:80]!r}; /api/runs lists them")
        return run


def of_app(request: Request) -> Served:
    """The app's `Served`."""
    served: Served = request.app.state.served
    return served


Here = Annotated[Served, Depends(of_app)]


@contextlib.contextmanager
def asked() -> Iterator[None]:
    """Errors of the library about its arguments are about the request's."""
    try:
        yield
    except UnknownTextError as error:
        raise HTTPException(404, str(error)) from error
    except LargeTextError as error:
        raise HTTPException(413, str(error)) from error
    except ValueError as error:
        raise HTTPException(422, str(error)) from error


class Json(Response):
    """JSON in ASCII: text from files may hold what UTF-8 cannot encode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """A model, or plain values that are finite."""
        values = content.model_dump() if isinstance(content, BaseModel) else content
        return json.dumps(values, allow_nan=False, separators=(",", ":")).encode("ascii")


def number(value: Any) -> float | None:
    """A number as JSON has it: None if it is not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def numbers(values: Any) -> Any:
    """An array as nested lists, None where it is not finite."""
    array = np.asarray(values, np.float64)
    if np.isfinite(array).all():
        return array.tolist()
    return np.where(np.isfinite(array), array.astype(object), np.array(None)).tolist()
