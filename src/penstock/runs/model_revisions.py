# SPDX-License-Identifier: Apache-2.0
"""Fetches the models that a run names: of the Hub, each pinned to its commit, and versions of runs.

Owns which keys of a config name a model; `initial_versions` copies versions. The commit stands in
the run's own config, as `owner/name@COMMIT`, so that resume, fork and replay use the same weights,
on other machines too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock.config import RunConfig
from penstock.fleet.run_folder import RunFolder
from penstock.hub import is_same_model, pin_model
from penstock.runs.initial_versions import (
    keep_version,
    refuse_changed_frozen,
    with_first_versions,
)


def pin_models(config: RunConfig, folder: RunFolder, notify: Callable[[str], None]) -> RunConfig:
    """The config with every model of the Hub on this machine, and named by its commit; and with a
    folder of this run in the place of each version of a run.

    A model without a revision keeps the commit that the run in `folder` started with."""
    values = with_first_versions(config).model_dump(mode="json")
    before = folder.read_config() if folder.config_file.exists() else None
    known = _names_in(before) if before else []
    for section, key in _model_keys(values):
        name = keep_version(section[key], folder, notify)
        section[key] = pin_model(
            next((pinned for pinned in known if is_same_model(name, pinned)), name), notify
        )
    if values != config.model_dump(mode="json"):
        config = RunConfig.model_validate(values)
    if before:
        refuse_changed_frozen(config, before)
    return config


def _names_in(config: RunConfig) -> list[str]:
    return [section[key] for section, key in _model_keys(config.model_dump(mode="json"))]


def _model_keys(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """(section, key) of every value that names a model which a trainer loads; stages that are
    services find their models where they run."""
    models: list[dict[str, Any]] = list(values["models"].values())
    algorithms = [values["algorithm"], *(model["algorithm"] for model in models)]
    stages: list[dict[str, Any]] = values["pipeline"]["stages"] if values["pipeline"] else []
    found = [(model, "init") for model in models]
    found += [(algorithm, "teacher") for algorithm in algorithms if algorithm]
    found += [(stage, "model") for stage in stages if stage["place"] is None]
    return ((section, key) for section, key in found if section[key] is not None)
