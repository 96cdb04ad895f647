# SPDX-License-Identifier: Apache-2.0
"""Exported trajectories: valid for other programs, and read back token for token."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path
from typing import Any

import atif
import pytest
from tests.unit.audit.ledgers import Run as ServiceRun
from tests.unit.audit.ledgers import small_config, some_failures
from tests.unit.cli.test_commands import run_main
from tests.unit.gateway.chatml import END, START, VOCAB_SIZE, write_snapshot
from tests.unit.runs.export.random_trajectories import random_trajectory, recorded
from tests.unit.runs.test_history import keeping, trained

from penstock.config import demo_config
from penstock.errors import ConfigError, StoreError
from penstock.fleet.run_folder import RunFolder
from penstock.gateway.renderer import Renderer
from penstock.runs.decoded import Decoder
from penstock.runs.export.atif_document import from_json, to_document, to_json
from penstock.runs.export.prompt_parts import PromptReader
from penstock.runs.export.trajectories import export_trajectories, read_trajectories
from penstock.runs.export.trajectory_table import from_row, table_schema, to_row
from penstock.runs.history import open_run
from penstock.types import SamplingSpec, ToolUse, Trajectory, Turn, token_ids

NUM_DOCUMENTS = 1000
TOOLS = """{%- if tools %}{{- '<|im_start|>system\\n' + messages[0].content + '<tools>\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
{{- '</tools><|im_end|>\\n' }}{%- set messages = messages[1:] %}{%- endif %}"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run whose initial model has a tokenizer with a ChatML template."""
    write_snapshot(tmp_path / "model")
    config = demo_config(0)
    model = config.models["policy"].model_copy(update={"init": str(tmp_path / "model")})
    found = RunFolder(tmp_path / "run")
    found.write_config(config.model_copy(update={"models": {"policy": model}}))
    return found


def test_a_thousand_documents_are_valid_and_come_back_token_for_token(folder: RunFolder) -> None:
    draw, reader = random.Random(7), PromptReader(Decoder(folder))
    num_turns = num_texts = 0
    for number in range(NUM_DOCUMENTS):
        wanted = random_trajectory(draw, number, VOCAB_SIZE)
        texts = reader.read(wanted)
        assert not texts.problem
        text = to_json(to_document(recorded(wanted, folder), texts))
        document = atif.Trajectory.model_validate_json(text)
        assert document.schema_version == "ATIF-v1.8"
        calls = [step for step in document.steps if step.source == "agent"]
        assert len(calls) == len(wanted.turns)
        for step, turn in zip(calls, wanted.turns, strict=True):
            assert step.metrics is not None
            assert token_ids(step.metrics.completion_token_ids or ()) == turn.sampled_ids
            assert step.model_name is not None and step.model_name.startswith("policy@1.")
            num_texts += bool(step.message)
        assert from_json(text, origin="here") == wanted
        num_turns += len(calls)
    assert num_turns > NUM_DOCUMENTS and num_texts > NUM_DOCUMENTS, "the cases say something"


def test_rows_of_a_table_come_back_token_for_token(folder: RunFolder) -> None:
    import pyarrow as pa

    draw, reader = random.Random(8), PromptReader(Decoder(folder))
    wanted = [random_trajectory(draw, number, VOCAB_SIZE) for number in range(200)]
    rows = [to_row(recorded(one, folder), reader.read(one)) for one in wanted]
    table = pa.Table.from_pylist(rows, schema=table_schema())
    assert [from_row(row, origin="here") for row in table.to_pylist()] == wanted
    assert table["values"][0].as_py() == [{"name": "quality", "value": 0.5}]


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (Trajectory, ()),
        (Turn, ("turns",)),
        (ToolUse, ("tool_uses",)),
        (SamplingSpec, ("turns", "sampling")),
    ],
)
def test_the_table_has_a_column_for_every_field(kind: Any, path: tuple[str, ...]) -> None:
    """Arrow drops a value that its schema does not name."""
    import pyarrow as pa

    found: Any = pa.struct(list(table_schema()))
    for name in path:
        found = found.field(name).type
        found = found.value_type if pa.types.is_list(found) else found
    known = {found.field(at).name for at in range(found.num_fields)}
    assert {field.name for field in dataclasses.fields(kind)} <= known


