# SPDX-License-Identifier: Apache-2.0
"""An agent: put your own here. It finds the model by OPENAI_BASE_URL and OPENAI_API_KEY, as every
OpenAI client does, and the task in PENSTOCK_TASK. What it prints last is its answer."""

import json
import os
import urllib.request

task = json.loads(os.environ["PENSTOCK_TASK"])
body = {"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps(body).encode(),
    headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
with urllib.request.urlopen(request) as response:
    print(json.load(response)["choices"][0]["message"]["content"])
