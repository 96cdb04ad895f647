# SPDX-License-Identifier: Apache-2.0
"""Tasks from files and data sets: the same rows give the same tasks in every format."""

from __future__ import annotations

import csv
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.dataflow.data_packages import import_datasets, parquet, pyarrow

from penstock.dataflow.sources import (
    BadRows,
    DataSpec,
    Source,
    are_same_tasks,
    open_data,
    open_source,
)
from penstock.dataflow.sources.tables import WINDOW_ROWS
from penstock.errors import ConfigError

ROWS = [
    {"question": f'{n} "and", {n}\n=', "solution": str(2 * n), "level": "é"} for n in range(600)
]
COLUMNS: dict[str, str | None] = {"prompt": "question", "answer": "solution", "level": None}
Row = dict[str, Any]


def write_jsonl(path: Path, rows: list[Row]) -> None:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8-sig")


def write_csv(path: Path, rows: list[Row]) -> None:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: list[Row]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100)


def write_saved(path: Path, rows: list[Row]) -> None:
    datasets = import_datasets()
    datasets.Dataset.from_list(rows).save_to_disk(path, num_shards=3)


FORMATS: dict[str, Callable[[Path, list[Row]], None]] = {
    "a.jsonl": write_jsonl,
    "a.csv": write_csv,
    "a.parquet": write_parquet,
    "saved": write_saved,
}


def source_of(path: Path, **options: Any) -> Source:
    values: dict[str, Any] = {"columns": COLUMNS, **options}
    return open_source("train", DataSpec(path=str(path), has_prompt=True, **values))


def payload(source: Source, ordinal: int) -> Row:
    return source.task(ordinal, seed=0, workflow="single_turn").payload


@pytest.mark.parametrize("name", FORMATS)
def test_rows_become_tasks_in_any_order(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name, ROWS)
    spec = DataSpec(path=str(tmp_path / name), has_prompt=True, columns=COLUMNS)
    open_data("train", spec).check(lambda prompts: [0 for _ in prompts])
    source = source_of(tmp_path / name)
    edges = [WINDOW_ROWS - 1, WINDOW_ROWS, 99, 100, 101, 0, 599, 598, 350, 351, 600, 1201]
    for ordinal in [*range(120), *edges]:
        row = ROWS[ordinal % len(ROWS)]
        expected = {"prompt": row["question"], "answer": row["solution"]}
        assert payload(source, ordinal) == expected, ordinal


@pytest.mark.parametrize("name", FORMATS)
def test_a_changed_data_set_has_another_digest(tmp_path: Path, name: str) -> None:
    for folder in ("one", "two", "other"):
        (tmp_path / folder).mkdir()
        rows = ROWS if folder != "other" else [*ROWS[:-1], {**ROWS[-1], "solution": "0"}]
        FORMATS[name](tmp_path / folder / name, rows)
    one, two, other = (source_of(tmp_path / at / name).digest(0) for at in ("one", "two", "other"))
    assert are_same_tasks(one, two), "wherever it is stored"
    assert not are_same_tasks(one, other)
    renamed = source_of(tmp_path / "one" / name, columns={"prompt": "question"})
    assert not are_same_tasks(one, renamed.digest(0)), "tasks have other keys"


@pytest.mark.parametrize("name", FORMATS)
def test_a_limit_repeats_the_first_rows(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name, ROWS)
    source = source_of(tmp_path / name, limit=3)
    assert [payload(source, ordinal)["answer"] for ordinal in range(5)] == ["0", "2", "4", "0", "2"]
    assert source.limit is None


@pytest.mark.parametrize("name", FORMATS)
def test_a_column_that_does_not_exist_is_named(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name, ROWS)
    with pytest.raises(ConfigError, match=r"quesion") as caught:
        open_data(
            "train", DataSpec(path=str(tmp_path / name), columns={"prompt": "quesion"})
        ).check()
    assert "question, solution, level" in str(caught.value)


def test_a_column_may_have_two_keys_and_replace_another(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "old", "question": "new"}])
    source = source_of(tmp_path / "a.jsonl", columns={"prompt": "question", "question": "question"})
    assert payload(source, 0) == {"prompt": "new", "question": "new"}


