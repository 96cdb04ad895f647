# SPDX-License-Identifier: Apache-2.0
"""An agent with a tool, of the unmodified OpenAI Agents SDK (`openai-agents`).

OPENAI_BASE_URL and OPENAI_API_KEY, which it honours, lead it to the model.
"""

import json
import os
from contextlib import suppress

from agents import Agent, AgentsException, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)  # traces would go to OpenAI's own servers, whatever the base URL


@function_tool
def backwards(text: str) -> str:
    """The letters of a text, last to first."""
    return text[::-1]


agent = Agent(name="speller", model="policy", tools=[backwards])
task = json.loads(os.environ["PENSTOCK_TASK"])
with suppress(AgentsException):  # too many turns, or an answer that was cut: the last one counts
    print(Runner.run_sync(agent, task["prompt"], max_turns=3).final_output)
