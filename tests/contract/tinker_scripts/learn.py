# SPDX-License-Identifier: Apache-2.0
"""The loop of a Tinker client, with the unmodified SDK: writes letters backwards, by reward alone.

    learn.py URL KEY BASE_MODEL STEPS

Groups of answers, advantages against the mean of the group, the loss `importance_sampling`. Prints
one line of JSON per step, and last the mean reward over new questions."""

from __future__ import annotations

import json
import random
import sys
import warnings
from statistics import mean, pstdev
from typing import Any

warnings.filterwarnings("ignore")  # of the SDK, about its own next version

import tinker  # noqa: E402 - after the filter
from tinker import types  # noqa: E402

LETTERS = "abcdefghij"
FIRST = 4
"""Id of the letter a; that of `>` is 3."""
GROUPS, ANSWERS, LENGTH = 48, 16, 3
RATE, ENTROPY = 5e-3, 0.05


def question(draw: random.Random) -> tuple[list[int], list[int]]:
    """Prompt and answer, as ids."""
    letters = [FIRST + draw.randrange(len(LETTERS)) for _ in range(LENGTH)]
    return [*letters, FIRST - 1], letters[::-1]


def reward(tokens: list[int], answer: list[int]) -> float:
    return sum(a == b for a, b in zip(tokens, answer, strict=False)) / LENGTH


def ask(sampler: Any, questions: list[Any], count: int, temperature: float) -> list[Any]:
    params = types.SamplingParams(max_tokens=LENGTH, temperature=temperature)
    asked = [
        sampler.sample(types.ModelInput.from_ints(prompt), count, params) for prompt, _ in questions
    ]
    return [one.result(timeout=600) for one in asked]


def datum(prompt: list[int], sequence: Any, advantage: float) -> Any:
    """With a bonus for answers that were unlikely, as in the demo: with less entropy, some settle
    on a wrong middle letter before they have tried the right one."""
    line, pad = prompt + [int(token) for token in sequence.tokens], [0.0] * (len(prompt) - 1)
    logprobs = [float(value) for value in sequence.logprobs]
    share = 1 / (GROUPS * ANSWERS)
    return types.Datum(
        model_input=types.ModelInput.from_ints(line[:-1]),
        loss_fn_inputs={
            "target_tokens": line[1:],
            "logprobs": pad + logprobs,
            "advantages": pad + [share * (advantage - ENTROPY * (one + 1)) for one in logprobs],
        },
    )


def main() -> None:
    url, key, base_model, num_steps = sys.argv[1:]
    draw = random.Random(0)
    service = tinker.ServiceClient(base_url=url, api_key=key)
    model = service.create_lora_training_client(base_model=base_model, rank=32, seed=0).result()
    for step in range(int(num_steps)):
        sampler = model.save_weights_and_get_sampling_client().result()
        questions = [question(draw) for _ in range(GROUPS)]
        data: list[Any] = []
        rewards: list[float] = []
        for (prompt, answer), found in zip(
            questions, ask(sampler, questions, ANSWERS, 1.0), strict=True
        ):
            scores = [reward([*one.tokens], answer) for one in found.sequences]
            rewards += scores
            for one, score in zip(found.sequences, scores, strict=True):
                advantage = (score - mean(scores)) / (pstdev(scores) + 1e-4)
                data.append(datum(prompt, one, advantage))
        rate = RATE * min(1.0, 2 * (1 - step / int(num_steps)))
        passed = model.forward_backward(data, "importance_sampling")
        moved = model.optim_step(types.AdamParams(learning_rate=rate, grad_clip_norm=1.0))
        passed.result(timeout=600)
        moved.result(timeout=600)
        print(json.dumps({"step": step, "reward": mean(rewards)}), flush=True)
    sampler = model.save_weights_and_get_sampling_client().result()
    questions = [question(draw) for _ in range(200)]
    answers = ask(sampler, questions, 1, 1.0)
    final = [
        reward([*found.sequences[0].tokens], answer)
        for (_, answer), found in zip(questions, answers, strict=True)
    ]
    print(json.dumps({"final": mean(final)}), flush=True)


if __name__ == "__main__":
    main()
