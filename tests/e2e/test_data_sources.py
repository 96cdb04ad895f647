# SPDX-License-Identifier: Apache-2.0
"""Two environments in one run, with tasks from four formats: each task is attempted, sampled and
scored as its own source says."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from tests.e2e.system import System, assert_complete, penstock
from tests.unit.dataflow.data_packages import arrow_csv, import_datasets, parquet, pyarrow

RUN = """
name: mixed
models: {policy: {init: "builtin:tiny-qwen3", engine: hf}}
sources:
  - {name: a, data: reverse.parquet}
  - {name: b, data: {path: reverse.jsonl, columns: {prompt: messages}, max_prompt_tokens: 4}}
  - {name: c, data: {path: copy.csv, columns: {prompt: text, answer: text}}, workflow: "envs:twice",
     reward: "envs:copied", sampling: {max_tokens: 2}}
  - {name: d, data: {path: ./saved, split: train}, workflow: "envs:twice", reward: "envs:copied",
     sampling: {max_tokens: 2}}
reward: penstock.tasks.reverse:reward
algorithm: {num_generations: 4}
sampling: {max_tokens: 3}
dataflow: {rules: [{admit: all}]}
training: {learning_rate: 1.0e-3, groups_per_batch: 8, steps: 3, max_staleness: 1}
"""
ENVS = """
import json

async def twice(task, ctx):
    with open("attempted.txt", "a") as file:
        file.write(task.source + "\\n")
    first = await ctx.policy().chat([{"role": "user", "content": task.payload["prompt"]}])
    return (await ctx.policy().chat([{"role": "user", "content": first.text + ">"}])).text

def copied(completions, format, answer, **_):
    with open("scored.jsonl", "a") as file:
        for row in zip(format, completions):
            file.write(json.dumps(row) + "\\n")
    return [float(text == wanted) for text, wanted in zip(completions, answer)]
"""


def write_tasks(folder: Path) -> None:
    datasets = import_datasets()
    texts = ["abc", "bcd", "cde", "def", "efg"]
    table = {"prompt": [f"{t}>" for t in texts], "answer": [t[::-1] for t in texts]}
    parquet.write_table(pyarrow.table(table), folder / "reverse.parquet")
    lines = [{"messages": [{"role": "user", "content": f"{t}>"}], "answer": t[::-1]} for t in texts]
    (folder / "reverse.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    copies = pyarrow.table({"text": texts, "format": ["csv"] * 5})
    arrow_csv.write_csv(copies, folder / "copy.csv")
    rows = [{"prompt": t, "answer": t, "format": "saved"} for t in texts]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(folder / "saved")
    (folder / "envs.py").write_text(ENVS)
    (folder / "run.yaml").write_text(RUN)


def test_two_environments_with_four_formats_mix(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    system = System(tmp_path / "outputs" / "mixed")
    (tmp_path / "outputs").mkdir()
    try:
        system.run_file(tmp_path / "run.yaml", timeout_s=500.0)
    finally:
        system.close()
    assert_complete(system, steps=3)

    lengths: defaultdict[str, set[int]] = defaultdict(set)
    for line in (tmp_path / "scored.jsonl").read_text().splitlines():
        stored_in, completion = json.loads(line)
        lengths[stored_in].add(len(completion))
    assert lengths.keys() == {"csv", "saved"}, "the other two have another reward"
    assert all(max(found) <= 2 for found in lengths.values()), "their own max_tokens"

    attempted = {*(tmp_path / "attempted.txt").read_text().split()}
    assert attempted == {"c", "d"}, "their own workflow"

    (tmp_path / "copy.csv").write_text("text,format\nabc,csv\n")
    refused = penstock("run", "run.yaml", "training.steps=4", "--headless", cwd=tmp_path)
    assert refused.returncode != 0
    assert "source c: its tasks differ from those the run started with" in refused.stderr
