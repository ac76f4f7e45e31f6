"""A server of its own in a thread, for what needs a real connection."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import uvicorn

from xsake.server.app import create_app
from xsake.server.settings import Settings


@contextlib.contextmanager
def running(**settings):
    """Yields the address of a server, and its app."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = create_app(Settings(**settings))
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()
