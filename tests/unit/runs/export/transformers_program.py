# SPDX-License-Identifier: Apache-2.0
"""What somebody else does with an exported folder: loads it with transformers and asks it.

Run as a program, with folders as arguments and the questions as JSON on stdin; prints JSON. Imports
nothing of penstock."""

from __future__ import annotations

import json
import sys
from typing import Any

NUM_TOKENS = 12


def answer(folder: str, questions: list[str]) -> list[dict[str, list[int]]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[dict[str, list[int]]] = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        made = model.generate(
            ids, do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS
        )
        found.append({"prompt": ids[0].tolist(), "sampled": made[0, ids.shape[1] :].tolist()})
    return found


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    answers = {folder: answer(folder, asked) for folder in sys.argv[1:]}
    assert not any(name.startswith("penstock") for name in sys.modules)
    print(json.dumps(answers))
