"""The readable form of an OpenAPI document: one page of plain HTML that loads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h2{margin-top:3rem;border-bottom:1px solid #ccc}h3{margin-top:2rem}
code,pre{font:14px/1.4 ui-monospace,monospace;background:#f4f4f4}
pre{padding:.7rem;overflow-x:auto}table{border-collapse:collapse}
td,th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0}
.method{font-weight:bold;display:inline-block;min-width:4.5rem}nav a{display:block}
"""
_PREFIX = "#/components/schemas/"


def docs_page(document: Mapping[str, Any]) -> str:
    """The page."""
    info = document["info"]
    operations = list(_operations(document))
    schemas = document["components"]["schemas"]
    links = "".join(
        f'<a href="#{escape(o["operationId"])}"><code><span class="method">{method}</span>'
        f"{escape(path)}</code></a>"
        for path, method, o in operations
    )
    parts = [
        f"<h1>{escape(info['title'])}</h1><p>{escape(info['description'])}</p>",
        "<p>Errors are <a href='#Problem'>problem documents</a>. With a token, add "
        "<code>-H 'authorization: Bearer '$DIALOOP_TOKEN</code> to every line. "
        "The same as data: <a href='/openapi.json'>/openapi.json</a>.</p>",
        f"<nav>{links}</nav><h2>Routes</h2>",
        *(_route(path, method, operation) for path, method, operation in operations),
        "<h2>Messages</h2>",
        *(_schema(name, schemas[name]) for name in sorted(schemas)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>"
    )


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method.upper(), operation


def _route(path: str, method: str, operation: Mapping[str, Any]) -> str:
    title = f"<code><span class='method'>{method}</span>{escape(path)}</code>"
    parts = [
        f'<h3 id="{escape(operation["operationId"])}">{title} {escape(operation["summary"])}</h3>',
        f"<p>{escape(operation.get('description', ''))}</p>",
        _table(
            (f"{p['name']} ({p['in']})", _kind(p["schema"]), p.get("description", ""))
            for p in operation.get("parameters", ())
        ),
        f"<pre>{escape(curl_line(path, method, operation))}</pre>",
    ]
    for word, content in (
        ("Takes", operation.get("requestBody", {}).get("content", {})),
        ("Answers", operation["responses"]["200"].get("content", {})),
    ):
        kinds = [_kind(media["schema"]) for media in content.values() if "$ref" in media["schema"]]
        parts.append("".join(f"<p>{word} {kind}.</p>" for kind in kinds))
    return "".join(parts)


def curl_line(path: str, method: str, operation: Mapping[str, Any]) -> str:
    """How to call it from a shell; names in braces are to be filled in."""
    words = ["curl", "-s"]
    content = operation.get("requestBody", {}).get("content", {})
    if method != "GET" and not (method == "POST" and content):
        words += ["-X", method]
    words.append(f'"http://127.0.0.1:$PORT{path}"')
    if content:
        example = json.dumps(content["application/json"].get("example", {}))
        words.append(f"--json '{example}'")
    return " ".join(words)


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    rows = (
        (field, _kind(kind), kind.get("description", ""))
        for field, kind in schema.get("properties", {}).items()
    )
    text = escape(schema.get("description", ""))
    return f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3><p>{text}</p>{_table(rows)}'


def _table(rows: Iterator[tuple[str, str, str]]) -> str:
    """Rows of a name, HTML of its type, and a text."""
    made = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{escape(text)}</td></tr>"
        for name, kind, text in rows
    )
    return f"<table>{made}</table>" if made else ""


def _kind(schema: Mapping[str, Any]) -> str:
    """The type in words, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_PREFIX))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        kinds = [_kind(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return f"{' or '.join(kinds)}, optional"
    if "enum" in schema:
        return " | ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    if "additionalProperties" in schema and isinstance(schema["additionalProperties"], dict):
        return f"map to {_kind(schema['additionalProperties'])}"
    return escape(str(schema.get("const", schema.get("type", "any"))))
