"""Serves the page over HTTP: the files in static/, and the history as JSON. With token auth, requires Ray's token."""

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ray._private.authentication import authentication_constants as names
from ray._private.authentication.authentication_utils import is_token_auth_enabled, validate_request_token
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

STATIC = Path(__file__).parent / "static"
FORBIDS = {  # limits what a browser may do with our pages
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
BEFORE_TOKEN = ("/login", "/static/login.js", "/static/page.css", "/authenticate")
COOKIE = "raykv-ui"
Answer = Callable[[Request], Awaitable[Response]]


def application(state: Callable[[float], dict[str, Any]], host: str) -> Starlette:
    """The page's application. state: returns JSON of all data later than a Unix time; see History.since.

    host: the address on which the server listens.
    """

    async def pool(request: Request) -> Response:
        try:
            after = float(request.query_params.get("after", "0"))
        except ValueError:
            return PlainTextResponse("after= is no Unix time", HTTPStatus.BAD_REQUEST)
        return JSONResponse(state(after))

    routes = [
        Route("/", lambda _: FileResponse(STATIC / "index.html")),
        Route("/login", lambda _: FileResponse(STATIC / "login.html")),
        Route("/authenticate", _authenticate, methods=["POST"]),
        Route("/api/pool", pool),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware), Middleware(BaseHTTPMiddleware, _guarded)])
    app.state.host = host
    return app


async def _guarded(request: Request, answer: Answer) -> Response:
    """Answer or refuse a request. If the token is missing, "/" shows the page that asks for the token."""
    refusal = _refusal(request)
    if refusal is None:
        response = await answer(request)
    elif request.scope["path"] == "/" and refusal != HTTPStatus.MISDIRECTED_REQUEST:
        response = FileResponse(STATIC / "login.html", refusal)
    else:
        response = PlainTextResponse(_WHY[refusal], refusal)
    response.headers.update(FORBIDS)
    return response


_WHY = {
    HTTPStatus.UNAUTHORIZED: "Ray's token is missing: give it as a header, Authorization: Bearer TOKEN",
    HTTPStatus.FORBIDDEN: "this is not the token of this Ray cluster",
    HTTPStatus.MISDIRECTED_REQUEST: "without Ray's token the page has no other name than an address, localhost and its "
    "host's: ask by one of these, or set RAY_AUTH_MODE=token for the cluster",
}


def _refusal(request: Request) -> HTTPStatus | None:
    """Return why a request is refused; None if the request has Ray's token in a header, or the right cookie."""
    if not is_token_auth_enabled():
        return None if _is_ours(request) else HTTPStatus.MISDIRECTED_REQUEST
    if request.scope["path"] in BEFORE_TOKEN:  # not `request.url`: it contains the Host header of the client
        return None
    for name in (names.AUTHORIZATION_HEADER_NAME, names.RAY_AUTHORIZATION_HEADER_NAME):
        if given := request.headers.get(name):
            return None if validate_request_token(given) else HTTPStatus.FORBIDDEN
    cookie = request.cookies.get(COOKIE, "")
    return None if hmac.compare_digest(cookie.encode(), _cookie().encode()) else HTTPStatus.UNAUTHORIZED


def _is_ours(request: Request) -> bool:
    """Whether the request names this host. Without this check, other sites could make a browser read this page."""
    asked = (request.url.hostname or "").lower()
    try:
        ipaddress.ip_address(asked)
    except ValueError:
        return asked in ("localhost", socket.gethostname().lower(), request.app.state.host.lower())
    return True


def _cookie() -> str:
    """The cookie's value. It proves that a browser had the token, but does not reveal the token."""
    token: str = AuthenticationTokenLoader.instance().get_raw_token()
    return hmac.digest(token.encode(), b"raykv ui", "sha256").hex()


async def _authenticate(request: Request) -> Response:
    """Set the cookie if a header has the token. The cookie is valid for this page, but not for Ray's pages."""
    given = request.headers.get(names.AUTHORIZATION_HEADER_NAME, "")
    if not is_token_auth_enabled() or not validate_request_token(given):
        return PlainTextResponse(_WHY[HTTPStatus.FORBIDDEN], HTTPStatus.FORBIDDEN)
    response = Response(status_code=HTTPStatus.NO_CONTENT)
    response.set_cookie(
        COOKIE,
        _cookie(),
        max_age=names.AUTHENTICATION_TOKEN_COOKIE_MAX_AGE,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response
