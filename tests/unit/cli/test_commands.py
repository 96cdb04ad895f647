# SPDX-License-Identifier: Apache-2.0
"""Commands as a shell sees them: exit codes, stdout, stderr. None of these starts a service."""

from __future__ import annotations

import builtins
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from keyword import iskeyword
from pathlib import Path

import pytest

from penstock.cli import main as command_line
from penstock.cli.main import COMMANDS, build, main
from penstock.config import demo_config, load
from penstock.config.schema import schema_text
from penstock.errors import Forbidden
from penstock.fleet.processes import cpu_s
from penstock.fleet.run_folder import FinishRecord, RunFolder
from penstock.wire.auth import Audience, Role, Signer

ALL = [name for name, _, _ in COMMANDS] + [
    *(f"weights {verb}" for verb in ("ls", "show", "verify", "diff", "serve", "gc")),
    "conformance rollout",
    "conformance trainer",
]


def penstock(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=3000, cwd=cwd)


def run_main(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    """A run that was started once."""
    folder = RunFolder(tmp_path / "outputs" / "reverse")
    folder.write_config(demo_config(0))
    folder.allocate_endpoints(tmp_path, ())
    Signer.create(folder.keys, "reverse")
    return folder


# --- help, errors, exit codes ---------------------------------------------------------------------


def test_help_is_fast_and_names_every_command() -> None:
    durations: list[float] = []
    for _ in range(3):
        began_at = cpu_s()
        done = penstock("--help")
        durations.append(cpu_s() - began_at)
        assert done.returncode == 0
        for name in ALL:
            assert name.split()[0] in done.stdout
    assert min(durations) <= 0.7, "CPU seconds; wall time would judge the machine's other users"


@pytest.mark.parametrize("command", ALL)
def test_every_command_explains_its_parameters(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, out, _ = run_main(capsys, *command.split(), "--help")
    assert code == 0
    assert "Usage: penstock " + command in out


@pytest.mark.parametrize("command", ALL)
def test_every_parameter_has_a_help_text(command: str) -> None:
    app = build()
    for word in command.split():
        app = app[word]
    arguments = app.assemble_argument_collection(parse_docstring=True)
    shown = [argument for argument in arguments if argument.show]
    assert shown
    assert [argument.name for argument in shown if not argument.parameter.help] == []


def test_no_command_line_imports_torch() -> None:
    script = (
        "import sys, importlib, pkgutil, penstock.cli as cli\n"
        "for found in pkgutil.iter_modules(cli.__path__):\n"
        "    importlib.import_module(f'penstock.cli.{found.name}')\n"
        "print([name for name in ('torch', 'transformers', 'uvicorn') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True
    )
    assert "torch" not in done.stdout
    assert "transformers" not in done.stdout


@pytest.mark.parametrize(
    "words", [["bogus"], ["run"], ["run", "x", "--bogus"], ["token", "x", "--role", "king"]]
)
def test_wrong_usage_exits_2(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, err = run_main(capsys, *words)
    assert code == 2
    assert out == ""
    assert err


def test_our_errors_have_no_traceback_and_json_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = tmp_path / "absent.yaml"
    code, out, err = run_main(capsys, "run", str(missing), "--json")
    assert code == 1
    assert err.startswith(f"error: {missing}: no such file")
    assert "Traceback" not in err
    assert "no such file" in json.loads(out.splitlines()[-1])["error"]


def test_every_command_module_is_thin() -> None:
    folder = Path(command_line.__file__).parent
    for name, _, _ in COMMANDS:
        is_taken = iskeyword(name) or hasattr(builtins, name)
        module = f"{name}_" if is_taken else name
        assert len((folder / f"{module}.py").read_text().splitlines()) <= 150


# --- init and check -------------------------------------------------------------------------------


def test_init_writes_a_run_that_passes_check(tmp_path: Path) -> None:
    done = penstock("init", "my-run", cwd=tmp_path)
    assert done.returncode == 0
    assert "penstock run my-run/run.yaml" in done.stdout
    assert 'name: "my-run"' in (tmp_path / "my-run" / "run.yaml").read_text()
    assert "outputs/my-run`" in (tmp_path / "my-run" / "README.md").read_text()
    assert "SPDX" not in (tmp_path / "my-run" / "task.py").read_text()
    assert (tmp_path / "my-run" / "run.schema.json").read_text() == schema_text()
    checked = penstock("check", "my-run/run.yaml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "40 steps of 768 trajectories (30,720 in total)" in checked.stdout
    assert "an empty completion scores 0" in checked.stdout
    assert "loss of policy:" in checked.stdout
    assert "importing torch, which takes seconds" in checked.stderr
    assert not (tmp_path / "outputs").exists(), "check leaves no trace"


@pytest.mark.parametrize(
    ("folder", "name"), [("letters", "letters"), ("true", "true"), ("1e3", "1e3"), ("a b.ü", "a-b")]
)
def test_init_names_the_run_after_its_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: str, name: str
) -> None:
    run_main(capsys, "init", str(tmp_path / folder))
    assert load(tmp_path / folder / "run.yaml").name == name
    assert f"outputs/{name}`" in (tmp_path / folder / "README.md").read_text()


def test_init_overwrites_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("mine")
    code, _, err = run_main(capsys, "init", str(tmp_path))
    assert code == 1
    assert "already has task.py" in err
    assert os.listdir(tmp_path) == ["task.py"]


@pytest.fixture
def my_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    run_main(capsys, "init", str(tmp_path))
    return tmp_path / "run.yaml"


def test_check_lists_every_problem_in_one_go(
    capsys: pytest.CaptureFixture[str], my_run: Path
) -> None:
    code, out, err = run_main(
        capsys,
        "check",
        str(my_run),
        "--json",
        "models.policy.init=/no/such/model",
        "reward=task:absent",
        "workflow={command: [no-such-program]}",
    )
    assert code == 1
    report = json.loads(out.splitlines()[-1])
    assert report["ok"] is False
    assert len(report["problems"]) == 3
    for part in ("/no/such/model", "no function 'absent'", "no-such-program", "3 problems"):
        assert part in err


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ValueError('mine')", "ValueError: mine"),
        ("import no_such_package", 'task.py", line 1'),
        ("import os\nos._exit(3)", "ended its process (exit code 3)"),
    ],
)
def test_check_shows_the_users_error_and_no_frame_of_ours(
    capsys: pytest.CaptureFixture[str], my_run: Path, code: str, expected: str
) -> None:
    (my_run.parent / "task.py").write_text(code)
    exit_code, _, err = run_main(capsys, "check", str(my_run), "reward=null")
    assert exit_code == 1
    assert expected in err
    assert "penstock/cli" not in err
    assert "importlib" not in err


def test_run_refuses_a_misspelt_rule_before_it_starts_anything(
    capsys: pytest.CaptureFixture[str], my_run: Path
) -> None:
    rule = "dataflow.rules=[{admit: 'task:LastFew'}]"
    code, _, err = run_main(capsys, "run", str(my_run), rule, f"output_dir={my_run.parent}/runs")
    assert code == 1
    assert "dataflow.rules[0]: rule admit: task:LastFew: module 'task' has no class" in err
    assert not (my_run.parent / "runs").exists()


def test_check_lists_the_folders_it_searched_for_a_module(
    capsys: pytest.CaptureFixture[str], my_run: Path
) -> None:
    words = ["sources[0].task=tsk", "reward=scores:reward"]
    code, _, err = run_main(capsys, "check", str(my_run), words[0])
    assert code == 1
    assert "cannot import 'tsk'" in err
    assert f"searched {my_run.parent}, the installed packages" in err
    code, _, err = run_main(capsys, "check", str(my_run), words[1])
    assert code == 1
    assert f"searched {my_run.parent}, the installed packages" in err


# --- runs that need no service --------------------------------------------------------------------


def test_a_finished_run_exits_0_immediately_and_says_so(
    capsys: pytest.CaptureFixture[str], run_folder: RunFolder
) -> None:
    run_folder.write_finish(FinishRecord(finished_at=1.0, steps=70, trajectories=71_680))
    code, out, err = run_main(capsys, "run", str(run_folder.path), "--json")
    assert code == 0
    assert "already finished: 70 steps, 71,680 trajectories" in err
    assert json.loads(out.splitlines()[-1])["was_finished"] is True
    code, out, _ = run_main(capsys, "status", str(run_folder.path))
    assert code == 0 and "reverse · finished\n  step 70/" in out and "71,680 trajectories" in out


def test_a_changed_config_is_rejected_with_the_differences(
    capsys: pytest.CaptureFixture[str], run_folder: RunFolder
) -> None:
    code, _, err = run_main(capsys, "run", str(run_folder.path), "training.epochs=2")
    assert code == 1
    assert "training.epochs: 1 -> 2" in err
    assert "--accept-changes" in err
    assert run_folder.read_config() == demo_config(0)


def test_a_running_run_is_rejected_with_the_pid_of_its_launcher(
    capsys: pytest.CaptureFixture[str], run_folder: RunFolder
) -> None:
    with run_folder.locked():
        code, _, err = run_main(capsys, "run", str(run_folder.path))
    assert code == 1
    assert f"pid {os.getpid()}" in err


def test_status_and_stop_of_a_run_that_is_not_running(
    capsys: pytest.CaptureFixture[str], run_folder: RunFolder
) -> None:
    code, out, _ = run_main(capsys, "status", str(run_folder.path))
    assert (code, out.startswith("reverse · never started; `penstock run")) == (0, True)
    code, out, _ = run_main(capsys, "status", str(run_folder.path), "--json")
    assert json.loads(out)["running"] is False
    code, out, err = run_main(capsys, "stop", str(run_folder.path), "--json")
    assert (code, json.loads(out)["stopped"]) == (0, False)
    assert "is not running" in err


def test_status_of_a_run_whose_dataflow_is_unreachable(
    capsys: pytest.CaptureFixture[str], run_folder: RunFolder
) -> None:
    with run_folder.locked():
        code, out, _ = run_main(capsys, "status", str(run_folder.path))
    assert code == 0
    assert f"running (pid {os.getpid()}), but the dataflow does not answer" in out


def test_a_token_is_one_line_on_stdout(
    capsys: pytest.CaptureFixture[str], run_folder: RunFolder
) -> None:
    code, out, err = run_main(capsys, "token", str(run_folder.path))
    assert code == 0
    assert "penstock join http://127.0.0.1:" in err
    assert "is reachable on this host only. From another host, open a tunnel" in err
    for url in (run_folder.endpoints().dataflow, run_folder.endpoints().weights):
        port = url.rpartition(":")[2]
        assert f"-L {port}:127.0.0.1:{port}" in err, "a node also pulls weights"
    assert f"the run is not running; `penstock run {run_folder.path}` starts it" in err
    signer = Signer.read(run_folder.keys, "reverse")
    for audience in (Audience.DATAFLOW, Audience.WEIGHTS):
        assert signer.verifier(audience).verify(out.strip()).role is Role.ROLLOUT
    with pytest.raises(Forbidden):
        signer.verifier(Audience.RELAY).verify(out.strip())
    code, out, _ = run_main(
        capsys, "token", str(run_folder.path), "--role", "reader", "--ttl-h", "1", "--json"
    )
    minted = json.loads(out)
    assert minted["is_this_host_only"]
    assert minted["url"] == run_folder.endpoints().dataflow
    assert minted["expires_at"] == pytest.approx(time.time() + 3600, abs=60)
    code, _, err = run_main(
        capsys, "token", str(run_folder.path), "--role", "reader", "--ttl-h", "0"
    )
    assert code == 1
    assert "must be greater than 0 hours" in err


def test_audit_takes_the_config_file_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, my_run: Path
) -> None:
    asked = f"output_dir={tmp_path / 'outputs'}"
    my_run.write_text(my_run.read_text().replace("output_dir: outputs", asked.replace("=", ": ")))
    code, _, err = run_main(capsys, "audit", str(my_run))
    assert code == 1
    assert f"{tmp_path / 'outputs' / tmp_path.name} is not a run folder" in err


