# SPDX-License-Identifier: Apache-2.0
"""penstock and TRL's GRPOTrainer on the demo's task, model, prompts and settings, each in its own
environment: processor time, learning per step, start-up, memory, and what a crash costs.

Four parts, each of which can run alone:

    cpu    whole runs in turns, short answers: all processes, before and after the first step
    long   the same with answers of exactly 64 tokens (a model that cannot end sooner)
    steps  versions until a version's own answers earn 0.5: TRL, and our learner and sampler in one
           process with data 0 and 1 versions old
    kill   the same crash for both: every process is killed after a step, and started again

TRL waits for each batch, so that its data is never stale; our runs have `max_staleness: 1`, as the
demo has. A reward belongs to the version that sampled. Ratios are ours over theirs, of medians over
seeds. TRL computes with one thread, the faster choice in processor time for a model this small."""

from __future__ import annotations

import argparse
import json
import math
import os
import sqlite3
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import staleness_price, trl
from benchmarks.cache import environment
from benchmarks.harness import ROOT, log_line, result, scratch
from benchmarks.metered_run import Metered, metered, read_lines, running
from benchmarks.staleness_price import mean_and_half_width, versions_to
from penstock.audit import audit
from penstock.config import RunConfig, demo_config
from penstock.trainer.model_folders import TINY_QWEN3, WEIGHTS, init_model

OWN_PINS = ROOT / "constraints" / "train.txt"
"""What a user installs to train; transformers would import libraries of the tests, too."""
CLI = ("-m", "penstock.cli.main")
TARGET = 0.5
LONG_TOKENS, END = 64, 1
SAVE_EVERY, KILLED_AFTER, GO_ON = 10, 17, 3
"""Of the crash: steps between checkpoints, steps before the kill, steps after it."""
Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    seeds: int = 5
    """Of whole runs."""
    step_seeds: int = 7
    steps: int = 45
    """Of whole runs: enough to earn 0.5."""
    long_steps: int = 12
    long_groups: int = 16


QUICK = Setting(seeds=3, steps=40, long_steps=6)


