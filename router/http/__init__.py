"""The HTTP front end: connections, bodies, replies. What OpenAI's API says is in `router.openai`."""

from router.http.app import build_app, serve_http
from router.http.server import HttpServer

__all__ = ["HttpServer", "build_app", "serve_http"]
