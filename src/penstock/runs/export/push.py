# SPDX-License-Identifier: Apache-2.0
"""Uploads an exported folder to the Hugging Face Hub, or a hub with the same API.

`huggingface_hub` does the work: its access tokens and its variables (HF_ENDPOINT, HF_TOKEN) apply.
Owns what may be uploaded: a folder that looks like an export, never a run folder, which holds the
run's keys. What it creates is private unless asked otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.hub import is_repository

_MODEL_FILES = ("*.safetensors", "*.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What a push made."""

    url: str
    """Of the repository."""
    commit: str


def push(
    folder: str | Path,
    repository: str,
    *,
    dataset: bool = False,
    public: bool = False,
    branch: str | None = None,
    message: str = "",
) -> Pushed:
    """Upload an exported folder to the Hugging Face Hub, as `penstock push` does. Creates the
    repository if it does not exist.

    Args:
        folder: A folder that an export wrote.
        repository: `owner/name`.
        dataset: A repository of data, for trajectories.
        public: Let everybody read a repository that this call creates.
        branch: Branch to commit to; by default main.
        message: Commit message.
    """
    source = Path(folder)
    _ensure_pushable(source, dataset=dataset)
    if not is_repository(repository):
        raise ConfigError(f"{repository!r} names no repository; write OWNER/NAME")
    try:
        library: Any = import_module("huggingface_hub")
        errors: Any = import_module("huggingface_hub.errors")
        transport_error: Any = import_module("httpx2").HTTPError
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a push needs {error.name}, which is not installed; pip install 'penstock-rl[train]'"
        ) from None
    api: Any = library.HfApi()
    kind = "dataset" if dataset else "model"
    try:
        made = api.create_repo(repository, repo_type=kind, private=not public, exist_ok=True)
        if branch is not None:
            api.create_branch(repository, repo_type=kind, branch=branch, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository,
            repo_type=kind,
            folder_path=source,
            revision=branch,
            commit_message=message or f"Upload {source.name} with penstock",
        )
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, transport_error, OSError) as error:
        raise ConfigError(_explain(repository, error)) from error
    return Pushed(url=str(made), commit=str(done.oid))


def _ensure_pushable(folder: Path, *, dataset: bool) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name one that `penstock export` wrote")
    if any(path.name in ("keys", "ledger") and path.is_dir() for path in folder.rglob("*")):
        raise ConfigError(
            f"{folder} is or holds a run folder, with the run's keys; export a model or "
            "trajectories first: penstock export --help"
        )
    if link := next((path for path in folder.rglob("*") if path.is_symlink()), None):
        raise ConfigError(f"{link} is a link, whose target would be uploaded; remove it")
    has_data = any(folder.rglob("*.parquet")) or any(folder.rglob("*.json*"))
    has_model = any(any(folder.glob(pattern)) for pattern in _MODEL_FILES)
    if not (has_data if dataset else has_model):
        wanted = "trajectories" if dataset else "a model (.safetensors or .gguf)"
        hint = "" if dataset else "; for trajectories add --dataset"
        raise ConfigError(f"{folder} does not hold {wanted}{hint}")


def _explain(repository: str, error: Exception) -> str:
    """The hub's answer in one line, and what to do."""
    reason = " ".join(str(error).split())[:300].rstrip(".")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        fix = "run `hf auth login` with a token that may write there, or set HF_TOKEN"
    else:
        fix = "try again; what was uploaded is not sent twice"
    return f"{repository} could not be pushed: {reason}; {fix}"
