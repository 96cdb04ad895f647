# SPDX-License-Identifier: Apache-2.0
"""A tiny model that has seen sloppy searches: `python make_model.py FOLDER`.

It is `builtin:tiny-qwen3` with other words for its tokens: the beginning and the end of a call of
`search`, and eight letters. A random model would never search, so it is first trained on
demonstrations, over facts that are made up for each one. Half of them do not search but guess, and
half of the others answer at random: what is right is left to the reward.
"""

import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock import init_model

LETTERS = "ABCDEFGH"
CALL, END = '<tool_call>{"name": "search", "arguments": {"query": "', '"}}</tool_call>'
WORDS = ["<pad>", "<eos>", "<unk>", CALL, END, *LETTERS, "<unused_0>", "<unused_1>", "<unused_2>"]
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool.function.name }}: <tool_call>{% endfor %}
{%- for message in messages %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string }}
{{- call.function.arguments | tojson if call.function.arguments is mapping }}
{{- '}</tool_call>' }}
{%- endfor %}{{ eos_token }}{% endfor %}"""
STEPS, BATCH = 100, 64


def make_model(folder: Path) -> Path:
    if folder.exists():
        return folder  # made before
    init_model("builtin:tiny-qwen3", folder, seed=0)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {word: number for number, word in enumerate(WORDS)}
    special = tokenizer["added_tokens"][:3]
    calls = [special[0] | {"id": WORDS.index(word), "content": word} for word in (CALL, END)]
    tokenizer["added_tokens"] = [*special, *(call | {"special": False} for call in calls)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    imitate(folder)
    return folder


def demonstration(rng: random.Random) -> list[tuple[str, bool]]:
    """Pieces of a conversation, and whether the model wrote them."""
    key, value, guess = "".join(rng.sample(LETTERS, 3)), rng.choice(LETTERS), rng.choice(LETTERS)
    asked = ("search: <tool_call>" + key + "<eos>", False)
    if rng.random() < 0.5:
        return [asked, (guess + "<eos>", True)]
    found = f"[1] facts.jsonl:{rng.randrange(1, 200)}\n{key}: {value}<eos>"
    answer = value if rng.random() < 0.5 else guess
    return [asked, (CALL + key + END + "<eos>", True), (found, False), (answer + "<eos>", True)]


def imitate(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more only wait for each other at this size
    rng, tokenizer = random.Random(0), AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(STEPS):
        ids, labels = batch([demonstration(rng) for _ in range(BATCH)], tokenizer)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"demonstrations: step {step + 1} of {STEPS}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)


def batch(demonstrations, tokenizer):
    """Ids, padded at the end, and labels for what the model wrote alone."""
    rows = []
    for pieces in demonstrations:
        coded = [(tokenizer.encode(text), is_said) for text, is_said in pieces]
        ids = [one for piece, _ in coded for one in piece]
        labels = [one if is_said else -100 for piece, is_said in coded for one in piece]
        rows.append((ids, labels))
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    return ids, labels


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