def test_system_prompt_tools_and_question_are_told_apart(tmp_path: Path) -> None:
    from tests.unit.gateway.chatml import TEMPLATE

    write_snapshot(tmp_path / "model", template=TOOLS + TEMPLATE)
    renderer = Renderer.load(tmp_path / "model")
    tool = {"type": "function", "function": {"name": "look"}}
    text = renderer.render(
        [{"role": "system", "content": "be kind"}, {"role": "user", "content": "go"}], tools=[tool]
    )
    from penstock.runs.export.prompt_parts import find_marks, split_prompt

    parts = split_prompt(text, find_marks(renderer), is_first=True)
    assert parts.system.startswith("be kind<tools>") and parts.tools == (tool,)
    assert parts.rest == "go"
    later = f"\n{START}user\nmore{END}\n{START}assistant\n"  # the model sampled the end itself
    assert split_prompt(later, find_marks(renderer), is_first=False).rest == "more"
    alone = renderer.render([{"role": "user", "content": "go"}])
    parts = split_prompt(alone, find_marks(renderer), is_first=True)
    assert (parts.system, parts.rest) == ("", f"{START}user\ngo")


def test_a_changed_document_is_refused(folder: RunFolder) -> None:
    draw, reader = random.Random(9), PromptReader(Decoder(folder))
    found = (random_trajectory(draw, number, VOCAB_SIZE) for number in range(99))
    wanted = next(one for one in found if any(t.parent >= 0 and t.prompt_ids for t in one.turns))
    text = to_json(to_document(recorded(wanted, folder), reader.read(wanted)))
    document = json.loads(text)
    at = next(at for at, turn in enumerate(wanted.turns) if turn.parent >= 0)
    step = [step for step in document["steps"] if step["source"] == "agent"][at]
    step["metrics"]["prompt_token_ids"][0] += 1
    with pytest.raises(StoreError, match=r"does not continue turn \d"):
        from_json(json.dumps(document), origin="here")
    del document["extra"]
    with pytest.raises(StoreError, match="not one of penstock"):
        from_json(json.dumps(document), origin="here")
    with pytest.raises(StoreError, match="not an ATIF document: schema_version"):
        from_json("{}", origin="here")


# --- whole runs ------------------------------------------------------------------------------


async def test_each_format_of_a_recorded_run_holds_the_same_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = ServiceRun(tmp_path / "run", small_config(), choose=some_failures)
    await service.start()
    for _ in range(3):
        await service.step()
    service.close()
    with open_run(tmp_path / "run") as run:
        wanted = {one.row_id: one.payload for one in run.trajectories()}
    for name, words in {
        "out.parquet": (),
        "dataset": (),
        "out.jsonl": (),
        "documents": ("--format", "atif"),
    }.items():
        target = tmp_path / name
        words = ("export", "trajectories", str(tmp_path / "run"), "--to", str(target), *words)
        code, out, err = run_main(capsys, *words, "--json")
        assert code == 0, err
        assert json.loads(out.splitlines()[-1])["written"] == len(wanted)
        assert {one.row_id: one for one in read_trajectories(target)} == wanted
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".")], "left behind"
        code, _, err = run_main(capsys, *words)
        assert code == 1 and "exists, and an export replaces nothing" in err
    import datasets

    datasets.disable_progress_bars()
    loaded: Any = datasets.load_dataset(
        str(tmp_path / "dataset"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert set(loaded["row_id"]) == set(wanted)
    one = export_trajectories(tmp_path / "run", tmp_path / "two.parquet", steps=2)
    assert one.num_written == 12


async def test_freed_trajectories_are_counted_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = await trained(tmp_path / "run", keeping("sample(1e-9)"))
    service.close()
    words = ("export", "trajectories", str(tmp_path / "run"), "--to", str(tmp_path / "x.parquet"))
    code, out, err = run_main(capsys, *words, "--json")
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert found["without_tokens"] > 0 and "dataflow.keep" in err
    assert len([*read_trajectories(tmp_path / "x.parquet")]) == found["written"] > 0


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("x.parquet", "atif", "name a file that ends in .jsonl, or a folder"),
        ("x", "parquet", "name a file that ends in .parquet"),
        ("x.jsonl", "dataset", "name a folder"),
        ("x", "csv", "use one of parquet, dataset, atif"),
    ],
)
def test_a_format_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, format: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        export_trajectories(tmp_path, tmp_path / name, format=format)


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no trajectories"):
        next(read_trajectories(tmp_path / "missing"))
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(StoreError, match="not a trajectory that penstock exported"):
        next(read_trajectories(tmp_path / "other.parquet"))
