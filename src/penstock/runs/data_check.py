# SPDX-License-Identifier: Apache-2.0
"""Reads every row of a run's data sets before it starts, and counts the tokens of prompts.

Owns what needs both a data set and a tokenizer. Downloads a data set of the Hub that is not in the
cache. Runs no code of the user, so it needs no separate process and no time limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from penstock.config import RunConfig
from penstock.dataflow.service.build_sources import data_spec, harbor_spec
from penstock.dataflow.sources import open_data
from penstock.dataflow.sources.harbor import read_tasks
from penstock.dataflow.sources.suites import open_suite
from penstock.errors import BadRequest, ConfigError, WeightsError
from penstock.types import JsonObject

if TYPE_CHECKING:
    from penstock.gateway.renderer import Renderer


def data_problems(
    config: RunConfig, checked: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str]]:
    """(config key, message) of every source whose data set cannot be used, and of every suite.

    checked: digests of data sets that an earlier launch has read, which are not read again."""
    for index, source in enumerate(config.sources):
        spec = data_spec(config, source)
        if source.harbor is not None:
            try:
                read_tasks(source.name, harbor_spec(source.harbor))
            except ConfigError as error:
                yield f"sources[{index}].harbor", str(error)
        if spec is None:
            continue
        try:
            data = open_data(source.name, spec)
            if (checked or {}).get(source.name) != data.digest():
                data.check(None if spec.max_prompt_tokens is None else _Counter(config))
        except (ConfigError, WeightsError) as error:
            yield f"sources[{index}].{source.kind}", str(error)
    for index, suite in enumerate(config.eval.suites if config.eval else ()):
        try:
            open_suite(suite, Path())
        except (ConfigError, WeightsError) as error:
            yield f"eval.suites[{index}]", str(error)


class _Counter:
    """Tokens of a prompt as single_turn sends it: the most that any policy of the run needs."""

    def __init__(self, config: RunConfig) -> None:
        self._renderers = [
            _load_renderer(init) for init in {m.init for m in config.models.values()}
        ]

    def __call__(self, prompts: Sequence[object]) -> list[int]:
        return [max(_count(one, renderer) for renderer in self._renderers) for one in prompts]


def _load_renderer(init: str) -> Renderer:
    try:
        from penstock.gateway.renderer import Renderer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"max_prompt_tokens needs {error.name}; run: pip install 'penstock-rl[tokens]'"
        ) from None
    from penstock.trainer.model_folders import initial_folder

    with initial_folder(init, seed=0) as folder:
        return Renderer.load(folder)


def _count(prompt: object, renderer: Renderer) -> int:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return len(renderer.encode(renderer.render(cast(list[JsonObject], messages))))
    except BadRequest as error:
        raise ConfigError(f"{error}, such as {str(messages)[:100]}") from None
