"""Live: a response that sends the lines of an event file as they are written.

    id: 17-9f3c2a10                     a line; its id is what Last-Event-ID names later
    data: {"event": "TrainStep", …}

    event: reset                        the file was replaced: forget all events
    data: {}

A listener holds a position in the file and nothing else; what it has not read stays in the file.
One that does not read is disconnected after `Limits.send_seconds`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from xsake.observe.event_log import EventLog, Line, plain

if TYPE_CHECKING:
    from xsake.server.served import Served
else:
    Served = Any  # it is above this module

POLL_SECONDS = 0.5  # between two looks at the file
BEAT_SECONDS = 15.0  # between two comments that keep a silent connection open
BATCH = 500  # lines that are sent at once
BEFORE = Line(-1, b"")  # before the first line of a file
RETRY = b"retry: 2000\n\n"
BEAT = b": still here\n\n"
RESET = b"event: reset\ndata: {}\n\n"


class Live(Response):
    """Server-sent events of one file, for one listener."""

    media_type = "text/event-stream"

    def __init__(self, served: Served, log: EventLog, after: str) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.served, self.log, self.after = served, log, after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the listener disconnects or does not read."""
        async with self.served.listening():
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            sending = asyncio.ensure_future(self._send_all(send))
            leaving = asyncio.ensure_future(_disconnected(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, leaving):
                    task.cancel()
                found, _ = await asyncio.gather(sending, leaving, return_exceptions=True)
            if isinstance(found, Exception):
                raise found

    async def _send_all(self, send: Send) -> None:
        seconds = self.served.settings.limits.send_seconds

        async def sent(body: bytes) -> None:
            message = {"type": "http.response.body", "body": body, "more_body": True}
            await asyncio.wait_for(send(message), seconds)

        try:
            await self._follow(sent)
        except ValueError as error:  # the file cannot be read any further
            await sent(f"event: damaged\ndata: {json.dumps(str(error))}\n\n".encode("ascii"))
        except (TimeoutError, OSError):
            pass  # the listener does not read, or the file is gone: the connection ends

    async def _follow(self, sent: Callable[[bytes], Awaitable[None]]) -> None:
        """Sends lines for ever."""
        await sent(RETRY)
        last = await run_in_threadpool(self._start)
        if last is None:
            await sent(RESET)
            last = BEFORE
        beat = time.monotonic()
        while True:
            lines = await run_in_threadpool(self._following, last)
            if lines is None:
                await sent(RESET)
                last = BEFORE
                continue
            if lines:
                await sent(b"".join(_message(line) for line in lines if line.text.strip()))
                last, beat = lines[-1], time.monotonic()
            elif time.monotonic() - beat > BEAT_SECONDS:
                await sent(BEAT)
                beat = time.monotonic()
            if len(lines) < BATCH:
                await asyncio.sleep(POLL_SECONDS)

    def _start(self) -> Line | None:
        """The line before the first one to send; None: the file has not the line asked for."""
        if self.after == "start":
            return BEFORE
        end = self.log.count() if self.after == "end" else self.log.after(self.after)
        if end is None:
            return None
        return self.log.lines(end - 1, end)[0] if end else BEFORE

    def _following(self, last: Line) -> list[Line] | None:
        """The lines after `last`; None: the file was replaced by one that has not this line."""
        lines = self.log.lines(max(last.number, 0), last.number + 1 + BATCH)
        if last is BEFORE:
            return lines
        return lines[1:] if lines and lines[0] == last else None


def _message(line: Line) -> bytes:
    found = plain(line)
    if found is None:
        return f"id: {line.id}\nevent: damaged\ndata: {line.number}\n\n".encode()
    return f"id: {line.id}\ndata: {json.dumps(found)}\n\n".encode("ascii")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
