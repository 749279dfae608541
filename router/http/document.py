"""The endpoints that describe the HTTP front end: the OpenAPI document, and the same as one file of HTML, which loads nothing.
The document never changes, so it is made once, when it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from html import escape
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from pdserve import __version__
from router.document.document import document
from router.openai.json import encode_json

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


_STYLE: Final = """
:root { color-scheme: light dark; --line: #d5d9e0; --soft: #f4f6f9; --text: #1c2330; --quiet: #5c6675; --mark: #0b57b4; }
@media (prefers-color-scheme: dark) {
  :root { --line: #343b47; --soft: #1b2029; --text: #e4e8ef; --quiet: #9aa4b3; --mark: #7db4ff; }
  body { background: #12161d; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); max-width: 68rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
a { color: var(--mark); } code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: .7rem; overflow-x: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
td:first-child { white-space: nowrap; } .quiet { color: var(--quiet); } summary { cursor: pointer; color: var(--quiet); }
.method { color: var(--mark); font-weight: 600; text-transform: uppercase; }
"""
_MISSING: Final = "enum"  # a field whose effect does not exist has nothing but its neutral values
_NAMES: Final = {"minimum": ">=", "maximum": "<=", "maxLength": "length <=", "minLength": "length >=", "maxItems": "entries <=",
                 "minItems": "entries >=", "maxProperties": "entries <="}  # fmt: skip


def html_of(document: dict[str, Any]) -> str:
    """Return the document as HTML."""
    info = document["info"]
    return "".join((
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>pdserve: HTTP API</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body><h1>pdserve {_text(info['version'])}: HTTP API</h1>",
        f'<p>{_text(info["description"])} The same as data: <a href="openapi.json">openapi.json</a>.</p>',
        "".join(_contents(document)), "".join(_operations(document)), "<h2>Objects</h2>", "".join(_objects(document)),
        "</body></html>",
    ))  # fmt: skip


def _contents(document: dict[str, Any]) -> Iterator[str]:
    yield '<div class="wide"><table><tr><th>route</th><th>what it does</th></tr>'
    for path, method, told in _each(document):
        route = f'<span class="method">{method}</span> <a href="#{_anchor(path)}"><code>{_text(path)}</code></a>'
        yield f"<tr><td>{route}</td><td>{_text(told['summary'])}</td></tr>"
    yield "</table></div>"


def _operations(document: dict[str, Any]) -> Iterator[str]:
    for path, method, told in _each(document):
        yield f'<h2 id="{_anchor(path)}"><span class="method">{method}</span> <code>{_text(path)}</code></h2>'
        yield f"<p>{_text(told['summary'])}</p>"
        if "requestBody" in told:
            body = told["requestBody"]["content"]["application/json"]
            example = json.dumps(body["example"])
            yield f"<pre>curl localhost:8000{_text(path)} -d '{_text(example)}'</pre>"
            yield f"<p>Body: {_type(body['schema'])}</p>"
        yield '<div class="wide"><table><tr><th>status</th><th>answer</th></tr>'
        for status, answer in told["responses"].items():
            kinds = ", ".join(f"<code>{_text(kind)}</code> {_type(one['schema'])}" for kind, one in answer["content"].items())
            yield f'<tr><td>{status}</td><td>{kinds} <span class="quiet">{_text(answer["description"])}</span></td></tr>'
        yield "</table></div>"


def _objects(document: dict[str, Any]) -> Iterator[str]:
    for name, schema in document["components"]["schemas"].items():
        fields: dict[str, Any] = schema.get("properties", {})
        needed = schema.get("required", [])
        fields = dict(sorted(fields.items(), key=lambda entry: entry[0] not in needed))
        taken = {field: one for field, one in fields.items() if "description" not in one or _MISSING not in one}
        yield f'<h3 id="{_text(name)}"><code>{_text(name)}</code></h3>'
        yield f'<p class="quiet">{_text(schema.get("description", ""))}</p>'
        yield '<div class="wide"><table><tr><th>field</th><th>type and limits</th><th>meaning</th></tr>'
        for field, one in taken.items():
            mark = " (required)" if field in needed else ""
            meaning = _text(one.get("description", ""))
            yield f"<tr><td><code>{_text(field)}</code>{mark}</td><td>{_type(one)}</td><td>{meaning}</td></tr>"
        yield "</table></div>"
        missing = [(field, one) for field, one in fields.items() if field not in taken]
        if missing:
            listed = ", ".join(f"<code>{_text(field)}</code> ({_type(one)})" for field, one in missing)
            yield f"<details><summary>Fields whose effect does not exist here ({len(missing)}), with accepted values"
            yield f"</summary><p>{listed}</p></details>"


def _type(schema: dict[str, Any]) -> str:
    """Return the type of a schema with its limits, as HTML."""
    if "$ref" in schema:
        name = _text(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    if "enum" in schema:
        return ", ".join(f"<code>{_text(json.dumps(value))}</code>" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"] if one != {"type": "null"})
    kind = schema.get("type", "any JSON")
    told = _text(" or ".join(kind) if isinstance(kind, list) else kind)
    if schema.get("items"):
        inner = _type(schema["items"])
        told += f" of ({inner})" if "anyOf" in schema["items"] else f" of {inner}"
    limits = [f"{word} {schema[name]:,}" for name, word in _NAMES.items() if name in schema]
    return told + (f' <span class="quiet">({_text(", ".join(limits))})</span>' if limits else "")


def _each(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            yield path, method, told


def _anchor(path: str) -> str:
    return "route-" + "-".join(part.strip("{}") for part in path.split("/") if part)


def _text(value: object) -> str:
    return escape(str(value))
