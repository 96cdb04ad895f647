# SPDX-License-Identifier: Apache-2.0
"""`penstock prm`: process rewards of a run, from traces to scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runs.prm.label import Labelled
    from penstock.trainer.prm.versions import ModelVersion


def collect(
    run: Path, /, *, out: Path, step: str = "", limit: int | None = None, json: bool = False
) -> int:
    """Write a run's stored trajectories as traces: their steps as text, with the outcome.

    Args:
        run: Run folder, or its config file; running, stopped or finished.
        out: File to write, one JSON object per trajectory; replaced if it exists.
        step: Only what training step N trained, or the steps N:M.
        limit: At most this many trajectories.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import pluralise, print_json, print_note
    from penstock.cli.samples import parse_steps
    from penstock.runs.history import open_run
    from penstock.runs.prm.collect import collect_traces
    from penstock.runs.samples import explain_freed

    with open_run(run) as opened:
        found = collect_traces(opened, out, steps=parse_steps(step), limit=limit)
        note = explain_freed(opened) if found.num_without_text else ""
    print_note(
        f"{pluralise(found.num_traces, 'trajectory', 'trajectories')} with "
        f"{pluralise(found.num_steps, 'step')} ({found.num_malformed:,} malformed) in {out}; left "
        f"out: {found.num_failed:,} without an outcome, {found.num_without_text:,} without text"
    )
    if note:
        print_note(note)
    if json:
        print_json({"out": str(out), "collected": found})
    return 0


def label(
    traces: Path,
    /,
    *,
    out: Path,
    judge: str = "",
    judge_model: str = "",
    program: str = "",
    concurrency: int = 8,
    json: bool = False,
) -> int:
    """Label the steps of traces with numbers from 0 to 1, by a judge or a program. Rows that OUT
    has are not labelled again, so a command that was interrupted continues.

    Args:
        traces: File from `penstock prm collect`.
        out: File for the labelled traces.
        judge: Base URL of an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1. Its key
            is read from OPENAI_API_KEY.
        judge_model: Name of the judge's model at that endpoint.
        program: Instead of a judge: module:function, called as fn(text, *, trace, step).
        concurrency: Trajectories labelled at a time.
        json: Print one JSON object as the last line.
    """
    import asyncio
    import os

    from penstock.cli.output import pluralise, print_json, print_note
    from penstock.cli.service_options import check_url
    from penstock.errors import ConfigError

    if bool(program) == bool(judge):
        raise ConfigError("who labels? give either --judge URL with --judge-model, or --program")
    if judge and not judge_model:
        raise ConfigError("--judge needs the name of a model: add --judge-model NAME")
    if concurrency < 1:
        raise ConfigError("--concurrency is a number of trajectories; use 1 or more")
    if judge:
        check_url(judge, example="http://127.0.0.1:8000/v1")
        api_key = os.environ.get("OPENAI_API_KEY", "")
        found = asyncio.run(_by_judge(traces, out, judge, judge_model, api_key, concurrency))
    else:
        found = asyncio.run(_by_program(traces, out, program, concurrency))
    print_note(
        f"{pluralise(found.num_steps, 'step')} of "
        f"{pluralise(found.num_traces, 'trajectory', 'trajectories')} labelled in {out}; "
        f"{found.num_malformed:,} malformed ones got 0, {found.num_unlabelled:,} have no label, "
        f"{found.num_known:,} trajectories were labelled before"
    )
    if json:
        print_json({"out": str(out), "labelled": found})
    return 0


async def _by_judge(
    traces: Path, out: Path, url: str, model: str, api_key: str, concurrency: int
) -> Labelled:
    from penstock.runs.prm.judge import judge_rater
    from penstock.runs.prm.label import label_traces

    async with judge_rater(url, model, api_key) as rate:
        return await label_traces(traces, out, rate, f"judge:{model}", concurrency=concurrency)


async def _by_program(traces: Path, out: Path, name: str, concurrency: int) -> Labelled:
    from penstock.runs.prm.label import label_traces, program_rater
    from penstock.runs.service_process import add_import_paths

    add_import_paths((str(Path.cwd()),))
    rate = program_rater(name)
    return await label_traces(traces, out, rate, f"program:{name}", concurrency=concurrency)


