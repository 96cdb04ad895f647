# SPDX-License-Identifier: Apache-2.0
"""GRPO by TRL on the tasks of a file, run by TRL's own interpreter: `python -P trl_train.py FILE`.

FILE is a JSON list of runs, which are trained one after another; `trl.TrlRun` says what each
field means. Writes a line per step to `FOLDER/metrics.jsonl`, and one per batch of answers, before
it is trained, to `FOLDER/generated.jsonl`."""

import importlib.util
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

trl: Any = import_module("trl")
transformers: Any = import_module("transformers")
datasets: Any = import_module("datasets")


def load_reward(path: str) -> Any:
    """The same function that our run is scored by."""
    spec = importlib.util.spec_from_file_location("task", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as out:
        out.write(json.dumps(line) + "\n")


class Writer(transformers.TrainerCallback):
    """Writes each step's reward, and ends the run at the reward that was wanted."""

    def __init__(self, path: Path, until: float) -> None:
        self._path = path
        self._until = until

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "reward" in logs:
            append(self._path, {"step": state.global_step, "reward": logs["reward"]})
            control.should_training_stop = logs["reward"] >= self._until


def make_config(run: dict[str, Any]) -> Any:
    save = {"save_strategy": "no"}
    if run["save_every"]:
        save = {"save_strategy": "steps", "save_steps": run["save_every"], "save_total_limit": 2}
    return trl.GRPOConfig(
        str(Path(run["folder"]) / "checkpoints"),
        max_steps=run["steps"],
        per_device_train_batch_size=run["groups"] * run["group_size"],
        num_generations=run["group_size"],
        max_completion_length=run["max_tokens"],
        lr_scheduler_type="constant",
        seed=run["seed"],
        logging_steps=1,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **save,
        **run["loss"],
    )


def train(run: dict[str, Any]) -> None:
    folder = Path(run["folder"])
    score = load_reward(run["reward"])

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        scores = score(completions, answer)
        append(folder / "generated.jsonl", {"rows": len(scores)})
        return scores

    rows = [json.loads(line) for line in Path(run["tasks"]).read_text().splitlines()]
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(run["model"], dtype="float32"),
        reward_funcs=reward,
        args=make_config(run),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(run["model"]),
        callbacks=[Writer(folder / "metrics.jsonl", run["until"])],
    )
    trainer.train(resume_from_checkpoint=run["resume"])


def main() -> None:
    for run in json.loads(Path(sys.argv[1]).read_text()):
        train(run)


if __name__ == "__main__":
    main()