# --- services that cannot start -------------------------------------------------------------------


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    "command", [["dataflow"], ["weights", "serve"], ["conformance", "rollout"]]
)
def test_a_port_in_use_is_an_error_message(
    run_folder: RunFolder, taken_port: int, command: list[str]
) -> None:
    folder = [] if command[0] == "conformance" else ["--run-dir", str(run_folder.path)]
    for port, expected in (
        (taken_port, f"error: port {taken_port} on 127.0.0.1 is already in use; choose another"),
        (99999, "error: --port 99999: must be between 0 and 65535"),
    ):
        done = penstock(*command, *folder, "--port", str(port))
        assert done.returncode == 1
        assert expected in done.stderr
        assert "Traceback" not in done.stderr


def test_missing_and_broken_tls_files_are_error_messages(
    capsys: pytest.CaptureFixture[str], run_folder: RunFolder, tmp_path: Path
) -> None:
    key, absent = tmp_path / "key.pem", tmp_path / "no.pem"
    key.write_text("no key")
    for certificate, expected in (
        (absent, f"error: --tls-cert {absent}: no such file"),
        (key, "as a PEM certificate and its key"),
    ):
        words = ["--run-dir", str(run_folder.path), "--tls-cert", str(certificate)]
        code, _, err = run_main(capsys, "dataflow", *words, "--tls-key", str(key))
        assert code == 1
        assert expected in err


