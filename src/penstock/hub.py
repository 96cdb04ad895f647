# SPDX-License-Identifier: Apache-2.0
"""Models of the Hugging Face Hub: which text names one, which commit it is, where its files are.

Owns the form `owner/name` and `owner/name@REVISION`, which files of a repository are a model, and
the messages when it cannot be had. `huggingface_hub` does the work: its cache, its access tokens,
its progress bars and its variables (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE) apply. It is imported
only when a model of the Hub is named. Loads no model, and knows no config."""

from __future__ import annotations

import re
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.durable import read_regular
from penstock.errors import ConfigError

TINY_QWEN3 = "builtin:tiny-qwen3"
"""The built-in model; the trainer makes its files."""
TINY_WINDOW = 512
"""Its context window, in tokens."""
TEXTS = ("*.json", "*.jinja", "*.txt", "*.model")
"""Config and tokenizer: a few MB."""
MAX_TEXT_BYTES = 64 << 20
"""Of one of them; the largest tokenizers in use have 35 MB."""
WEIGHTS = ("*.safetensors",)
_OTHERS = ("*/*", "consolidated*")
"""Copies of the same weights for other programs."""

_NAMED = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\w[\w./-]*))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A model of the Hub, as a config names it."""

    id: str
    """`owner/name`."""
    revision: str
    """A branch, tag or commit; empty for the newest commit."""

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id

    @property
    def is_pinned(self) -> bool:
        """Whether it names a commit, so that its files can never change."""
        return bool(_COMMIT.fullmatch(self.revision))


def parse_hub_model(name: str) -> HubModel | None:
    """The model of the Hub that this text names; None for a built-in model or a folder.

    A folder of the same name in the working directory wins, except over a pinned commit."""
    if (found := _NAMED.fullmatch(name)) is None:
        return None
    model = HubModel(id=found["id"], revision=found["revision"] or "")
    return None if not model.is_pinned and Path(name).exists() else model


def is_repository(name: str) -> bool:
    """Whether the text is `owner/name`, without a revision."""
    found = _NAMED.fullmatch(name)
    return found is not None and found["revision"] is None


def is_same_model(name: str, pinned: str) -> bool:
    """Whether the second text is the model of the first, pinned to a commit."""
    found = _NAMED.fullmatch(pinned)
    return bool(found and found["id"] == name and _COMMIT.fullmatch(found["revision"] or ""))


def pin_model(name: str, notify: Callable[[str], None]) -> str:
    """Download a model of the Hub, and name it by its commit; others are returned unchanged."""
    model = parse_hub_model(name)
    if model is None or (model.is_pinned and _find(model, *TEXTS, *WEIGHTS) is not None):
        return name
    notify(f"{model}: fetching from the Hugging Face Hub")
    folder = _download(model)
    notify(f"{model}: commit {folder.name[:12]}, in {folder}")
    return f"{model.id}@{folder.name}"


def model_folder(name: str) -> Path:
    """The folder with this model's files. One of the Hub is downloaded if it is not here."""
    if (model := parse_hub_model(name)) is None:
        return Path(name).expanduser()
    return _find(model, *TEXTS, *WEIGHTS) or _download(model)


def find_folder(name: str, *, texts_only: bool = False) -> Path | None:
    """The same without the network; None if the files are not on this machine.

    texts_only: config and tokenizer are enough."""
    if (model := parse_hub_model(name)) is None:
        path = Path(name).expanduser()
        return path if path.is_dir() else None
    return _find(model, *TEXTS, *(() if texts_only else WEIGHTS))


def read_text_file(path: Path) -> bytes:
    """Config or tokenizer of a model, which may be anybody's: OSError for what could block or never
    end. Follows links, since the Hub's cache consists of them."""
    return read_regular(path, MAX_TEXT_BYTES, follow_links=True)


