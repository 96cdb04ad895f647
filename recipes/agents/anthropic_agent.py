# SPDX-License-Identifier: Apache-2.0
"""An agent with the unmodified `anthropic` package: it drafts, then revises what it streamed.

ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, which the package honours, lead it to the model.
"""

import json
import os

from anthropic import Anthropic

task = json.loads(os.environ["PENSTOCK_TASK"])
max_tokens = 16
client = Anthropic()

messages = [{"role": "user", "content": task["prompt"]}]
with client.messages.stream(model="policy", messages=messages, max_tokens=max_tokens) as stream:
    draft = stream.get_final_message()

messages += [
    {"role": "assistant", "content": draft.content},
    {"role": "user", "content": task["prompt"]},
]
answer = client.messages.create(model="policy", messages=messages, max_tokens=max_tokens)
print("".join(block.text for block in answer.content if block.type == "text"))
