# SPDX-License-Identifier: Apache-2.0
"""The agent that penstock ships for Harbor tasks: the model writes shell commands, and sees what
they print.

Runs inside the sandbox of a task, by itself: standard library only, imports nothing of penstock.
Each answer with a block of code is run as one script by sh; an answer without one ends the task.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

MAX_TURNS = 20
MAX_OUTPUT_CHARS = 4000
COMMAND_S = 120.0
BLOCK = re.compile(r"```(?:sh|bash|shell)?[ \t]*\n(.*?)```", re.DOTALL)
RULES = (
    "You work in a terminal on Linux. Answer with one block of shell commands between ``` lines; "
    "you then see what they print. When the task is done, answer without a block.\n\n"
)


def main() -> None:
    messages: list[Any] = [{"role": "user", "content": RULES + sys.stdin.read()}]
    model = call("/models")["data"][0]["id"]
    for _ in range(MAX_TURNS):
        try:
            answer = call("/chat/completions", {"model": model, "messages": messages})
        except urllib.error.HTTPError as error:
            if error.code == 400:  # the context window is full: what was done is judged
                return
            raise
        text = answer["choices"][0]["message"]["content"] or ""
        block = BLOCK.search(text)
        if block is None:
            return
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": shell(block[1])})


def call(path: str, body: object = None) -> Any:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def shell(script: str) -> str:
    """What the commands print, cut in the middle."""
    try:
        done = subprocess.run(
            ["sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"(stopped after {COMMAND_S:g} s)"
    text = done.stdout.decode(errors="replace")
    if len(text) > MAX_OUTPUT_CHARS:
        half = MAX_OUTPUT_CHARS // 2
        text = f"{text[:half]}\n…\n{text[-half:]}"
    return f"{text}\n(exit code {done.returncode})"


if __name__ == "__main__":
    main()
