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
from tests.unit.cli.sample_statuses import status
from tests.unit.dataflow.report.report_factories import figures

from penstock.cli.main import main
from penstock.config import demo_config
from penstock.dataflow.report.build import make_report
from penstock.dataflow.report.figures import BalanceSettings
from penstock.dataflow.report.shape import BalanceReport
from penstock.dataflow.service.operators.messages import Status
from penstock.fleet.run_folder import RunFolder
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.codec import encode_json
from penstock.wire.routes import Call, Route
from penstock.wire.server import build_app

SCHEMA = Path(__file__).parents[3] / "docs" / "report.schema.json"


async def _report(call: Call) -> BalanceReport:
    return make_report(figures(), BalanceSettings(), 1101.0)


async def _status(call: Call) -> Status:
    return status()


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
    routes = [
        Route(
            method="GET",
            path=path,
            handler=handler,
            roles=frozenset({Role.READER}),
            summary="For a test.",
            response=response,
        )
        for path, handler, response in (
            ("/v1/report", _report, BalanceReport),
            ("/v1/status", _status, Status),
        )
    ]
    verifier = Signer.create(folder.keys, "reverse").verifier(Audience.DATAFLOW)
    with serving(build_app(routes, verifier, title="report")) as url:
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


def test_a_run_that_never_ran_has_no_report(
    capsys: pytest.CaptureFixture[str], folder: RunFolder
) -> None:
    code, out, err = run(capsys, "report", str(folder.path), "--json")
    assert code == 1
    assert "has no report" in err and "error" in json.loads(out)


def test_an_ended_run_is_answered_from_its_stored_report(
    capsys: pytest.CaptureFixture[str], folder: RunFolder
) -> None:
    stored = make_report(figures(), BalanceSettings(), 1101.0)
    folder.report.write_bytes(encode_json(stored))
    code, out, err = run(capsys, "report", str(folder.path))
    assert code == 0 and "time since" in out
    assert "its last report is of 1970-01-01" in err
    code, out, _ = run(capsys, "report", str(folder.path), "--json")
    assert json.loads(out)["at"] == 1101.0
    folder.report.write_text("{")
    code, _, err = run(capsys, "report", str(folder.path))
    assert code == 1 and "the next start of the run replaces it" in err


def test_an_unreachable_dataflow_is_an_error(
    capsys: pytest.CaptureFixture[str], folder: RunFolder
) -> None:
    with folder.locked():
        code, _, err = run(capsys, "report", str(folder.path))
    assert code == 1 and "its dataflow returned no report" in err
