// SPDX-License-Identifier: Apache-2.0
// An agent with a tool that is not written in Python: Node, no package at all.
// OPENAI_BASE_URL and OPENAI_API_KEY lead it to the model.

const task = JSON.parse(process.env.PENSTOCK_TASK);
const parameters = { type: "object", properties: { text: { type: "string" } }, required: ["text"] };
const tools = [{ type: "function", function: { name: "backwards", parameters } }];
const messages = [{ role: "user", content: task.prompt }];

async function ask() {
  const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: {
      authorization: `Bearer ${process.env.OPENAI_API_KEY}`,
      "content-type": "application/json",
    },
    body: JSON.stringify({ model: "policy", messages, tools }),
  });
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return (await response.json()).choices[0].message;
}

let answer = await ask();
for (let turn = 1; turn < 3 && answer.tool_calls; turn++) {
  messages.push(answer);
  for (const call of answer.tool_calls) {
    const text = String(JSON.parse(call.function.arguments).text);
    const content = [...text].reverse().join("");
    messages.push({ role: "tool", tool_call_id: call.id, content });
  }
  answer = await ask();
}
console.log(answer.content ?? "");
