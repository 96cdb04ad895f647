# SPDX-License-Identifier: Apache-2.0
"""`penstock report` as a shell sees it, against a service that has one to give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.contract.dataflow_server import serving
from tests.unit.dataflow.report.report_factories import figures

from penstock.cli.main import main
from penstock.config import demo_config
from penstock.dataflow.report.build import make_report
from penstock.dataflow.report.figures import BalanceSettings
from penstock.dataflow.report.shape import BalanceReport
from penstock.fleet.run_folder import RunFolder
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.routes import Call, Route
from penstock.wire.server import build_app

SCHEMA = Path(__file__).parents[3] / "docs" / "report.schema.json"


async def _report(call: Call) -> BalanceReport:
    return make_report(figures(), BalanceSettings(), 1101.0)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was started once."""
    made = RunFolder(tmp_path / "outputs" / "reverse")
    made.write_config(demo_config(0))
    made.allocate_endpoints(tmp_path, ())
    Signer.create(made.keys, "reverse")
    return made


@pytest.fixture
def running(folder: RunFolder) -> Iterator[RunFolder]:
    """The same, with a dataflow that answers for it."""
    route = Route(
        method="GET",
        path="/v1/report",
        handler=_report,
        roles=frozenset({Role.READER}),
        summary="Balance report.",
        response=BalanceReport,
    )
    verifier = Signer.create(folder.keys, "reverse").verifier(Audience.DATAFLOW)
    with serving(build_app([route], verifier, title="report")) as url:
        endpoints = folder.path / "run" / "endpoints.json"
        known = json.loads(endpoints.read_text())
        endpoints.write_text(json.dumps({**known, "dataflow": url}))
        with folder.locked():
            yield folder


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


def test_people_get_text(capsys: pytest.CaptureFixture[str], running: RunFolder) -> None:
    code, out, _ = run(capsys, "report", str(running.path))
    assert code == 0
    assert "SCALE UP" in out and "policy policy" in out and "time since" in out


def test_programs_get_json_of_the_schema(
    capsys: pytest.CaptureFixture[str], running: RunFolder
) -> None:
    code, out, _ = run(capsys, "report", str(running.path), "--json")
    assert code == 0
    validator: Any = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    value = json.loads(out.splitlines()[-1])
    validator.validate(value)
    assert value["decision"]["branch"] == "scale_up" and value["schema_version"] == 1


def test_a_run_that_is_not_running_has_no_report(
    capsys: pytest.CaptureFixture[str], folder: RunFolder
) -> None:
    code, out, err = run(capsys, "report", str(folder.path), "--json")
    assert code == 1
    assert "not running" in err and "error" in json.loads(out)


def test_an_unreachable_dataflow_is_an_error(
    capsys: pytest.CaptureFixture[str], folder: RunFolder
) -> None:
    with folder.locked():
        code, _, err = run(capsys, "report", str(folder.path))
    assert code == 1 and "its dataflow returned no report" in err
