# SPDX-License-Identifier: Apache-2.0
"""Finds a Hugging Face data set: in a folder that `save_to_disk` wrote, in a folder of data files,
in the cache, or on the Hub.

Owns what to do without a network. The `datasets` library downloads, caches and converts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock.dataflow.sources.downloads import downloads_of
from penstock.dataflow.sources.folder_names import SPLITS, STATE, refuse_ways_out
from penstock.dataflow.sources.tables import DatasetRows, import_data_package
from penstock.errors import ConfigError

DEFAULT_SPLIT = "train"
_LEADING_OUT = ("hdf5", "iceberg", "lance")
"""Formats whose files name other files, wherever they are."""


def open_folder(folder: Path, *, name: str | None, split: str | None) -> DatasetRows:
    """A data set on this machine."""
    datasets = import_data_package("datasets", str(folder))
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder; a path is relative to the working directory, {Path.cwd()}"
        )
    try:
        refuse_ways_out(folder)
    except ConfigError:
        raise
    except Exception as error:  # texts of others: what they are not has many errors
        raise _unreadable(folder, error) from None
    is_dict = (folder / SPLITS).is_file()
    if not is_dict and not (folder / STATE).is_file():
        found = _load(datasets, str(folder.resolve()), name, split, None, label=str(folder))
        return DatasetRows(found, str(folder))
    if name is not None:
        raise ConfigError(
            f"{folder} was saved with save_to_disk and has no names; remove data.name"
        )
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # pyarrow's and datasets' errors share no base
        raise _unreadable(folder, error) from None
    return DatasetRows(
        _choose(found, split, folder) if is_dict else _whole(found, split, folder), str(folder)
    )


def _unreadable(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{folder} cannot be read: {_one_line(error)}; it may be truncated or damaged: save or "
        "copy it again"
    )


def _choose(found: Any, split: str | None, folder: Path) -> Any:
    wanted = split or DEFAULT_SPLIT
    if wanted not in found:
        raise ConfigError(
            f"{folder} has no split {wanted!r}; set data.split to one of: {', '.join(found)}"
        )
    return found[wanted]


def _whole(found: Any, split: str | None, folder: Path) -> Any:
    if split is not None and split != str(found.split):
        raise ConfigError(f"{folder} was saved as a single split; remove data.split ({split})")
    return found


def open_hub(
    repo: str, *, name: str | None, split: str | None, revision: str | None, path_key: str
) -> DatasetRows:
    """A data set of the Hub, from its cache if the Hub cannot be reached. `path_key`: where users
    name it."""
    datasets = import_data_package("datasets", repo)
    found = _load(datasets, repo, name, split, revision, label=repo, path_key=path_key)
    return DatasetRows(found, repo)


def _load(
    datasets: Any,
    path: str,
    name: str | None,
    split: str | None,
    revision: str | None,
    *,
    label: str,
    path_key: str = "data.path",
) -> Any:
    try:
        builder = datasets.load_dataset_builder(path, name, revision=revision)
        if builder.name in _LEADING_OUT:
            raise ValueError(f"its format, {builder.name}, can name files elsewhere; use Parquet")
        builder.download_and_prepare(dl_manager=downloads_of(builder, path_key))
        return builder.as_dataset(split=split or DEFAULT_SPLIT)
    except ConfigError:
        raise
    except datasets.exceptions.DatasetNotFoundError as error:
        keys = f"{path_key} and data.revision" if revision else path_key
        raise ConfigError(
            f"{label}: {_one_line(error)}; check the spelling of {keys}, and "
            "for a private or gated data set log in with `hf auth login`"
        ) from None
    except Exception as error:  # errors of requests, of files and of conversion share no base
        if _is_offline(error):
            raise ConfigError(_offline_text(label, revision, path_key)) from None
        raise ConfigError(
            f"{label} cannot be loaded: {_one_line(error)}; see data.name and data.split"
        ) from None


def _is_offline(error: BaseException) -> bool:
    if isinstance(error, ConnectionError):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"TransportError", "LocalEntryNotFoundError", "OfflineModeIsEnabled"})


def _offline_text(repo: str, revision: str | None, path_key: str) -> str:
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        why, fix = "HF_HUB_OFFLINE is set", "; or unset HF_HUB_OFFLINE"
    else:
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        why, fix = f"no connection to {endpoint}", ""
    folder = repo.rpartition("/")[2]
    pinned = f" --revision {revision}" if revision else ""
    return (
        f"{repo}: the data set is not in the cache of this machine, and {why}; run "
        f"`hf download {repo} --repo-type dataset{pinned} --local-dir {folder}` on a machine with "
        f"a network, copy the folder here, and set {path_key}: ./{folder}{fix}"
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
