"""The page over HTTP: the files in static/, and what the history has as JSON. Behind Ray's token where that is on."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ray._private.authentication import authentication_constants as names
from ray._private.authentication.authentication_utils import is_token_auth_enabled, validate_request_token
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

STATIC = Path(__file__).parent / "static"
FORBIDS = {  # what a browser may do with a page of ours
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
BEFORE_TOKEN = ("/login", "/static/login.js", "/static/page.css", "/authenticate")
Answer = Callable[[Request], Awaitable[Response]]


def application(state: Callable[[float], dict[str, Any]]) -> Starlette:
    """state: what the page shows, as JSON, of what happened after a Unix time; see History.since."""

    async def page(_: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def login(_: Request) -> Response:
        return FileResponse(STATIC / "login.html")

    async def pool(request: Request) -> Response:
        try:
            after = float(request.query_params.get("after", "0"))
        except ValueError:
            return PlainTextResponse("after= is no Unix time", HTTPStatus.BAD_REQUEST)
        return JSONResponse(state(after))

    routes = [
        Route("/", page),
        Route("/login", login),
        Route("/authenticate", _authenticate, methods=["POST"]),
        Route("/api/pool", pool),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(GZipMiddleware), Middleware(BaseHTTPMiddleware, _guarded)])


async def _guarded(request: Request, answer: Answer) -> Response:
    """As Ray's dashboard: a header, or the cookie that `_authenticate` sets, must have the token."""
    refusal = None if request.url.path in BEFORE_TOKEN else _refusal(request)
    if refusal is None:
        response = await answer(request)
    elif request.url.path == "/":
        response = FileResponse(STATIC / "login.html", refusal)
    else:
        response = PlainTextResponse(_WHY[refusal], refusal)
    response.headers.update(FORBIDS)
    return response


_WHY = {
    HTTPStatus.UNAUTHORIZED: "Ray's token is missing: give it as a header, Authorization: Bearer TOKEN",
    HTTPStatus.FORBIDDEN: "this is not the token of this Ray cluster",
}


def _refusal(request: Request) -> HTTPStatus | None:
    if not is_token_auth_enabled():
        return None
    cookie = request.cookies.get(names.AUTHENTICATION_TOKEN_COOKIE_NAME)
    given = (
        request.headers.get(names.AUTHORIZATION_HEADER_NAME)
        or request.headers.get(names.RAY_AUTHORIZATION_HEADER_NAME)
        or (names.AUTHORIZATION_BEARER_PREFIX + cookie if cookie else "")
    )
    if not given:
        return HTTPStatus.UNAUTHORIZED
    return None if validate_request_token(given) else HTTPStatus.FORBIDDEN


async def _authenticate(request: Request) -> Response:
    """Set the cookie of whoever sends the token as a header: that of Ray's dashboard, so one is enough for both."""
    given = request.headers.get(names.AUTHORIZATION_HEADER_NAME, "")
    if not is_token_auth_enabled() or not validate_request_token(given):
        return PlainTextResponse(_WHY[HTTPStatus.FORBIDDEN], HTTPStatus.FORBIDDEN)
    response = Response(status_code=HTTPStatus.NO_CONTENT)
    response.set_cookie(
        names.AUTHENTICATION_TOKEN_COOKIE_NAME,
        given.removeprefix(names.AUTHORIZATION_BEARER_PREFIX),
        max_age=names.AUTHENTICATION_TOKEN_COOKIE_MAX_AGE,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response