def check_model_files(folder: Path) -> None:
    """ConfigError for files that other libraries must not be given: they would read them whole."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            continue
        try:
            found = path.stat()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; remove it") from None
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is not a regular file; put one there, or remove it")
        is_text = any(fnmatch(path.name, pattern) for pattern in TEXTS)
        if is_text and found.st_size > MAX_TEXT_BYTES:
            raise ConfigError(
                f"{path} has {found.st_size:,} bytes, and a config or tokenizer file at most "
                f"{MAX_TEXT_BYTES:,}; remove it if the model does not need it"
            )


def other_files(folder: str, names: Iterable[str]) -> set[str]:
    """Names of files that do not belong to a model; for `shutil.copytree`, since other programs
    share the cache."""
    patterns = (*TEXTS, *WEIGHTS)
    return {
        name
        for name in names
        if fnmatch(name, _OTHERS[1]) or not any(fnmatch(name, pattern) for pattern in patterns)
    }


def check_hub_model(name: str) -> None:
    """ConfigError if the model cannot be had, or does not fit on the disk of the cache. Downloads
    config and tokenizer, but no weights."""
    model = parse_hub_model(name)
    if model is None or find_folder(name) is not None:
        return
    quiet = _silent_progress()
    folder = Path(_snapshot(model, *TEXTS, tqdm_class=quiet))
    files: list[Any] = _snapshot(model, *WEIGHTS, tqdm_class=quiet, dry_run=True)
    _ensure_is_model(model, folder, has_weights=bool(files))
    num_bytes = sum(file.file_size or 0 for file in files if file.will_download)
    free_bytes = shutil.disk_usage(folder).free
    if num_bytes > free_bytes:
        raise ConfigError(
            f"{model} takes {num_bytes / 1e9:.1f} GB and {folder.parents[2]} has "
            f"{free_bytes / 1e9:.1f} GB free; free some, or set HF_HOME to a larger disk"
        )


def _find(model: HubModel, *patterns: str) -> Path | None:
    """The complete files in the cache; None if any is missing."""
    _ensure_installed(model)
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(_call(model, *patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    has_weights = not set(WEIGHTS) & set(patterns) or any(folder.glob(WEIGHTS[0]))
    return folder if has_weights and (folder / "config.json").is_file() else None


def _download(model: HubModel) -> Path:
    folder = Path(_snapshot(model, *TEXTS, *WEIGHTS))
    _ensure_is_model(model, folder, has_weights=any(folder.glob(WEIGHTS[0])))
    return folder


def _ensure_is_model(model: HubModel, folder: Path, *, has_weights: bool) -> None:
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += [] if has_weights else list(WEIGHTS)
    if missing:
        raise ConfigError(
            f"{model} on the Hugging Face Hub has no {' and no '.join(missing)}; name a model in "
            "transformers' format with safetensors weights"
        )


def _snapshot(model: HubModel, *patterns: str, **options: Any) -> Any:
    """As `_call`; ConfigError says what to do if it fails."""
    _ensure_installed(model)
    import httpx2
    from huggingface_hub import errors

    try:
        return _call(model, *patterns, **options)
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{model}: its owner asks for consent: accept the terms on {_page(model)}, then run "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{model}: no folder here has this name, and the Hugging Face Hub has no such model; "
            f"check the spelling on {_page(model)}; for a private one, run `hf auth login` or set "
            "HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"{model}: the model has no revision {model.revision}; choose a branch, tag or commit "
            f"from {_page(model)}/commits"
        ) from error
    except (OSError, ValueError, httpx2.HTTPError) as error:
        raise ConfigError(_unreachable(model, error)) from error


def _unreachable(model: HubModel, error: Exception) -> str:
    from huggingface_hub import constants

    revision = f" --revision {model.revision}" if model.revision else ""
    reason = " ".join(str(error.__cause__ or error).split()).rstrip(".")
    why = f"the Hugging Face Hub cannot be reached ({reason[:200]})"
    retry = "or try again with network access"
    if constants.HF_HUB_OFFLINE:
        why, retry = "HF_HUB_OFFLINE is set", "or unset HF_HUB_OFFLINE"
    return (
        f"{model} is neither a folder here nor complete in {constants.HF_HUB_CACHE}, and {why}; "
        f"run `hf download {model.id}{revision} --local-dir DIR` on a machine with network access, "
        f"copy DIR to this one and name it here instead, {retry}"
    )


def _ensure_installed(model: HubModel) -> None:
    try:
        import_module("huggingface_hub")
    except ImportError:
        raise ConfigError(
            f"{model} is a model of the Hugging Face Hub, which needs the package huggingface_hub; "
            "run: pip install 'penstock-rl[train]'"
        ) from None


def _call(model: HubModel, *patterns: str, **options: Any) -> Any:
    library: Any = import_module("huggingface_hub")
    return library.snapshot_download(
        model.id,
        revision=model.revision or None,
        allow_patterns=list(patterns),
        ignore_patterns=list(_OTHERS),
        **options,
    )


def _silent_progress() -> type[Any]:
    """A progress bar that shows nothing, for a check that takes a moment."""
    shown: Any = import_module("huggingface_hub.utils").tqdm

    class Silent(shown):
        def __init__(self, *args: Any, **options: Any) -> None:
            shown.__init__(self, *args, **{**options, "disable": True})

    return Silent


def _page(model: HubModel) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{model.id}"
