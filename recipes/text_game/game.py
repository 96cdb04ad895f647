# SPDX-License-Identifier: Apache-2.0
"""A text game as a bridge: three locked doors, one behind the other, each with a word on a sign.

Saying the word opens the door; anything else ends the game. The score is the share of doors that
are open. Speaks the protocol of docs/how-to/environments.md on its standard streams, and needs
nothing but the standard library: one JSON object per line, answered with the same id.
"""

import json
import random
import sys
from dataclasses import dataclass
from typing import Any

SIGNS = "abcdefghij"
NUM_DOORS = 3


@dataclass(slots=True)
class Game:
    signs: str
    num_open: int = 0
    is_over: bool = False

    def look(self) -> dict[str, Any]:
        text = "" if self.is_over else f"{self.signs[self.num_open]}>"
        return {"text": text, "done": self.is_over}

    def say(self, word: str) -> None:
        if self.is_over:
            return
        is_right = word.strip() == self.signs[self.num_open]
        self.num_open += is_right
        self.is_over = not is_right or self.num_open == NUM_DOORS


def answer(request: dict[str, Any], games: dict[str, Game]) -> dict[str, Any]:
    call, name = request["call"], request.get("episode", "")
    if call == "hello":
        return {"protocol": 1}
    if call == "reset":
        signs = random.Random(request["seed"]).choices(SIGNS, k=NUM_DOORS)
        games[name] = Game("".join(signs))
    if call == "step":
        games[name].say(request["text"])
    if call in ("reset", "step"):
        return {"observation": games[name].look()}
    if call == "score":
        return {"score": games[name].num_open / NUM_DOORS}
    if call == "close":
        games.pop(name, None)
    return {}  # close, and renew: an episode lives until it is closed, or the node is gone


def main() -> None:
    games: dict[str, Game] = {}
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"id": request["id"], **answer(request, games)}), flush=True)


if __name__ == "__main__":
    main()
