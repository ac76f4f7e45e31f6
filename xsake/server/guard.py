"""Guard: refuses a request before any route sees it.

Host of another name     421   DNS rebinding: a page elsewhere that resolves its name to here
Origin of another site   403   a page elsewhere that sends requests from the user's browser
no or a wrong token      401   if the server has one; /health is open
a body that is too long  413
"""

from __future__ import annotations

import hmac
import json
from http import cookies
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xsake.server.settings import Settings

COOKIE = "xsake_token"
# Next.js writes inline scripts into exported pages; nothing is ever loaded from elsewhere.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Guard:
    """ASGI middleware that checks Host, Origin, token and body size."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a refused request, and passes the others on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # there are no web sockets here
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, _with_headers(send))
            return
        limited = _limited(receive, self.settings.limits.body_bytes)
        await self.app(scope, limited, _with_headers(send))

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        if _name(host) not in self.settings.hosts_allowed:
            return refused(
                421, f"Host {host[:80]!r} is not a name of this server; --allow-host adds one"
            )
        origin = headers.get("origin")
        if origin is not None and _netloc(origin) != host.lower():
            return refused(403, f"requests from the site {origin[:80]!r} are not accepted")
        if self.settings.token is not None and scope["path"] != "/health":
            answer = self._without_token(scope, headers)
            if answer is not None:
                return answer
        length = headers.get("content-length", "0")
        limit = self.settings.limits.body_bytes
        if not (length.isascii() and length.isdigit()):
            return refused(400, "Content-Length must be a whole number")
        is_long = len(length) > 15 or int(length) > limit
        return refused(413, _too_long(limit)) if is_long else None

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        """None if the request carries the token; /?token=… stores it in a cookie."""
        if self._is_token(headers.get("authorization", "").removeprefix("Bearer ")):
            return None
        found = cookies.SimpleCookie()
        try:
            found.load(headers.get("cookie", ""))
        except cookies.CookieError:
            return refused(400, "the Cookie header cannot be read")
        if COOKIE in found and self._is_token(found[COOKIE].value):
            return None
        query = parse_qs(scope["query_string"].decode("latin-1"))
        is_page = scope["method"] == "GET" and not scope["path"].startswith("/api")
        if is_page and self._is_token(query.pop("token", [""])[0]):
            rest = urlencode(query, doseq=True)
            path = "/" + scope["path"].lstrip("/\\")  # never //elsewhere
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(
                COOKIE, self.settings.token or "", httponly=True, samesite="strict", path="/"
            )
            return answer
        return refused(
            401,
            "this server needs its token: send `Authorization: Bearer TOKEN`, or open "
            "/?token=TOKEN in a browser",
            {"www-authenticate": "Bearer"},
        )

    def _is_token(self, given: str) -> bool:
        wanted = self.settings.token or ""
        return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def _name(host: str) -> str:
    """A Host header without its port.

    >>> _name("LOCALHOST:8000"), _name("[::1]:80"), _name("evil.example")
    ('localhost', '[::1]', 'evil.example')
    """
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isascii() and port.isdigit() else host.lower()


def _netloc(origin: str) -> str | None:
    """The host and port of an Origin header; None if it cannot be parsed.

    >>> _netloc("http://Localhost:8000"), _netloc("http://[")
    ('localhost:8000', None)
    """
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def refused(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    """An error as FastAPI answers it."""
    return Response(json.dumps({"detail": why}), status, headers, "application/json")


def _too_long(limit: int) -> str:
    return f"the body exceeds {limit:,} bytes; send less"


def _limited(receive: Receive, limit: int) -> Receive:
    """`receive` that raises once more than `limit` bytes of body have arrived."""
    received = 0

    async def limited() -> Message:
        nonlocal received
        message = await receive()
        if message["type"] == "http.request":
            received += len(message.get("body", b""))
            if received > limit:
                raise HTTPException(413, _too_long(limit))
        return message

    return limited


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sent
