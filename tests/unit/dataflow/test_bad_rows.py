# SPDX-License-Identifier: Apache-2.0
"""A hundred bad rows, of every kind there is: each is named by its file and its row."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.dataflow.data_packages import import_datasets, parquet, pyarrow

from penstock.dataflow.sources import BadRow, BadRowKind, BadRows, DataSpec, open_data
from penstock.dataflow.sources.bad_rows import NUM_LISTED
from penstock.errors import ConfigError

K = BadRowKind
GOOD = b'{"prompt": "2 + 2 =", "answer": "4"}'
JSONL: dict[BadRowKind, tuple[bytes, ...]] = {
    K.INVALID_JSON: (
        b"{'prompt': 'a'}",
        b'{"prompt": "a",}',
        b'{"prompt": "a"} {"prompt": "b"}',
        b"prompt: a",
        b'{"prompt": tru}',
        b'{"prompt": "tab\tinside"}',
        b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000,
    ),
    K.NOT_AN_OBJECT: (b'["a"]', b'"a"', b"3", b"null", b"true", b"[]"),
    K.INVALID_UTF8: (b'{"prompt": "caf\xe9"}', b'{"prompt": "\xff\xfe"}', b"\x80", b'{"\xc3": 1}'),
    K.MISSING_COLUMN: (b'{"question": "a"}', b"{}", b'{"Prompt": "a"}', b'{"answer": "4"}'),
    K.NULL_PROMPT: (b'{"prompt": null}', b'{"prompt": null, "answer": "4"}'),
    K.EMPTY_PROMPT: (
        b'{"prompt": ""}',
        b'{"prompt": "  "}',
        b'{"prompt": []}',
        b'{"prompt": "\\n"}',
    ),
    K.PROMPT_TYPE: (
        b'{"prompt": 3}',
        b'{"prompt": 2.5}',
        b'{"prompt": true}',
        b'{"prompt": {"text": "a"}}',
        b'{"prompt": {"role": "user", "content": "a"}}',
    ),
    K.CHAT_SHAPE: (
        b'{"prompt": ["a"]}',
        b'{"prompt": [{"from": "human", "value": "a"}]}',
        b'{"prompt": [{"role": "human", "content": "a"}]}',
        b'{"prompt": [{"role": "user"}]}',
        b'{"prompt": [{"role": "user", "content": null}]}',
        b'{"prompt": [{"role": "user", "content": 3}]}',
        b'{"prompt": [{"content": "a"}]}',
        b'{"prompt": [{"role": "system", "content": "a"}, {}]}',
        b'{"prompt": [[{"role": "user", "content": "a"}]]}',
        b'{"prompt": [{"role": "user", "content": [{"type": "text"}]}]}',
    ),
    K.NOT_FINITE: (
        b'{"prompt": "a", "score": NaN}',
        b'{"prompt": "a", "score": Infinity}',
        b'{"prompt": "a", "score": -Infinity}',
        b'{"prompt": "a", "score": [1, {"b": NaN}]}',
        b'{"prompt": "a", "score": 1e999}',
    ),
    K.HUGE_INTEGER: (
        b'{"prompt": "a", "n": 18446744073709551616}',
        b'{"prompt": "a", "n": -9223372036854775809}',
    ),
    K.INVALID_TEXT: (b'{"prompt": "\\ud800"}', b'{"prompt": "a", "b": ["\\udfff"]}'),
    K.LONG_PROMPT: (
        *(b'{"prompt": "%s"}' % (b"word " * num) for num in range(20, 24)),
        b'{"prompt": [{"role": "user", "content": "%s"}]}' % (b"word " * 50),
    ),
    K.TRUNCATED: (b'{"prompt": "the end is',),
}
CSV: dict[BadRowKind, tuple[bytes, ...]] = {
    K.FIELD_COUNT: (b"a", b"a,b,c", b"a,b,", b'"x, y",b,c', b"a,b,c,d,e"),
    K.INVALID_CSV: (b'"a"b,c', b'"a" ,c', b'x,"a"b'),
    K.INVALID_UTF8: (b"caf\xe9,b", b"a,\xff", b'"\xc3\n",b'),
    K.EMPTY_PROMPT: (b",4", b"  ,4", b'"",4'),
    K.LONG_PROMPT: (b"word " * 40 + b",4", b'"' + b"word\n" * 40 + b'",4'),
    K.TRUNCATED: (b'"the end is,4',),
}
WHEN = datetime.date(2026, 11, 17)
PARQUET: dict[BadRowKind, tuple[dict[str, Any], ...]] = {
    K.NULL_PROMPT: ({"prompt": None}, {"prompt": None, "answer": "4"}),
    K.EMPTY_PROMPT: ({"prompt": ""}, {"prompt": "\t"}),
    K.NOT_FINITE: (
        {"prompt": "a", "score": float("nan")},
        {"prompt": "a", "score": float("inf")},
        {"prompt": "a", "score": float("-inf")},
    ),
    K.UNSUPPORTED_TYPE: (
        {"prompt": "a", "day": WHEN},
        {"prompt": "a", "image": b"\x89PNG"},
        {"prompt": "a", "at": datetime.datetime(2026, 11, 17)},
        {"prompt": "a", "took": datetime.timedelta(1)},
        {"prompt": "a", "parts": [b"x"]},
    ),
    K.INVALID_UTF8: ({"prompt": b"caf\xe9"}, {"prompt": b"\xff"}),
    K.LONG_PROMPT: ({"prompt": "word " * 30}, {"prompt": "word " * 31}),
}
SAVED: dict[BadRowKind, tuple[list[dict[str, str | None]] | None, ...]] = {
    K.NULL_PROMPT: (None,),
    K.EMPTY_PROMPT: ([],),
    K.CHAT_SHAPE: (
        [{"role": "human", "content": "a"}],
        [{"role": "user", "content": None}],
        [{"role": None, "content": "a"}],
        [{"role": "system", "content": "a"}, {"role": "", "content": "a"}],
    ),
    K.LONG_PROMPT: tuple([{"role": "user", "content": "word " * n}] for n in range(30, 35)),
}
"""Prompts of a data set that `save_to_disk` writes."""
SCHEMA = pyarrow.schema(
    [
        ("prompt", pyarrow.binary()),
        ("answer", pyarrow.string()),
        ("score", pyarrow.float64()),
        ("day", pyarrow.date32()),
        ("image", pyarrow.binary()),
        ("at", pyarrow.timestamp("us")),
        ("took", pyarrow.duration("s")),
        ("parts", pyarrow.list_(pyarrow.binary())),
    ]
)


def words(prompts: Sequence[object]) -> list[int]:
    """A tokenizer for which every word is one token."""
    return [len(str(prompt).split()) for prompt in prompts]


Expected = dict[str, BadRowKind]
"""By place."""


def write_jsonl(folder: Path) -> tuple[Path, Expected]:
    path, lines = folder / "tasks.jsonl", [GOOD, b""]
    expected: Expected = {}
    for kind, rows in JSONL.items():
        for row in rows:
            expected[f"{path}:{len(lines) + 1}"] = kind
            lines += [row] if kind is K.TRUNCATED else [row, GOOD]
    path.write_bytes(b"\n".join(lines))
    return path, expected


def write_csv(folder: Path) -> tuple[Path, Expected]:
    path, text = folder / "tasks.csv", b"prompt,answer\n"
    expected: Expected = {}
    for kind, rows in CSV.items():
        for row in rows:
            line = text.count(b"\n") + 1
            expected[f"{path}:{line}"] = kind
            text += row if kind is K.TRUNCATED else row + b'\n"two\nlines",b\n'
    path.write_bytes(text)
    return path, expected


def write_parquet(folder: Path) -> tuple[Path, Expected]:
    path = folder / "tasks.parquet"
    expected: Expected = {}
    rows: list[dict[str, Any]] = []
    for kind, bad in PARQUET.items():
        for row in bad:
            rows += [{"prompt": "good"}, row]
            expected[f"{path} row {len(rows)}"] = kind
    encoded = [
        row | {"prompt": p.encode() if isinstance(p := row["prompt"], str) else p} for row in rows
    ]
    table = pyarrow.Table.from_pylist(encoded, SCHEMA)
    prompts = table["prompt"].combine_chunks().view(pyarrow.string())  # unchecked, as some writers
    table = table.set_column(0, "prompt", prompts)
    parquet.write_table(table, path, row_group_size=7)
    return path, expected


def write_saved(folder: Path) -> tuple[Path, Expected]:
    datasets = import_datasets()
    path = folder / "saved"
    expected: Expected = {}
    good = [{"role": "user", "content": "2 + 2 ="}]
    rows: list[dict[str, Any]] = []
    for kind, prompts in SAVED.items():
        for prompt in prompts:
            rows += [{"prompt": good}, {"prompt": prompt}]
            expected[f"{path} row {len(rows)}"] = kind
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return path, expected


WRITERS = [write_jsonl, write_csv, write_parquet, write_saved]


def found_in(path: Path, **options: Any) -> tuple[BadRow, ...]:
    spec = DataSpec(path=str(path), has_prompt=True, max_prompt_tokens=18, **options)
    with pytest.raises(BadRows) as caught:
        open_data("train", spec).check(words)
    return caught.value.rows


def test_a_hundred_bad_rows_are_each_named(tmp_path: Path) -> None:
    all_expected: Counter[BadRowKind] = Counter()
    for write in WRITERS:
        path, expected = write(tmp_path)
        rows = found_in(path)
        assert {row.place: row.kind for row in rows} == expected
        assert all(str(row).startswith(f"{row.place}: ") for row in rows)
        assert all("; " in str(row) for row in rows), "says what to do"
        all_expected.update(expected.values())
    assert all_expected.total() >= 100
    assert len(all_expected) >= 12
    assert {*all_expected} == {*BadRowKind} - {K.DUPLICATE_COLUMN}, "which is of a header"


def test_one_message_lists_the_first_and_counts_the_rest(tmp_path: Path) -> None:
    path, expected = write_jsonl(tmp_path)
    spec = DataSpec(path=str(path), has_prompt=True, max_prompt_tokens=18)
    with pytest.raises(BadRows) as caught:
        open_data("train", spec).check(words)
    first, *listed = str(caught.value).splitlines()
    assert first == f"source 'train': {len(expected)} bad rows"
    assert [line.split(": ")[0].strip() for line in listed[:-1]] == [*expected][:NUM_LISTED]
    assert listed[-1] == f"  … and {len(expected) - NUM_LISTED} more"


def test_the_check_ends_early_when_all_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("[]\n" * 3000)
    with pytest.raises(BadRows, match=r"1,024 bad rows among the first 1,024 of 3,000 \(the rest"):
        open_data("train", DataSpec(path=str(path))).check()


def test_rows_that_no_workflow_of_ours_reads_need_no_prompt(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"board": 3}\n{"prompt": 7}\n')
    open_data("train", DataSpec(path=str(path))).check()
    with pytest.raises(BadRows, match=r"tasks.jsonl:1: prompt: is missing; .* are: board; name"):
        open_data("train", DataSpec(path=str(path), has_prompt=True)).check()


def no_header(path: Path) -> None:
    path.write_text("")


def header_alone(path: Path) -> None:
    path.write_text("prompt,answer\n")


def twice(path: Path) -> None:
    path.write_text("prompt,answer,prompt\na,b,c\n")


def nameless(path: Path) -> None:
    path.write_text("prompt,,answer\na,b,c\n")


def other_columns(path: Path) -> None:
    path.write_text("question;answer\na;b\n")


def half(path: Path) -> None:
    parquet.write_table(pyarrow.table({"prompt": ["a"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-100])


def damaged(path: Path) -> None:
    texts = [f"{n:x}" * 50 for n in range(1000)]
    parquet.write_table(pyarrow.table({"prompt": texts}), path, compression="zstd")
    data = bytearray(path.read_bytes())
    data[200:400] = b"\xaa" * 200
    path.write_bytes(data)


def same_names(path: Path) -> None:
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"]), path)


def no_rows(path: Path) -> None:
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], "string")}), path)


@pytest.mark.parametrize(
    ("write", "name", "expected"),
    [
        (no_header, "t.csv", "is empty; write a header"),
        (header_alone, "t.csv", "has no rows; write them below the header"),
        (twice, "t.csv", 't.csv:1: the header has the column "prompt" twice; rename'),
        (nameless, "t.csv", "t.csv:1: column 2 of the header has no name"),
        (other_columns, "t.csv", "prompt is missing; the columns are: question;answer; name the"),
        (no_header, "t.jsonl", "has no rows; write one JSON object per line"),
        (no_header, "t.parquet", "cannot be read as Parquet"),
        (half, "t.parquet", "it may be truncated or damaged: write or copy it again"),
        (damaged, "t.parquet", "it may be truncated or damaged: write or copy it again"),
        (no_rows, "t.parquet", "has no rows"),
        (same_names, "t.parquet", "has two columns of one name"),
        (Path.mkdir, "t.csv", "is not a file"),
        (None, "t.csv", "No such file or directory; a path is relative to the working directory"),
        (None, "t.jsonl", "No such file or directory; a path is relative to the working directory"),
        (None, "t.parquet", "No such file; a path is relative to the working directory"),
    ],
)
def test_a_file_that_cannot_be_read_at_all(
    tmp_path: Path, write: Callable[[Path], None] | None, name: str, expected: str
) -> None:
    path = tmp_path / name
    if write is not None:
        write(path)
    with pytest.raises(ConfigError) as caught:
        open_data("train", DataSpec(path=str(path), has_prompt=True)).check()
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert "source 'train'" in str(caught.value)


def test_a_dropped_column_may_hold_anything(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a"], "day": [WHEN]}), path)
    with pytest.raises(BadRows, match=r"row 1: day: a value of type date .*columns: \{day: null\}"):
        open_data("train", DataSpec(path=str(path))).check()
    data = open_data("train", DataSpec(path=str(path), columns={"day": None}))
    data.check()
    assert data.payload(0) == json.loads('{"prompt": "a"}')
