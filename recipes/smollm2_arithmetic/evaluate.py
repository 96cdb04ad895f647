# SPDX-License-Identifier: Apache-2.0
"""Accuracy on the held-out problems: `evaluate.py BEFORE AFTER` prints one line of JSON per model
folder, and one with their difference.

A model answers greedily. The answer is right when each of its digits is the likeliest next token
and the likeliest after them is no digit; so one pass over prompt and right answer tells what
decoding would print, and also how likely the right answer is when sampled.

B = problems of a pass, T = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arithmetic import HELD_OUT, Problem

CONFIDENT = 1.96
PART = 50
"""Problems in one pass."""


@dataclass(frozen=True, slots=True)
class Answer:
    is_right: bool
    """Of the greedy one."""
    probability: float
    """Of the right one, sampled at temperature 1."""


def wilson(num_right: int, num: int) -> tuple[float, float]:
    """95 % interval of a share."""
    share, square = num_right / num, CONFIDENT**2
    middle = (share + square / (2 * num)) / (1 + square / num)
    half = CONFIDENT * math.sqrt(share * (1 - share) / num + square / (4 * num**2))
    return middle - half / (1 + square / num), middle + half / (1 + square / num)


def bootstrap(values: Sequence[float], times: int = 2000) -> tuple[float, float]:
    """95 % interval of the mean over problems, by drawing them again."""
    draw = random.Random(0)
    means = sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(times))
    return means[round(0.025 * times)], means[round(0.975 * times) - 1]


class Model:
    """One folder in Hugging Face form."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        whole: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._decoder, self._head = whole.get_decoder(), whole.get_output_embeddings()
        self._digits: list[int] = self._tokenizer.convert_tokens_to_ids(list("0123456789"))

    def answers(self, problems: Sequence[Problem]) -> list[Answer]:
        import torch

        pairs = [(self._ids(one.prompt), self._ids(one.answer)) for one in problems]
        width = max(len(prompt + right) for prompt, right in pairs)
        ids_BT = torch.tensor([p + r + [0] * (width - len(p + r)) for p, r in pairs])
        with torch.inference_mode():
            hidden_BTD = self._decoder(ids_BT).last_hidden_state
            return [self._answer(h, *pair) for h, pair in zip(hidden_BTD, pairs, strict=True)]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text)["input_ids"]

    def _answer(self, hidden_TD: Any, prompt: list[int], right: list[int]) -> Answer:
        seen_TD = hidden_TD[len(prompt) - 1 : len(prompt) + len(right)]
        chances_TV = self._head(seen_TD).softmax(-1)
        likeliest = chances_TV.argmax(-1).tolist()
        probability = 1 - float(chances_TV[-1, self._digits].sum())
        for place, token in enumerate(right):
            probability *= float(chances_TV[place, token])
        is_right = likeliest[:-1] == right and likeliest[-1] not in self._digits
        return Answer(is_right, probability)


def answers_of(folder: Path) -> list[Answer]:
    model = Model(folder)
    parts = [HELD_OUT[first : first + PART] for first in range(0, len(HELD_OUT), PART)]
    return [answer for part in parts for answer in model.answers(part)]


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    num_right = sum(answer.is_right for answer in answers)
    probabilities = [answer.probability for answer in answers]
    return {
        "problems": len(answers),
        "accuracy": round(num_right / len(answers), 4),
        "accuracy_interval": [round(end, 4) for end in wilson(num_right, len(answers))],
        "sampled_accuracy": round(sum(probabilities) / len(answers), 4),
        "sampled_accuracy_interval": [round(end, 4) for end in bootstrap(probabilities)],
    }


def difference(before: Sequence[Answer], after: Sequence[Answer]) -> dict[str, Any]:
    """Paired: the same problems."""
    pairs = list(zip(before, after, strict=True))
    changes = [float(b.is_right) - float(a.is_right) for a, b in pairs]
    sampled = [b.probability - a.probability for a, b in pairs]
    return {
        "gained": sum(change > 0 for change in changes),
        "lost": sum(change < 0 for change in changes),
        "accuracy_change": round(sum(changes) / len(changes), 4),
        "accuracy_change_interval": [round(end, 4) for end in bootstrap(changes)],
        "sampled_change": round(sum(sampled) / len(sampled), 4),
        "sampled_change_interval": [round(end, 4) for end in bootstrap(sampled)],
    }


def main() -> None:
    folders = [Path(word).expanduser() for word in sys.argv[1:]]
    if not folders:
        sys.exit(
            "evaluate.py FOLDER [FOLDER]: model folders, such as outputs/RUN/checkpoints/step_9"
        )
    answers = [answers_of(folder) for folder in folders]
    for folder, found in zip(folders, answers, strict=True):
        print(json.dumps({"model": folder.name, **summary(found)}), flush=True)
    if len(answers) == 2:
        print(json.dumps(difference(*answers)))


if __name__ == "__main__":
    main()
