# SPDX-License-Identifier: Apache-2.0
"""`penstock export`: take trajectories and models away from a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from penstock.runs.export.model import ExportedModel


def trajectories(
    run: Path,
    /,
    *,
    to: Annotated[Path, Parameter(required=True)],
    format: Literal["parquet", "dataset", "atif"] | None = None,
    policy: str | None = None,
    step: str = "",
    outcome: Literal["completed", "truncated", "failed", "cancelled"] | None = None,
    json: bool = False,
) -> int:
    """Write trajectories with token ids, log-probs, versions, rewards and text.

    Args:
        run: Run folder, or its config file; running or finished.
        to: A new .parquet file, a new .jsonl file (ATIF), or a new folder (for `datasets`).
        format: With a folder: dataset, or atif for one document per file.
        policy: Only those with tokens of this policy.
        step: Only what step N trained, or the steps N:M.
        outcome: Only those that ended so.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import pluralise, print_json, print_note
    from penstock.cli.samples import parse_steps
    from penstock.runs.export.trajectories import export_trajectories

    done = export_trajectories(
        run, to, format=format, policy=policy, steps=parse_steps(step), outcome=outcome
    )
    written = pluralise(done.num_written, "trajectory", "trajectories")
    print_note(f"wrote {written} to {done.path} ({done.format.value})")
    if done.num_without_tokens:
        print_note(
            f"left out {done.num_without_tokens:,} that have no tokens any more; to keep more, set "
            "dataflow.keep=all and a larger dataflow.keep_mb before the run starts or resumes"
        )
    if done.num_too_long:
        print_note(
            f"left out {done.num_too_long:,} whose documents would be too large: each step of one "
            "has its full prompt; --format parquet has them"
        )
    if json:
        print_json(
            {
                "path": str(done.path),
                "format": done.format.value,
                "written": done.num_written,
                "without_tokens": done.num_without_tokens,
                "too_long": done.num_too_long,
            }
        )
    return 0


def model(
    run: Path,
    /,
    *,
    to: Annotated[Path, Parameter(required=True)],
    policy: str | None = None,
    step: int | None = None,
    best: bool = False,
    merge: bool = False,
    json: bool = False,
) -> int:
    """Write a version as a Hugging Face folder: weights, tokenizer, chat template, model card.

    Args:
        run: Run folder, or its config file; running or finished.
        to: New folder.
        policy: Policy to export; optional if the run trains only one.
        step: Step to export; by default the newest whose weights are stored.
        best: The version that the run's evaluations found best.
        merge: Add a LoRA adapter into the weights; by default it is written alone.
        json: Print one JSON object as the last line.
    """
    from penstock.runs.export.model import export_model

    done = export_model(run, to, policy=policy, step=step, best=best, merge=merge)
    return _print_model(done, json=json)


def gguf(
    run: Path,
    /,
    *,
    to: Annotated[Path, Parameter(required=True)],
    policy: str | None = None,
    step: int | None = None,
    best: bool = False,
    precision: Literal["f32", "bf16"] | None = None,
    json: bool = False,
) -> int:
    """Write a version as a folder with a GGUF file, a Modelfile for Ollama and a model card.

    Llama and Qwen3 models. A LoRA adapter is merged first.

    Args:
        run: Run folder, or its config file; running or finished.
        to: New folder.
        policy: Policy to export; optional if the run trains only one.
        step: Step to export; by default the newest whose weights are stored.
        best: The version that the run's evaluations found best.
        precision: By default bf16 for a model that is stored so, else f32.
        json: Print one JSON object as the last line.
    """
    from penstock.runs.export.model import export_gguf

    done = export_gguf(run, to, policy=policy, step=step, best=best, precision=precision)
    return _print_model(done, json=json)


def _print_model(done: ExportedModel, *, json: bool) -> int:
    from penstock.cli.output import format_bytes, print_json, print_note

    print_note(
        f"wrote {done.version} ({done.kind}, {format_bytes(done.num_bytes)}) to {done.path}; "
        f"publish it with: penstock push {done.path} OWNER/NAME"
    )
    if json:
        print_json(
            {
                "path": str(done.path),
                "kind": done.kind,
                "policy": done.policy,
                "step": done.step,
                "version": done.version,
                "bytes": done.num_bytes,
            }
        )
    return 0