def train(
    labels: Path,
    /,
    *,
    model: str,
    out: Path,
    epochs: int = 3,
    learning_rate: float = 2e-5,
    batch_steps: int = 16,
    max_tokens: int = 1024,
    held_out: float = 0.1,
    head_only: bool = False,
    seed: int = 0,
    json: bool = False,
) -> int:
    """Train the next version of a process reward model, and report its error on held-out
    trajectories. A stage that serves OUT uses the new version at once.

    Args:
        labels: File from `penstock prm label`.
        model: Language model that gets the head: a folder, a model of the Hub, an earlier version
            (OUT/3), or builtin:tiny-qwen3.
        out: Folder of the versions 1, 2, 3, …
        epochs: Passes over the labelled steps.
        learning_rate: Peak learning rate.
        batch_steps: Labelled steps per update.
        max_tokens: The model sees at most the last tokens of a step's text, this many.
        held_out: Share of trajectories that are not trained on.
        head_only: Leave the language model as it is and solve for the head: fast, on a CPU too.
        seed: Decides the order of the steps.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_note, print_text
    from penstock.errors import ConfigError
    from penstock.trainer.prm.training import TrainingSpec, train_version

    if not 0 < held_out < 1:
        raise ConfigError(f"--held-out {held_out}: a share of trajectories, between 0 and 1")
    if min(epochs, batch_steps, max_tokens) < 1:
        raise ConfigError("--epochs, --batch-steps and --max-tokens are 1 or more")
    spec = TrainingSpec(
        model=model,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_steps=batch_steps,
        max_tokens=max_tokens,
        held_out=held_out,
        is_head_only=head_only,
        seed=seed,
    )

    def on_epoch(epoch: int, loss: float) -> None:
        print_note(f"epoch {epoch} of {epochs}: mean squared error {loss:.4f}")

    made = train_version(labels, out, spec, on_epoch)
    print_text("\n".join(_report_lines(made)))
    if json:
        print_json({"version": made.number, "folder": str(made.folder), **_fields(made)})
    return 0


def _fields(made: ModelVersion) -> dict[str, object]:
    card = made.card
    return {
        "num_steps": card.num_steps,
        "text_digest": card.text_digest,
        "held_out": card.agreement,
    }


def _report_lines(made: ModelVersion) -> list[str]:
    from penstock.cli.output import table

    found = made.card.agreement
    lines = [
        f"version {made.number} in {made.folder}, trained on {made.card.num_steps:,} steps",
        f"held out: {found.num_steps:,} steps of {found.num_trajectories:,} trajectories",
        f"  mean absolute error  {found.mae:.3f}  (of the mean label: {found.constant_mae:.3f})",
        f"  Spearman             {found.spearman:.3f}",
        "",
    ]
    rows = [
        (
            f"{one.low:.1f} – {one.high:.1f}",
            f"{one.num_steps:,}",
            f"{one.mean_score:.2f}",
            f"{one.mean_label:.2f}",
        )
        for one in found.calibration
    ]
    return [*lines, *table(("score", "steps", "mean score", "mean label"), rows)]


def serve(
    run: Path, /, *, stage: str | None = None, model: str | None = None, rows: int = 16
) -> int:
    """Score the steps of a run's rows as they arrive, until SIGTERM or Ctrl-C: one more worker of
    the run's stage with role prm. It uses new versions of the model as they appear.

    Args:
        run: Run folder, or its config file.
        stage: Id of the stage; optional if the run has one with role prm.
        model: Folder of the versions; by default as in the config.
        rows: Number of rows to lease at a time.
    """
    from penstock.cli.stage import serve_stage
    from penstock.runs.prm.scoring import find_prm_stage
    from penstock.runs.target import read_target

    id = find_prm_stage(read_target(run).config, stage)
    path = None if model is None else str(Path(model).absolute())
    return serve_stage(run, id, rows=rows, model=path)
