"""Serves the viewer: its page, and the answers to the page's queries. Loopback only, for the holder of the link only.

The link holds an access token. Opening it sets a cookie that no other site can send (SameSite=Strict) and no script can
read; every request needs that cookie and this server's own host name, so that neither another origin nor a rebound DNS
name gets an answer. Responses forbid scripts and frames from elsewhere: text of a model cannot become code.
"""

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from headway.errors import HeadwayError

ASSETS = Path(__file__).parent / "assets"
FILES = {path.relative_to(ASSETS).as_posix(): path for path in ASSETS.rglob("*") if path.is_file()}
"""All that is served besides answers, by name: no path of a request ever reaches the file system."""
HOST = "127.0.0.1"

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Query = Callable[[Mapping[str, str]], Any]
"""Answers one kind of request from its parameters, on a thread; what it returns is encoded as JSON."""


class Viewer:
    """The HTTP side: knows nothing of what `queries` answer."""

    def __init__(self, queries: Mapping[str, Query], token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(24)
        self._queries = queries
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/?token={self.token}"

    @property
    def _cookie(self) -> str:
        return f"headway-{self.port}"  # cookies are shared between ports

    async def open(self, port: int = 0) -> None:
        """Listen on loopback; port 0 takes any free one."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/assets/{path:.+}", self._asset)
        app.router.add_get("/api/{name}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, port)
        try:
            await site.start()
        except OSError as error:
            await self.close()
            raise HeadwayError(
                f"port {port} cannot be listened on ({error.strerror}); choose another with --port"
            ) from error
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.host not in (f"{HOST}:{self.port}", f"localhost:{self.port}") or self._is_foreign(request):
            return _refusal(403, "the viewer answers pages of its own only")
        given = request.cookies.get(self._cookie, "")
        entering = request.path == "/" and "token" in request.query
        if entering:
            given = request.query["token"]
        if not hmac.compare_digest(given.encode(errors="replace"), self.token.encode()):
            return _refusal(401, "the access token is missing or wrong; open the link that headway view printed")
        if entering:
            answer: web.StreamResponse = web.Response(status=302, headers={"Location": "/", **_HEADERS})
            answer.set_cookie(self._cookie, self.token, httponly=True, samesite="Strict", path="/")
            return answer
        answer = await handler(request)
        answer.headers.update(_HEADERS)
        return answer

    def _is_foreign(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        return origin is not None and origin not in (f"http://{HOST}:{self.port}", f"http://localhost:{self.port}")

    async def _page(self, _request: web.Request) -> web.StreamResponse:
        return web.FileResponse(ASSETS / "index.html")

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        path = FILES.get(request.match_info["path"])
        return web.FileResponse(path) if path is not None else _refusal(404, "there is no such file")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = self._queries.get(request.match_info["name"])
        if query is None:
            return _refusal(404, "there is no such query")
        # A parameter that makes no sense, or a run that is damaged, is a sentence to the person and no trace in a log.
        try:
            answer = await asyncio.to_thread(query, dict(request.query))
        except (HeadwayError, ValueError) as error:
            return _refusal(400, str(error))
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


def _refusal(status: int, sentence: str) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode({"error": sentence}), content_type="application/json", headers=_HEADERS
    )
