"""`/docs`: the OpenAPI document as a page that needs nothing from elsewhere."""

from __future__ import annotations

import json
from html import escape
from typing import Any

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>kvblend: HTTP interface</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 14px/1.4 ui-monospace, monospace } pre { overflow: auto; background: #8881; padding: .7rem }
h2 b { display: inline-block; min-width: 5rem } table { border-collapse: collapse }
td { border-top: 1px solid #8884; padding: .2rem .8rem .2rem 0; vertical-align: top }
</style></head><body>
"""


def render(document: dict[str, Any]) -> str:
    """The page, all text of the document escaped."""
    info = document["info"]
    parts = [
        _HEAD,
        f"<h1>{escape(info['title'])}</h1><p>{escape(info['description'])} ",
        'The same as <a href="/openapi.json">OpenAPI document</a>.</p>',
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><b>{escape(method.upper())}</b><code>{escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation['summary'])}</p>")
            parts += [_body(operation), _answers(operation["responses"])]
    parts.append("<h1>Bodies</h1>")
    for name, schema in document["components"]["schemas"].items():
        text = escape(json.dumps(schema, indent=2))
        parts.append(f'<h2 id="{escape(name)}">{escape(name)}</h2><pre>{text}</pre>')
    return "".join([*parts, "</body></html>\n"])


def _body(operation: dict[str, Any]) -> str:
    if "requestBody" not in operation:
        return ""
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    return f'<p>Body: <a href="#{escape(name)}">{escape(name)}</a></p>'


def _answers(answers: dict[str, Any]) -> str:
    texts = ((escape(status), escape(one["description"])) for status, one in answers.items())
    rows = "".join(f"<tr><td>{status}</td><td>{text}</td></tr>" for status, text in texts)
    return f"<details><summary>Answers</summary><table>{rows}</table></details>"
