# SPDX-License-Identifier: Apache-2.0
"""The model card: the README.md of an exported model, as the Hugging Face Hub shows it.

States data, algorithm, evaluation and lineage, all taken from the run's own files; what the files
do not say is not claimed. Local paths and secrets stay out: a card is for the public.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from penstock.config import RunConfig, SourceConfig
from penstock.dataflow.records import VersionRecord
from penstock.fleet.run_folder import RunFolder
from penstock.hub import parse_hub_model
from penstock.redaction import hide_secrets
from penstock.runs.curves import REWARD, read_records
from penstock.runs.export.evaluations import scores_of
from penstock.runs.export.made_by import penstock_version

ModelKind = Literal["model", "adapter", "merged", "gguf"]
_LIBRARY: Mapping[ModelKind, str] = {
    "model": "transformers",
    "merged": "transformers",
    "adapter": "peft",
    "gguf": "gguf",
}
_CONTENTS: Mapping[ModelKind, str] = {
    "model": "All weights, as the trainer published them.",
    "merged": "The LoRA adapter is merged into the weights, in float32.",
    "adapter": "A LoRA adapter in PEFT's format; the base model is not included.",
    "gguf": "A GGUF file for llama.cpp, with tokenizer and chat template, and a Modelfile for "
    "Ollama.",
}


def model_card(run: RunFolder, config: RunConfig, version: VersionRecord, kind: ModelKind) -> str:
    sections = [
        _front_matter(config, version, kind),
        f"# {config.name}, step {version.number}",
        f"Trained with reinforcement learning by penstock {penstock_version()}. {_CONTENTS[kind]}",
        "## Data\n\n" + "\n".join(_data(config, run)),
        "## Algorithm\n\n" + "\n".join(_algorithm(config, version.policy)),
        "## Evaluation\n\n" + "\n".join(_evaluation(run, version)),
        "## Lineage\n\n" + "\n".join(_lineage(run, config, version)),
    ]
    return hide_secrets("\n\n".join(sections) + "\n")


def _front_matter(config: RunConfig, version: VersionRecord, kind: ModelKind) -> str:
    algorithm = config.for_policy(version.policy).algorithm.name
    facts: dict[str, Any] = {
        "library_name": _LIBRARY[kind],
        "pipeline_tag": "text-generation",
        "tags": ["penstock", "reinforcement-learning", algorithm],
    }
    if (base := parse_hub_model(config.models[version.policy].init)) is not None:
        facts["base_model"] = base.id
        relation = {"adapter": "adapter", "gguf": "quantized"}.get(kind, "finetune")
        facts["base_model_relation"] = relation
    if datasets := sorted({name for one in config.sources if (name := _hub_dataset(one))}):
        facts["datasets"] = datasets
    return f"---\n{yaml.safe_dump(facts, sort_keys=False)}---"


# --- data -----------------------------------------------------------------------------------------


def _data(config: RunConfig, run: RunFolder) -> Iterator[str]:
    digests = run.sources()
    yield "| source | tasks | share | workflow | reward | digest of tasks |"
    yield "|---|---|---|---|---|---|"
    total = sum(source.weight for source in config.sources) or 1.0
    for source in config.sources:
        cells = (
            source.name,
            _origin(source),
            f"{source.weight / total:.0%}",
            config.workflow_name_of(source) or "a command",
            config.reward_of(source) or "by workflow, agents or a stage",
            digests.get(source.name, "")[:16] or "–",
        )
        yield "| " + " | ".join(map(_cell, cells)) + " |"


def _origin(source: SourceConfig) -> str:
    """Where the tasks come from; of a local path only its name."""
    if source.data is not None:
        return _hub_dataset(source) or Path(source.data.path).name
    if source.task is not None:
        return Path(source.task).name
    if source.harbor is not None:
        return "Harbor tasks"
    return "sessions of agents" if source.session is not None else "an environment"


def _hub_dataset(source: SourceConfig) -> str:
    path = "" if source.data is None else source.data.path
    is_local = Path(path).expanduser().exists() or path.endswith((".jsonl", ".parquet", ".csv"))
    return path if path.count("/") == 1 and path[0] not in "./~" and not is_local else ""


# --- algorithm ------------------------------------------------------------------------------------


def _algorithm(config: RunConfig, policy: str) -> Iterator[str]:
    own = config.for_policy(policy)
    yield f"`{own.algorithm.name}`, with these settings:"
    settings = {
        "algorithm": own.algorithm.model_dump(mode="json", exclude_none=True),
        "training": own.training.model_dump(mode="json", exclude_none=True),
        "sampling": own.sampling.model_dump(mode="json", exclude_none=True),
    }
    if own.model.lora is not None:
        settings["lora"] = own.model.lora.model_dump(mode="json")
    yield f"\n```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```"


# --- evaluation -----------------------------------------------------------------------------------


def _evaluation(run: RunFolder, version: VersionRecord) -> Iterator[str]:
    scores = scores_of(run, version.policy, version.number)
    if scores:
        yield (
            "| suite | scorer | score | 95 % interval | questions | samples | failed "
            "| temperature |"
        )
        yield "|---|---|---|---|---|---|---|---|"
        for one, found in scores:
            low, high = found.interval
            yield (
                f"| {_cell(one.suite)} | {_cell(one.scorer)} | {found.avg:.3f} | "
                f"{low:.3f} to {high:.3f} | {found.questions} | {found.samples} | "
                f"{found.failed} | {one.temperature:g} |"
            )
        yield "\nThe score is the mean over all answers; a failed one counts as 0."
    else:
        yield "This version was not evaluated."
    rewards = [
        (record.number, record.values[REWARD])
        for record in read_records(run.metrics, [REWARD])
        if record.policy == version.policy and record.number <= version.number
        if REWARD in record.values
    ]
    if rewards:
        (first, before), (last, after) = rewards[0], rewards[-1]
        yield (
            f"\nMean reward in training: {before:.3f} at step {first}, {after:.3f} at step {last}. "
            "That is on training data: it does not replace an evaluation."
        )


# --- lineage --------------------------------------------------------------------------------------


def _lineage(run: RunFolder, config: RunConfig, version: VersionRecord) -> Iterator[str]:
    init = config.models[version.policy].init
    facts = {
        "base model": f"`{public_name(init)}`",
        "run": f"`{config.name}`, seed {config.seed}",
        "policy": f"`{version.policy}`",
        "version": f"`{version.policy}@{version.incarnation}.{version.number}` "
        f"(incarnation {version.incarnation}, step {version.number})",
        "digest of the weights": f"`{version.weights_digest}`",
        "digest of the manifest": f"`{version.manifest_digest}`",
        "penstock": penstock_version(),
    }
    if (parent := run.parent()) is not None:
        facts["forked from"] = f"step {parent.step} of `{Path(parent.run).name}`"
    yield from (f"- {name}: {value}" for name, value in facts.items())
    if code := run.code():
        yield "- digests of the user's code: " + ", ".join(
            f"`{Path(module).name}` `{digest[:16]}`" for module, digest in sorted(code.items())
        )


def public_name(init: str) -> str:
    """A model as others may read it: of a folder of this machine, the last part of its path."""
    is_named = parse_hub_model(init) is not None or init.startswith("builtin:")
    return init if is_named else Path(init).name


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
