# SPDX-License-Identifier: Apache-2.0
"""A bridge of its own, in the standard library: count down from payload["from"] by saying "down".

`python fake_bridge.py [FAULT [MARK [START]]]` misbehaves as FAULT says; with MARK, a file where it
counts its starts, only at the first one, or at start START. Independent of `bridges/serving.py`."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
TOOL = {"type": "function", "function": {"name": "down", "parameters": {"type": "object"}}}


def is_faulty() -> bool:
    if len(sys.argv) < 3:
        return bool(FAULT)
    with Path(sys.argv[2]).open("a") as mark:
        mark.write(".")
    start = Path(sys.argv[2]).stat().st_size
    return start == int(sys.argv[3] if len(sys.argv) > 3 else 1)


def say(number: int, **body: Any) -> None:
    print(json.dumps({"id": number, **body}), flush=True)


def misbehave(call: str, number: int) -> None:
    """At a step, but for the two faults of the start."""
    if call == "hello" and FAULT == "half-open":
        threading.Event().wait()  # accepts what it is sent, and never answers
    if call == "hello" and FAULT == "wrong-version":
        say(number, protocol=99)
    if call != "step":
        return
    if FAULT == "hang":
        threading.Event().wait()
    if FAULT == "crash":
        print("the world ended", file=sys.stderr, flush=True)
        os._exit(3)
    if FAULT == "garbage":
        print("<html>oops</html>", flush=True)
    if FAULT == "nan":
        print(f'{{"id": {number}, "observation": {{"reward": NaN}}}}', flush=True)
    if FAULT == "stranger":
        say(number + 1000, observation={})
    if FAULT == "flood":
        print("x" * (20 << 20), flush=True)
    if FAULT == "empty":
        say(number)
    if FAULT == "raise":
        say(number, error="ValueError: the world is broken")
    if FAULT == "deaf":
        os.close(1)
        threading.Event().wait()


def main() -> None:
    episodes: dict[str, list[int]] = {}
    late: list[int] = []
    faulty = is_faulty()
    for line in sys.stdin:
        request = json.loads(line)
        number, call = request["id"], request["call"]
        if faulty and FAULT == "slow" and call == "step":
            late.append(number)  # answered with the next call, long after the node gave up
            continue
        for one in late:
            say(one, observation={"text": "late", "done": True, "reward": 1.0})
        late.clear()
        if faulty:
            misbehave(call, number)
        if call == "hello":
            say(number, protocol=1)
        elif call == "reset":
            left = int(request["payload"].get("from", 2))
            episodes[request["episode"]] = [left, 0]
            say(number, observation={"text": f"{left} left", "tools": [TOOL]})
        elif call == "step":
            state = episodes[request["episode"]]
            calls = [one["name"] for one in request["tool_calls"]]
            state[0] -= request["text"].strip() == "down" or "down" in calls
            state[1] += 1
            done = state[0] <= 0
            say(
                number,
                observation={"text": f"{state[0]} left", "done": done, "reward": float(done)},
            )
        elif call == "score":
            state = episodes[request["episode"]]
            say(number, score=float(state[0] <= 0))
        elif call == "close":
            episodes.pop(request["episode"], None)
            say(number)
        else:
            if FAULT == "record":
                print(request["episodes"], file=sys.stderr, flush=True)
            say(number)


if __name__ == "__main__":
    main()
