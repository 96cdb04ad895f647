# SPDX-License-Identifier: Apache-2.0
"""Accuracy on the held-out problems: `evaluate.py BEFORE AFTER` prints one line of JSON per model
folder, and one with their difference.

A model answers greedily. The answer is one token, so one pass over the prompt tells what decoding
would print, and also how likely the right answer is when sampled.

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

    def answers(self, problems: Sequence[Problem]) -> list[Answer]:
        import torch

        prompts = [self._ids(one.prompt) for one in problems]
        right_B = [self._ids(one.answer)[0] for one in problems]
        width = max(map(len, prompts))
        ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids in prompts])
        with torch.inference_mode():
            hidden_BTD = self._decoder(ids_BT).last_hidden_state
            last_BD = torch.stack(
                [h[len(ids) - 1] for h, ids in zip(hidden_BTD, prompts, strict=True)]
            )
            chances_BV = self._head(last_BD).softmax(-1)
        return [
            Answer(is_right=int(chances_V.argmax()) == right, probability=float(chances_V[right]))
            for chances_V, right in zip(chances_BV, right_B, strict=True)
        ]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text)["input_ids"]


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
