"""The HTTP front end: connections, bodies, replies. `router.openai` has OpenAI's API."""

from router.http.app import build_app, serve_http
from router.http.protocol import HttpServer

__all__ = ["HttpServer", "build_app", "metrics", "protocol", "serve_http"]