class Bench:
    def __init__(self, folder: Path, setting: Setting) -> None:
        self._folder = folder
        self._setting = setting
        self._python = environment("trl", trl.PINS)
        self._own_python = environment("penstock", OWN_PINS, ROOT)

    # --- runs -------------------------------------------------------------------------------------

    def _config(self, name: str, seed: int, steps: int, *words: str) -> RunConfig:
        """The demo, at a constant rate: its own falls only after 0.5 is long reached. One node,
        the default of `replicas`, where the demo has two: two cores have no use for a second."""
        return demo_config(
            seed,
            [
                f"output_dir={self._folder}",
                f"name={name}",
                f"training.steps={steps}",
                "training.lr_scheduler_type=constant",
                f"training.checkpoint_every={SAVE_EVERY}",
                "models.policy.replicas=1",
                *words,
            ],
        )

    def _ours(self, config: RunConfig) -> tuple[list[str], Path, Path]:
        """(command, metrics, log); the same command resumes it."""
        path = self._folder / f"{config.name}.yaml"
        path.write_text(json.dumps(config.model_dump(mode="json")))  # JSON is YAML
        command = [str(self._own_python), *CLI, "run", str(path), "--headless"]
        return command, self._run_dir(config) / "metrics.jsonl", path.with_suffix(".log")

    def _run_dir(self, config: RunConfig) -> Path:
        return self._folder / config.name

    def _model(self, config: RunConfig) -> Path:
        """The same weights for TRL as our run begins with."""
        init = config.models["policy"].init
        if init != TINY_QWEN3:
            return Path(init)
        folder = self._folder / f"model-{config.seed}"
        if not folder.exists():
            init_model(init, folder, config.seed)
        return folder

    def _their_run(self, config: RunConfig, **options: Any) -> trl.TrlRun:
        folder = self._folder / f"{config.name}-trl"
        return trl.make_run(folder, config, self._model(config), **options)

    def _in_turns(self, config: RunConfig) -> tuple[Metered, Metered]:
        steps = config.training.steps
        ours = metered(*self._ours(config), steps=steps, env=os.environ)
        run = self._their_run(config)
        folder = Path(run.folder)
        theirs = metered(
            trl.command(self._python, [run]),
            folder / "metrics.jsonl",
            folder / "log",
            steps=steps,
            env=trl.variables(),
        )
        log_line(f"{config.name}: ours {_short(ours)}; theirs {_short(theirs)}")
        return ours, theirs

    # --- parts ------------------------------------------------------------------------------------

    def cpu(self) -> Figures:
        configs = [
            self._config(f"cpu-{seed}", seed, self._setting.steps)
            for seed in range(self._setting.seeds)
        ]
        pairs = [self._in_turns(config) for config in configs]
        rows = configs[0].training.groups_per_batch * configs[0].algorithm.num_generations
        whole = [versions_to(TARGET, _by_version(ours.lines)) for ours, _ in pairs]
        return {
            **_compare(pairs, rows, ""),
            "startup_ratio": _ratio(pairs, lambda one: one.first.cpu_s),
            "startup_cpu_s": _median(pairs, lambda one: one.first.cpu_s, 0),
            "startup_cpu_s_theirs": _median(pairs, lambda one: one.first.cpu_s, 1),
            "startup_s": _median(pairs, lambda one: one.first.seconds, 0),
            "startup_s_theirs": _median(pairs, lambda one: one.first.seconds, 1),
            "memory_ratio": _ratio(pairs, lambda one: one.peak_mb),
            "memory_mb": _median(pairs, lambda one: one.peak_mb, 0),
            "memory_mb_theirs": _median(pairs, lambda one: one.peak_mb, 1),
            "steps_async_whole_runs": statistics.median(whole),
            "cpu_s_to_target": _to_target(pairs, 0),
            "cpu_s_to_target_theirs": _to_target(pairs, 1),
        }

    def long(self) -> Figures:
        groups, group_size = self._setting.long_groups, demo_config(0).algorithm.num_generations
        pairs: list[tuple[Metered, Metered]] = []
        for seed in range(min(self._setting.seeds, 3)):
            model = self._folder / f"endless-{seed}"
            init_model(TINY_QWEN3, model, seed)
            make_endless(model)
            config = self._config(
                f"long-{seed}",
                seed,
                self._setting.long_steps,
                f"models.policy.init={model}",
                f"sampling.max_tokens={LONG_TOKENS}",
                f"training.groups_per_batch={groups}",
            )
            pairs.append(self._in_turns(config))
            assert all(
                line["completions/mean_length"] == LONG_TOKENS for line in pairs[-1][0].lines
            )
        return _compare(pairs, groups * group_size, "_long")

    def steps(self) -> Figures:
        """TRL's seeds in one process on one core, our harness in this process on another."""
        seeds, most = range(self._setting.step_seeds), 60
        runs = [
            self._their_run(self._config(f"steps-{seed}", seed, most), until=TARGET)
            for seed in seeds
        ]
        log = self._folder / "trl-steps.log"
        command, env = trl.command(self._python, runs), trl.variables()
        with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=env) as p:
            setting = staleness_price.Setting(target=TARGET, max_steps=most, seeds=len(seeds))
            arms = [("clip", 0), (staleness_price.DEMO, 1)]
            runs_file = self._folder / "steps.jsonl"
            found = staleness_price.sweep(setting, self._folder, runs_file, arms)
            if p.wait():
                raise RuntimeError(f"TRL failed:\n{log.read_text()[-3000:]}")
        curves = [read_lines(Path(run.folder) / "metrics.jsonl") for run in runs]
        theirs = [versions_to(TARGET, [line["reward"] for line in one]) for one in curves]
        fresh, stale = ([versions_to(TARGET, curve) for curve in found[arm]] for arm in arms)
        figures: Figures = {}
        for name, values in (("theirs", theirs), ("sync", fresh), ("async", stale)):
            figures[f"steps_{name}"] = statistics.median(values)
            mean, half = mean_and_half_width(values)
            figures |= {f"steps_{name}_mean": mean, f"steps_{name}_half_width": half}
        return {
            "steps_ratio": figures["steps_sync"] / figures["steps_theirs"],
            "steps_ratio_async": figures["steps_async"] / figures["steps_theirs"],
            **figures,
        }

    def kill(self) -> Figures:
        config = self._config("kill", 0, KILLED_AFTER + GO_ON, "training.groups_per_batch=32")
        rows, run_dir = 32 * config.algorithm.num_generations, self._run_dir(config)
        command, metrics, log = self._ours(config)
        killed_at, ours_s = _crash([command, command], metrics, log, os.environ)
        report = audit(run_dir)
        run = self._their_run(config, save_every=SAVE_EVERY)
        folder = Path(run.folder)
        commands = [trl.command(self._python, [one]) for one in (run, replace(run, resume=True))]
        _, theirs_s = _crash(commands, folder / "metrics.jsonl", folder / "log", trl.variables())
        made = sum(line["rows"] for line in read_lines(folder / "generated.jsonl"))
        repeated = made - rows * (KILLED_AFTER + GO_ON)
        return {
            "lost_ours": report.summary.lost + stale_rows(run_dir, killed_at, made_before=True),
            "lost_theirs": repeated,  # every answer that it makes again is one that it had lost
            "repeated_ours": repeated_rows(run_dir),
            "repeated_theirs": repeated,
            "wasted_ours": stale_rows(run_dir, killed_at, made_before=False),
            "trained_twice_ours": report.summary.trained_twice,
            "crash_s_ours": ours_s,
            "crash_s_theirs": theirs_s,
        }


def _crash(
    commands: Sequence[Sequence[str]], metrics: Path, log: Path, env: Mapping[str, str]
) -> tuple[float, float]:
    """(when all processes were killed, seconds from then to a step that it had not reached)."""
    with running(commands[0], metrics, log, env) as run:
        run.wait(KILLED_AFTER)
        killed_at, began_at = time.time(), time.monotonic()
        run.kill()
    with running(commands[1], metrics, log, env) as run:
        num_lines = 1
        while run.wait(num_lines) and _last_step(metrics) <= KILLED_AFTER:
            num_lines += 1
        seconds = time.monotonic() - began_at
        run.wait_for_end()
    log_line(f"{log.name}: {seconds:.1f} s after the kill it was one step further")
    return killed_at, seconds


