# SPDX-License-Identifier: Apache-2.0
"""An agent that knows nothing of penstock: it reads a task, drafts, revises and prints an answer.

It uses the unmodified `openai` package. OPENAI_BASE_URL and OPENAI_API_KEY, which any OpenAI agent
honours, lead it to the model in training.
"""

import json
import os

from openai import OpenAI

task = json.loads(os.environ["PENSTOCK_TASK"])
max_tokens = int(os.environ.get("AGENT_MAX_TOKENS", "3"))
num_drafts = int(os.environ.get("AGENT_DRAFTS", "1"))
client = OpenAI()

question = {"role": "user", "content": task["prompt"]}
drafts = [
    client.chat.completions.create(model="policy", messages=[question], max_tokens=max_tokens)
    for _ in range(num_drafts)
]
draft = drafts[-1].choices[0].message.content or ""

revised = ""
for chunk in client.chat.completions.create(
    model="policy",
    messages=[question, {"role": "assistant", "content": draft}, question],
    max_tokens=max_tokens,
    stream=True,
):
    if chunk.choices:
        revised += chunk.choices[0].delta.content or ""

print(revised)
