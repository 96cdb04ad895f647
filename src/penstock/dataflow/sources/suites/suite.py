# SPDX-License-Identifier: Apache-2.0
"""Opens a suite: all its questions, each with an id, and the reward that scores the answers.

Owns where the rows come from, ids and the digest. A suite is small and read as a whole. A row that
cannot be used is an error: results are compared only over the same questions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from penstock.config.evaluation import SuiteConfig
from penstock.dataflow.sources.bad_rows import BadRow, BadRowKind
from penstock.dataflow.sources.harbor import HarborSpec, read_tasks
from penstock.dataflow.sources.opening import (
    LOCAL_PREFIXES,
    DataSet,
    DataSpec,
    open_data,
    open_source,
)
from penstock.dataflow.sources.row_checks import check_prompt, check_values
from penstock.dataflow.sources.source import derive_seed
from penstock.dataflow.sources.suites.known import KNOWN_SUITES, KnownSuite
from penstock.dataflow.sources.suites.suite_rows import SuiteRow, clean_id
from penstock.errors import ConfigError
from penstock.plugins import suggest, unknown
from penstock.scorers import SCORERS, reward_of
from penstock.tasks.harbor import KEY as HARBOR
from penstock.types import JsonObject

DATA_FILES = (".jsonl", ".parquet", ".csv")
HARBOR_SCORER = "harbor"
"""The verifier of each task scores it."""
_NEEDED = {"code": "tests"}
"""The column that a scorer needs; most need `answer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A suite, open."""

    name: str
    tasks: tuple[JsonObject, ...]
    """Payloads, each with `question` (its id), `prompt` and what its scorer needs."""
    digest: str
    """Of the questions, their order, and what scores them."""
    scorer: str
    """A name of `penstock.scorers`, `harbor`, or the user's function; empty: as in training."""
    reward: str
    """As the run file names it; empty: as in training, and for Harbor tasks, which score
    themselves."""


def open_suite(suite: SuiteConfig, folder: Path) -> Suite:
    """All questions of a suite. `folder`: where relative paths start. Raises ConfigError."""
    try:
        scorer, reward = _scoring(suite)
        tasks = tuple(_limited(suite, _checked(_tasks(suite, folder), scorer)))
    except ConfigError as error:
        raise ConfigError(f"suite {suite.name!r}: {error}") from None
    if not tasks:
        raise ConfigError(f"suite {suite.name!r} has no questions; name another file")
    text = json.dumps([tasks, scorer, reward], sort_keys=True, ensure_ascii=False)
    digest = blake3(text.encode(errors="replace")).hexdigest()
    return Suite(name=suite.name, tasks=tasks, digest=digest, scorer=scorer, reward=reward)


def _limited(suite: SuiteConfig, tasks: Iterator[JsonObject]) -> Iterator[JsonObject]:
    for number, task in enumerate(tasks):
        if suite.limit is not None and number >= suite.limit:
            return
        yield task


def _scoring(suite: SuiteConfig) -> tuple[str, str]:
    """Scorer and reward function."""
    known = KNOWN_SUITES.get(suite.name)
    if suite.harbor is not None:
        if suite.scorer or suite.reward:
            raise ConfigError(
                "the verifier of each Harbor task scores it; remove scorer and reward"
            )
        return HARBOR_SCORER, ""
    if known is None and suite.task is None and suite.file is None:
        raise ConfigError(
            unknown("suite", suite.name, KNOWN_SUITES)
            + "; for a suite that penstock does not know, set file, task or harbor"
        )
    if suite.reward is not None:
        return suite.reward, suite.reward
    scorer = suite.scorer or (known.scorer if known and suite.task is None else None)
    if scorer is None and suite.task is not None:
        return "", ""
    if scorer is None:
        raise ConfigError(
            f"nothing scores its answers; set scorer: {' | '.join(SCORERS)}, or reward"
        )
    if scorer not in SCORERS:
        fix = suggest(scorer, SCORERS, f"use {' | '.join(SCORERS)}")
        raise ConfigError(f"unknown scorer {scorer!r}; {fix}, or name a function as reward")
    return scorer, reward_of(scorer)


PATH_KEY = "the suite's file (or --suite)"
Placed = tuple[JsonObject, str]
"""A payload, and where it comes from."""


def _tasks(suite: SuiteConfig, folder: Path) -> Iterator[Placed]:
    known = KNOWN_SUITES.get(suite.name)
    if suite.harbor is not None:
        for payload in read_tasks(suite.name, HarborSpec(path=str(folder / suite.harbor))):
            yield {"question": payload[HARBOR]["name"], "answer": "", **payload}, suite.harbor
    elif suite.task is not None:
        yield from _module_tasks(suite, suite.task)
    elif known is not None:
        data = open_data(suite.name, _known_spec(suite, known, folder))
        yield from _known_tasks(suite.name, known, data)
    else:
        assert suite.file is not None, "`_scoring` refuses a suite without rows"
        data = open_data(suite.name, _file_spec(suite.file, folder))
        yield from _own_tasks(suite.name, data)


def _module_tasks(suite: SuiteConfig, module: str) -> Iterator[Placed]:
    """Tasks of a module under a separate seed, so that training does not see the same."""
    if suite.limit is None:
        raise ConfigError(f"{module} has no last task; set limit to the number of questions")
    source = open_source(suite.name, module)
    seed = derive_seed("suite", suite.name)
    for ordinal in range(suite.limit):
        payload = source.task(ordinal, seed=seed, workflow="").payload
        yield {"question": f"{suite.name}-{ordinal + 1}", **payload}, f"{module} {ordinal}"


def _known_tasks(name: str, known: KnownSuite, data: DataSet) -> Iterator[Placed]:
    for index in range(len(data)):
        row = SuiteRow(data.row(index), data.place(index))
        made = known.convert(row)
        if made is not None:
            found = next((row.values[key] for key in known.ids if key in row.values), None)
            id = f"{name}-{index + 1}" if found is None else clean_id(found)
            yield {"question": id, **made}, row.place


def _own_tasks(name: str, data: DataSet) -> Iterator[Placed]:
    """The user's rows: `prompt`, what the scorer needs, and an id under `question` or `id`."""
    for index in range(len(data)):
        row = data.payload(index)
        id = row.get("question", row.get("id"))
        question = f"{name}-{index + 1}" if id is None else clean_id(id)
        yield {**row, "question": question}, data.place(index)


def _known_spec(suite: SuiteConfig, known: KnownSuite, folder: Path) -> DataSpec:
    if suite.file is not None:
        spec = _file_spec(suite.file, folder)
        is_file = spec.path.endswith(DATA_FILES)
        is_saved = (Path(spec.path) / "state.json").is_file()
        is_dict = (Path(spec.path) / "dataset_dict.json").is_file()
        if is_file or is_saved:
            return spec
        config = known.config if spec.path == known.hub or not is_dict else None
        return replace(spec, name=config, split=known.split)
    if not known.hub:
        raise ConfigError(
            "its data set on the Hub needs a script that `datasets` no longer runs; download its "
            ".jsonl file and name it under file"
        )
    return DataSpec(path=known.hub, name=known.config, split=known.split, path_key=PATH_KEY)


def _file_spec(file: str, folder: Path) -> DataSpec:
    """A file or folder, relative to `folder`; else a data set of the Hub."""
    local = folder / Path(file).expanduser()
    is_local = file.endswith(DATA_FILES) or file.startswith(LOCAL_PREFIXES) or local.is_dir()
    return DataSpec(path=str(local.absolute()) if is_local else file, path_key=PATH_KEY)


def _checked(tasks: Iterator[Placed], scorer: str) -> Iterator[JsonObject]:
    """Raise BadRow for a task that cannot be asked or scored, and for an id that stands twice."""
    needed = _NEEDED.get(scorer, "answer") if scorer in SCORERS else "prompt"
    places: dict[str, str] = {}
    for task, place in tasks:
        check_values(task, place)
        for column, user in (("prompt", "the model"), (needed, f"the scorer {scorer}")):
            if task.get(column) is None:
                text = f"is missing, and {user} needs it; the columns are: {', '.join(task)}; add "
                text = f"{text}it to every row"
                raise BadRow(place, BadRowKind.MISSING_COLUMN, text, column=column)
        check_prompt(task, place)
        id = str(task["question"])
        if id in places:
            raise ConfigError(
                f"the id {id!r} stands twice, at {places[id]} and {place}; give each question its "
                "own under `question`"
            )
        places[id] = place
        yield task
