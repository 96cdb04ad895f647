# SPDX-License-Identifier: Apache-2.0
"""An agent that knows nothing of penstock: it asks a model once, and writes the answer to a file.

It runs inside the task's sandbox, with the standard library alone. OPENAI_BASE_URL and
OPENAI_API_KEY, which any OpenAI client honours, lead it to the model in training.
"""

import json
import os
import sys
import urllib.request

body = {"model": "policy", "messages": [{"role": "user", "content": sys.stdin.read().strip()}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps(body).encode(),
    headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
with urllib.request.urlopen(request) as response:
    answer = json.load(response)["choices"][0]["message"]["content"]
with open("answer.txt", "w") as file:
    file.write(answer)