def test_messages_and_nested_values_survive_parquet(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"prompt": [{"role": "user", "content": "a"}], "tests": {"in": [1, 2], "out": 1.5}},
        {
            "prompt": [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}],
            "tests": None,
        },
    ]
    write_parquet(tmp_path / "a.parquet", rows)
    source = source_of(tmp_path / "a.parquet", columns={})
    assert [payload(source, ordinal) for ordinal in range(2)] == rows


@pytest.mark.parametrize("where", ["penstock.tasks.reverse", "a.jsonl"])
def test_a_source_may_have_its_own_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("a.jsonl"), ROWS)
    own, plain = open_source("a", where, workflow="mine:run"), open_source("a", where)
    tasks = [source.task(0, seed=0, workflow="single_turn") for source in (own, plain)]
    assert [task.workflow for task in tasks] == ["mine:run", "single_turn"]
    assert tasks[0].key != tasks[1].key


def test_a_file_that_is_replaced_does_not_change_a_run(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ROWS)
    source = source_of(path)
    write_jsonl(tmp_path / "new.jsonl", ROWS[::-1])
    (tmp_path / "new.jsonl").replace(path)
    assert payload(source, 5)["answer"] == "10"


def test_a_file_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """Python objects alone; pyarrow reads in batches of a window."""
    rows = [{"prompt": "word " * 2000, "n": n} for n in range(2_000)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_parquet(tmp_path / "a.parquet", rows)
    for name in ("a.jsonl", "a.parquet"):
        tracemalloc.start()
        data = open_data("train", DataSpec(path=str(tmp_path / name), has_prompt=True))
        data.check()
        assert data.payload(1_999)["n"] == 1_999
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 8 << 20, "the file has 20 MB"


def test_a_split_is_chosen(tmp_path: Path) -> None:
    datasets = import_datasets()
    splits = {
        "train": datasets.Dataset.from_list(ROWS),
        "test": datasets.Dataset.from_list(ROWS[7:9]),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert payload(source_of(tmp_path / "saved"), 0)["answer"] == "0"
    assert payload(source_of(tmp_path / "saved", split="test"), 3)["answer"] == "16"
    with pytest.raises(
        ConfigError, match=r"no split 'tset'; set data.split to one of: train, test"
    ):
        source_of(tmp_path / "saved", split="tset")
    with pytest.raises(ConfigError, match=r"remove data.name"):
        source_of(tmp_path / "saved", name="main")


def test_one_split_has_no_others(tmp_path: Path) -> None:
    write_saved(tmp_path / "saved", ROWS)
    with pytest.raises(ConfigError, match=r"single split; remove data.split \(test\)"):
        source_of(tmp_path / "saved", split="test")


def test_a_damaged_one_is_named(tmp_path: Path) -> None:
    write_saved(tmp_path / "saved", ROWS)
    (first, *_) = sorted((tmp_path / "saved").glob("*.arrow"))
    first.write_bytes(first.read_bytes()[:50])
    with pytest.raises(ConfigError, match=r"saved cannot be read.*copy it again"):
        source_of(tmp_path / "saved")


def test_a_folder_of_files_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as `hf download --local-dir` leaves."""
    datasets = import_datasets()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "copied" / "data").mkdir(parents=True)
    write_parquet(tmp_path / "copied" / "data" / "train-00000.parquet", ROWS)
    source = source_of(tmp_path / "copied")
    assert payload(source, 7)["answer"] == "14"


def test_a_folder_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"no such folder; a path is relative to"):
        source_of(Path("/no/such"))


def test_a_bad_row_met_during_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": NaN}\n')
    source = source_of(tmp_path / "a.jsonl", columns={})
    with pytest.raises(ConfigError, match=r"source 'train': .*a.jsonl:3: prompt: nan is not a"):
        payload(source, 1)
    with pytest.raises(BadRows):
        open_data("train", DataSpec(path=str(tmp_path / "a.jsonl"), has_prompt=True)).check()
