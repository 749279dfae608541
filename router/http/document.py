"""The endpoints that describe the HTTP front end. The document never changes, so it is made once, when it is asked for."""

from __future__ import annotations

from functools import cache
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from pdserve import __version__
from router.http.markup import html_of
from router.openai.document.document import document
from router.openai.errors import encode_json

CONTENT_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'"  # the page is one file, and a browser is to load nothing else
)


async def openapi(_: Request) -> Response:
    """Answer with the OpenAPI document."""
    return Response(_document(), media_type="application/json")


async def docs(_: Request) -> Response:
    """Answer with the document as HTML."""
    return Response(_html(), media_type="text/html", headers={"content-security-policy": CONTENT_POLICY})


@cache
def _document() -> bytes:
    return encode_json(document(__version__))


@cache
def _html() -> str:
    return html_of(document(__version__))