def _last_step(metrics: Path) -> int:
    line = read_lines(metrics)[-1]
    return int(line["step"] if "step" in line else line["number"])


def make_endless(model: Path) -> None:
    """Change the weights so that the end of an answer has no chance: one dimension of every token's
    embedding outweighs all others, and only that token's output reads it."""
    safetensors: Any = import_module("safetensors.numpy")
    weights = safetensors.load_file(model / WEIGHTS)
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    head = weights["lm_head.weight"]
    head[:, 0] = 0.0
    head[END, 0] = np.float32(-3.0)
    safetensors.save_file(weights, model / WEIGHTS, metadata={"format": "pt"})


def stale_rows(run_dir: Path, killed_at: float, *, made_before: bool) -> int:
    """Rows that a crash made too old to train: delivered before it, or after it by nodes that went
    on from the newest version while the trainer was still behind."""
    query = (
        "SELECT count(*) FROM rows JOIN fates USING (group_id) WHERE fates.reason = 'stale' "
        f"AND fates.at > {killed_at} AND (rows.delivered_at < {killed_at}) = {int(made_before)}"
    )
    return _count(run_dir, query)


def repeated_rows(run_dir: Path) -> int:
    """Rows that were leased again because their first lease ended without a delivery."""
    return _count(run_dir, "SELECT count(*) FROM rows WHERE epoch > 1")


def _count(run_dir: Path, query: str) -> int:
    [path] = (run_dir / "ledger").glob("*.db")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
        return int(ledger.execute(query).fetchone()[0])


def _by_version(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Rewards by the version that sampled; between two, the mean of a batch of both is theirs."""
    sampled_by = {
        round(line["number"] - 1 - line["staleness/mean"]): line["reward/mean"] for line in lines
    }
    known = sorted(sampled_by)
    return [
        float(np.interp(n, known, [sampled_by[k] for k in known])) for n in range(known[-1] + 1)
    ]


def _to_target(pairs: Sequence[tuple[Metered, Metered]], side: int) -> float:
    """CPU-seconds in all until the batch that earned the target was trained."""
    found: list[float] = []
    for pair in pairs:
        run = pair[side]
        rewards = [line.get("reward/mean", line.get("reward", 0.0)) for line in run.lines]
        per_step = (run.last.cpu_s - run.first.cpu_s) / (len(rewards) - 1)
        found.append(run.first.cpu_s + per_step * versions_to(TARGET, rewards))
    return statistics.median(found)


def _compare(pairs: Sequence[tuple[Metered, Metered]], rows: int, suffix: str) -> Figures:
    def cpu_s(one: Metered) -> float:
        """Per 1,000 trajectories after the first step."""
        return 1000 * (one.last.cpu_s - one.first.cpu_s) / (rows * (len(one.lines) - 1))

    def wall_s(one: Metered) -> float:
        return 1000 * (one.last.seconds - one.first.seconds) / (rows * (len(one.lines) - 1))

    def in_all_s(one: Metered) -> float:
        return 1000 * one.end.cpu_s / (rows * len(one.lines))

    figures = {
        f"cpu_ratio{suffix}": _ratio(pairs, cpu_s),
        f"wall_ratio{suffix}": _ratio(pairs, wall_s),
    }
    for name, of in (("cpu_s", cpu_s), ("wall_s", wall_s), ("cpu_s_in_all", in_all_s)):
        figures[f"{name}{suffix}"] = _median(pairs, of, 0)
        figures[f"{name}{suffix}_theirs"] = _median(pairs, of, 1)
    return figures


def _median(
    pairs: Sequence[tuple[Metered, Metered]], of: Callable[[Metered], float], side: int
) -> float:
    return statistics.median(of(pair[side]) for pair in pairs)


def _ratio(pairs: Sequence[tuple[Metered, Metered]], of: Callable[[Metered], float]) -> float:
    return _median(pairs, of, 0) / _median(pairs, of, 1)


def _short(one: Metered) -> str:
    return (
        f"first step {one.first.cpu_s:.1f} CPU-s, last {one.last.cpu_s:.1f} in "
        f"{one.last.seconds:.1f} s, {one.peak_mb:.0f} MB"
    )


def main() -> None:
    names = ("cpu", "long", "steps", "kill")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer seeds and steps; 14 minutes")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--dir", type=Path, help="where to write; default: the system's folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: Figures = {}
    with scratch(arguments.dir) as folder:
        bench = Bench(folder, QUICK if arguments.quick else Setting())
        parts = {"cpu": bench.cpu, "long": bench.long, "steps": bench.steps, "kill": bench.kill}
        for name in arguments.parts:
            figures |= parts[name]()
            log_line(f"{name}: {figures}")
    result(**{name: value for name, value in figures.items() if not math.isnan(value)})


if __name__ == "__main__":
    main()
