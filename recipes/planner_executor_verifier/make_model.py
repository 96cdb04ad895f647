# SPDX-License-Identifier: Apache-2.0
"""A tiny random model for a planner: `python make_model.py FOLDER`.

It is `builtin:tiny-qwen3` with other words for its tokens. One is a whole plan to search, one the
beginning of a plan to answer, and four are its ends, so that even a model that writes at random
writes a plan now and then.
"""

import json
import sys
from pathlib import Path

from penstock import init_model

LETTERS = "ABCD"
PLAN = '{"thought": "", "action": "%s", "action_input": "'
ENDS = [letter + '"}' for letter in LETTERS]
WORDS = ["<pad>", "<eos>", "<unk>", PLAN % "search" + 'it"}', PLAN % "answer", *ENDS]
WORDS += ["correct", "wrong", *LETTERS, "<reserved>"]


def make_model(folder: Path) -> Path:
    if folder.exists():
        return folder  # made before
    init_model("builtin:tiny-qwen3", folder, seed=0)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {word: number for number, word in enumerate(WORDS)}
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] in WORDS]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
