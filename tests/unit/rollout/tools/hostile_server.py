# SPDX-License-Identifier: Apache-2.0
"""An MCP server over standard streams that misbehaves as its argument says. Standard library only:
it shares no code with the client that it is tried on."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

ECHO = {
    "name": "echo",
    "description": "Say it again.",
    "inputSchema": {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    },
}
RECURSIVE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "loop": {"$ref": "#/$defs/a"}},
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
}

COUNTED: list[str] = []
"""What was counted since the start."""


def tools(kind: str) -> list[dict[str, Any]]:
    if kind == "many":
        return [{**ECHO, "name": f"tool_{n}"} for n in range(3_000)]
    if kind == "recursive":
        return [ECHO, {**ECHO, "name": "tree", "inputSchema": RECURSIVE}]
    if kind == "giant":
        huge = {"type": "object", "description": "x" * 100_000}
        return [{**ECHO, "description": "x" * 1_000_000}, {"name": "huge", "inputSchema": huge}]
    if kind == "names":
        return [{**ECHO, "name": name} for name in ("a b", "a/b", "é" * 300, "")]
    if kind == "schemas":
        wrong: list[Any] = [
            {"properties": {"a": {"type": 3}}},
            {"minProperties": "x"},
            {"$ref": "http://127.0.0.1:1"},
        ]
        schemas = [{"type": "object", **one} for one in wrong]
        return [ECHO, *({"name": f"wrong{n}", "inputSchema": s} for n, s in enumerate(schemas))]
    return [ECHO]


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def call(kind: str, id_: Any, text: str) -> None:
    if text == "hang" or kind == "hang":
        time.sleep(3600)
    if text == "flood":
        for _ in range(1600):
            sys.stdout.write("x" * (1 << 16))
    if text == "chatter":
        for _ in range(100_000):
            sys.stdout.write("not a message\n")
    if text == "die":
        print("out of order", file=sys.stderr, flush=True)
        sys.exit(7)
    if text == "garbage":
        say({"id": id_, "result": {"content": "neither a list nor text"}})
        return
    if text == "noise":
        sys.stdout.write("\x00\x01 some log line\n{]\n\n")
    if text == "error":
        say({"id": id_, "error": {"code": -32000 - 5, "message": "no such thing"}})
        return
    if text == "count":
        COUNTED.append(text)
        text = str(len(COUNTED))
    if text == "bill":
        block = {"type": "text", "text": "paid"}
        say({"id": id_, "result": {"content": [block], "_meta": {"cost": 10**400}}})
        return
    if text == "other":
        image = {"type": "image", "data": "eA==", "mimeType": "image/png"}
        block = {"type": "text", "text": "and text"}
        say({"id": id_, "result": {"content": [image, block], "_meta": {"cost": 2.5}}})
        return
    say({"id": id_, "result": {"content": [{"type": "text", "text": text}]}})


def main(kind: str) -> None:
    if kind == "silent":
        time.sleep(3600)
    if kind == "absent":
        sys.exit("cannot start")
    for line in sys.stdin:
        message = json.loads(line)
        method, id_ = message.get("method"), message.get("id")
        if method == "initialize":
            info: Any = {"name": "hostile", "version": "1"}
            version = message["params"]["protocolVersion"]
            offers: Any = {"capabilities": {"tools": {}}, "serverInfo": info}
            say({"id": id_, "result": {"protocolVersion": version, **offers}})
        elif method == "tools/list":
            page = {"tools": tools(kind)}
            say({"id": id_, "result": page | ({"nextCursor": "x"} if kind == "endless" else {})})
        elif method == "tools/call":
            call(kind, id_, message["params"]["arguments"].get("text", ""))
        elif id_ is not None:
            say({"id": id_, "result": {}})


if __name__ == "__main__":
    main(sys.argv[1])
