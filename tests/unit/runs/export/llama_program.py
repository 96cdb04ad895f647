# SPDX-License-Identifier: Apache-2.0
"""What llama.cpp makes of a GGUF file: token ids of texts, and greedy tokens after prompts.

Run by the Python of `make setup-llama`: arguments are GGUF files, stdin is JSON {file: {texts,
prompts, num_tokens, banned}}; prints JSON. Imports nothing of penstock."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

F32 = 0


def answer(path: str, asked: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    llama_cpp: Any = import_module("llama_cpp")  # only the other environment has it
    model: Any = llama_cpp.Llama(
        path, n_ctx=256, logits_all=True, verbose=False, type_k=F32, type_v=F32, n_threads=1
    )
    texts = [model.tokenize(text.encode(), add_bos=False, special=True) for text in asked["texts"]]
    answers: list[list[int]] = []
    for prompt in asked["prompts"]:
        model.reset()
        model.eval(prompt)
        sampled: list[int] = []
        while True:
            scores = np.array(model.scores[model.n_tokens - 1])
            scores[asked["banned"]] = -np.inf
            sampled.append(int(scores.argmax()))
            if len(sampled) == asked["num_tokens"]:
                break
            model.eval(sampled[-1:])
        answers.append(sampled)
    found = {
        "texts": texts,
        "answers": answers,
        "template": model.metadata.get("tokenizer.chat_template"),
    }
    model.close()
    return found


if __name__ == "__main__":
    wanted = json.load(sys.stdin)
    print(json.dumps({path: answer(path, asked) for path, asked in wanted.items()}))
