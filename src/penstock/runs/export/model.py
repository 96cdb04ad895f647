# SPDX-License-Identifier: Apache-2.0
"""Writes one version of a run's policy for other programs: a Hugging Face folder with a model card,
a LoRA adapter alone or merged, or a GGUF file for llama.cpp and Ollama.

Owns the choice of the version and what each folder contains. Existing folders are never replaced;
one appears when it is complete. Loads no model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.config import RunConfig
from penstock.dataflow.records import VersionRecord
from penstock.errors import ConfigError
from penstock.evals.recording import BestVersion
from penstock.fleet.run_folder import RunFolder
from penstock.hub import TINY_QWEN3, parse_hub_model
from penstock.runs.evaluations import read_best
from penstock.runs.export.merged_model import merge_adapter
from penstock.runs.export.model_card import ModelKind, model_card, public_name
from penstock.runs.export.tensor_files import Precision
from penstock.runs.export.trajectories import ensure_new, staged
from penstock.runs.stored_versions import published_version, stored_versions, write_version
from penstock.runs.target import find_run_folder
from penstock.weights.catalog import CatalogVersion
from penstock.weights.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS

_TOKENIZER_FILES = (
    "tokenizer",
    "special_tokens",
    "added_tokens",
    "chat_template",
    "vocab",
    "merge",
)
"""Beginnings of the names of files that an adapter takes along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """What an export wrote."""

    path: Path
    policy: str
    step: int
    version: str
    """Such as `policy@1.5`."""
    kind: ModelKind
    """model, adapter, merged or gguf."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    run: RunFolder
    config: RunConfig
    policy: str
    stored: CatalogVersion
    record: VersionRecord

    @property
    def step(self) -> int:
        return self.record.number


def export_model(
    run: str | Path,
    to: str | Path,
    *,
    policy: str | None = None,
    step: int | None = None,
    best: bool = False,
    merge: bool = False,
) -> ExportedModel:
    """Write a version as a new Hugging Face folder with a model card, as `penstock export model`
    does. A policy that trains a LoRA adapter yields the adapter alone, or the merged model.

    Args:
        run: Run folder, or its config file; running or finished.
        to: New folder.
        policy: Policy to export; optional if the run trains only one.
        step: Step to export; by default the newest whose weights are stored.
        best: The version that the run's evaluations found best, instead of a step.
        merge: Add a LoRA adapter into the weights of its model.
    """
    target = Path(to)
    ensure_new(target)
    chosen = _choose(Path(run), policy, step, best=best)
    if merge and not chosen.stored.manifest.is_adapter:
        raise ConfigError(
            f"{chosen.policy} trains all weights, so there is no adapter to merge; remove --merge"
        )
    with staged(target) as staging:
        write_version(chosen.run, chosen.stored, staging)
        kind: ModelKind = "merged" if merge else "model"
        if merge:
            merge_adapter(staging)
        elif chosen.stored.manifest.is_adapter:
            kind = "adapter"
            _keep_adapter(staging, chosen)
        (staging / "README.md").write_text(_card(chosen, kind))
    return _exported(chosen, target, kind)


def export_gguf(
    run: str | Path,
    to: str | Path,
    *,
    policy: str | None = None,
    step: int | None = None,
    best: bool = False,
    precision: Precision | None = None,
) -> ExportedModel:
    """Write a version as a new folder with a GGUF file, a Modelfile for Ollama and a model card, as
    `penstock export gguf` does. Llama and Qwen3 models; an adapter is merged first.

    Args:
        run: Run folder, or its config file; running or finished.
        to: New folder; the GGUF file in it has the same name.
        policy: Policy to export; optional if the run trains only one.
        step: Step to export; by default the newest whose weights are stored.
        best: The version that the run's evaluations found best, instead of a step.
        precision: f32 or bf16; by default bf16 for a model stored so, else f32.
    """
    from penstock.runs.export.gguf_file import write_gguf
    from penstock.runs.export.modelfile import write_modelfile

    target = Path(to)
    ensure_new(target)
    chosen = _choose(Path(run), policy, step, best=best)
    lineage = {
        "run": chosen.config.name,
        "version": _version_name(chosen.record),
        "weights_digest": chosen.record.weights_digest,
    }
    with staged(target) as staging, _model_folder(chosen) as model:
        staging.mkdir()
        file = staging / f"{target.name}.gguf"
        write_gguf(model, file, name=chosen.config.name, precision=precision, lineage=lineage)
        sampling = chosen.config.for_policy(chosen.policy).sampling
        write_modelfile(model, staging / "Modelfile", file.name, sampling)
        (staging / "README.md").write_text(_card(chosen, "gguf"))
    return _exported(chosen, target, "gguf")


# --- which version --------------------------------------------------------------------------------


def _choose(run: Path, policy: str | None, step: int | None, *, best: bool) -> _Choice:
    folder = find_run_folder(run)
    config = folder.read_config()
    if best:
        if step is not None:
            raise ConfigError("--best and --step both choose a version; keep one")
        found = _read_best(folder)
        if policy not in (None, found.policy):
            raise ConfigError(
                f"the best version of {folder.path} is one of {found.policy}, not of {policy}; "
                "remove --policy, or choose a --step"
            )
        policy, step = found.policy, found.version
    name = _choose_policy(config, policy, folder)
    stored = stored_versions(folder, name)
    wanted = [v for v in reversed(stored) if step in (None, v.manifest.number)]
    for version in wanted:
        record = published_version(folder, name, version.manifest.number)
        if record is not None and record.manifest_digest == version.digest:
            return _Choice(run=folder, config=config, policy=name, stored=version, record=record)
    numbers = ", ".join(str(number) for number in sorted({v.manifest.number for v in stored}))
    which = "any step" if step is None else f"step {step}"
    raise ConfigError(
        f"{folder.path} has no stored weights of {name} at {which}; stored steps: "
        f"{numbers or 'none'}. Choose one of them (--step)"
    )


def _choose_policy(config: RunConfig, policy: str | None, folder: RunFolder) -> str:
    trained = [*config.trained]
    if policy is None and len(trained) == 1:
        return trained[0]
    if policy not in trained:
        given = "it trains several policies" if policy is None else f"it does not train {policy}"
        raise ConfigError(f"{folder.path}: {given}; choose one (--policy): {', '.join(trained)}")
    return policy


def _read_best(folder: RunFolder) -> BestVersion:
    if (found := read_best(folder.path)) is None:
        raise ConfigError(
            f"{folder.path} has no best version: no evaluation has ended; add eval: to the config, "
            "or choose a step with --step"
        )
    return found


# --- what a folder holds --------------------------------------------------------------------------


@contextmanager
def _model_folder(chosen: _Choice) -> Generator[Path]:
    """All weights of the version in a temporary folder, with its adapter merged."""
    with tempfile.TemporaryDirectory(prefix="penstock-export-") as temporary:
        folder = write_version(chosen.run, chosen.stored, Path(temporary) / "model")
        if chosen.stored.manifest.is_adapter:
            merge_adapter(folder)
        yield folder


def _keep_adapter(folder: Path, chosen: _Choice) -> None:
    """Leave the adapter and the tokenizer, and name the model that the adapter belongs to."""
    init = chosen.config.models[chosen.policy].init
    if init == TINY_QWEN3:
        raise ConfigError(
            f"the adapter of {chosen.policy} belongs to {init}, which other programs do not have; "
            "add --merge to export the whole model"
        )
    settings = json.loads((folder / ADAPTER_CONFIG).read_text())
    hub = parse_hub_model(init)
    base = public_name(init) if hub is None else hub.id
    settings |= {"base_model_name_or_path": base, "revision": hub.revision or None if hub else None}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    kept = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    for path in folder.iterdir():
        if path.name not in kept and not path.name.startswith(_TOKENIZER_FILES):
            path.unlink()


def _card(chosen: _Choice, kind: ModelKind) -> str:
    return model_card(chosen.run, chosen.config, chosen.record, kind)


def _version_name(record: VersionRecord) -> str:
    return f"{record.policy}@{record.incarnation}.{record.number}"


def _exported(chosen: _Choice, target: Path, kind: ModelKind) -> ExportedModel:
    return ExportedModel(
        path=target,
        policy=chosen.policy,
        step=chosen.step,
        version=_version_name(chosen.record),
        kind=kind,
        num_bytes=sum(path.stat().st_size for path in target.iterdir()),
    )