def test_run_commands_reject_other_folders(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words in (["status"], ["stop"], ["token", "--role", "reader"], ["run"]):
        code, _, err = run_main(capsys, words[0], str(tmp_path), *words[1:])
        assert code == 1
        assert "is not a run folder" in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["http://127.0.0.1:1"], "no token"),
        (["127.0.0.1:1", "--token-file", "/dev/null"], "not a URL"),
        (
            ["http://10.9.8.7:1", "--token-file", "/dev/null"],
            "the token would be sent in clear text",
        ),
        (
            ["http://127.0.0.1:1", "--token-file", "/dev/null", "--relay", "http://10.9.8.7:1"],
            "the token would be sent in clear text",
        ),
    ],
)
def test_join_says_what_it_needs(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    expected: str,
) -> None:
    monkeypatch.delenv("PENSTOCK_TOKEN_FILE", raising=False)
    code, _, err = run_main(capsys, "join", *words)
    assert code == 1
    assert expected in err


def test_missing_packages_are_named_with_the_command(
    capsys: pytest.CaptureFixture[str], my_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "penstock.runs.preflight.EXTRAS", {"train": ("no_such_torch",), "tokens": ("json",)}
    )
    code, _, err = run_main(capsys, "run", str(my_run))
    assert code == 1
    assert "not installed: no_such_torch; run: pip install 'penstock-rl[train]'" in err
