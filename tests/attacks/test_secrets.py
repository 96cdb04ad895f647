# SPDX-License-Identifier: Apache-2.0
"""Code of others reaches no secret: not of the node, the run, the cloud or another attempt."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.attacks.scoring import score_once
from tests.attacks.thief import NAMES

from penstock.config import demo_config
from penstock.errors import SandboxError, Unauthorized
from penstock.fleet.fork_server import ForkServer
from penstock.fleet.run_folder import RunFolder
from penstock.rollout.isolation import (
    Isolation,
    IsolationSettings,
    Opened,
    Use,
    UseSettings,
    passed_env,
)
from penstock.rollout.rewards.process import MAX_LOG_BYTES, LogBudget
from penstock.rollout.rewards.scorer import Failed
from penstock.rollout.sandbox.container import ContainerBackend
from penstock.rollout.sandbox.limits import LimitsSandbox
from penstock.rollout.sandbox.run import run
from penstock.rollout.sandbox.types import Grants, Level, SandboxSpec
from penstock.rollout.tool_sandbox import ToolSandbox
from penstock.rollout.visible_folders import (
    module_files,
    narrowed,
    program_folders,
    python_folders,
)
from penstock.runs.scaling_setup import build_scaler
from penstock.types import FailureKind
from penstock.wire.auth import Audience, Signer

ROOT = Path(__file__).parents[2]
EVIL = """
import os
from thief import NAMES, steal

def reward(completions, **_):
    found = steal(os.path.dirname(__file__))
    return [float(sum(1 << NAMES.index(name) for name in found))] * len(completions)
"""
NETWORK = 'ip link set lo up && ip addr add 169.254.169.254/32 dev lo && exec "$@"'
"""A network in which the metadata address answers."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a network namespace with root")


@pytest.fixture
def project() -> Iterator[Path]:
    """Not in tmp_path, which only its owner can read."""
    with tempfile.TemporaryDirectory(prefix="penstock-attack-") as name:
        folder = Path(name) / "project"
        folder.mkdir(mode=0o755)
        Path(name).chmod(0o711)
        (Path(name) / "private").mkdir(mode=0o700)
        (folder / "thief.py").write_bytes((ROOT / "tests" / "attacks" / "thief.py").read_bytes())
        (folder / "evil.py").write_text(EVIL)
        yield folder


def rob(use: str, backend: str, project: Path) -> list[str]:
    """What the thief found, in a node that was started with secrets in its environment."""
    node = [sys.executable, "-m", "tests.attacks.robbed_node", use, backend]
    secrets = {
        "PENSTOCK_TOKEN": "CANARY-token-00000000",
        "AWS_SECRET_ACCESS_KEY": "CANARY-cloud-00000000",
        "HF_TOKEN": "CANARY-cloud-00000000",
        "OF_THE_PARENT": "CANARY-parent-00000000",
    }
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", NETWORK, "sh", *node, project, project.parent / "private"],
        cwd=ROOT,
        env={**os.environ, **secrets},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_root
@pytest.mark.finding(3)
@pytest.mark.parametrize("use", ["reward", "workflow", "tool"])
def test_user_code_finds_none_of_seven_secrets(use: str, project: Path) -> None:
    """A reward, a command and a tool of a node that runs as root find 0 of 7 secrets: token,
    signing key, cloud variables, other attempts' keys, /proc of parents, engine, metadata."""
    assert rob(use, "auto", project) == []


@needs_root
def test_the_same_thief_finds_all_seven_without_walls(project: Path) -> None:
    """The attack is real: as an ordinary process of the same user it finds everything."""
    assert rob("workflow", "none", project) == sorted(NAMES)


# --- without a sandbox ----------------------------------------------------------------------------

READER = """
import os, sys
for name in ("environ", "mem", "maps", "fd", "cwd"):
    path = f"/proc/{sys.argv[1]}/{name}"
    try:
        os.listdir(path) if name == "fd" else open(path, "rb").read(64)
        print(name)
    except OSError:
        pass
"""


@needs_root
@pytest.mark.finding(3)
@pytest.mark.parametrize("is_protected", [True, False])
def test_a_process_of_the_same_user_cannot_read_a_service(is_protected: bool) -> None:
    """Environment, memory and open files of a penstock process are closed to its own user."""
    user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")
    line = "from penstock.fleet.inspection import forbid_inspection; forbid_inspection(); "
    code = f"{line if is_protected else ''}print('up', flush=True); input()"
    service = subprocess.Popen(
        [*user, "/usr/bin/python3", "-c", code],
        env={"PYTHONPATH": str(ROOT / "src"), "PENSTOCK_TOKEN": "secret"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with service:
        assert service.stdout is not None and service.stdout.readline() == b"up\n"
        command = [*user, "/usr/bin/python3", "-c", READER, str(service.pid)]
        seen = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        service.kill()
    assert seen == ([] if is_protected else seen) and ("environ" in seen) != is_protected


def test_the_command_line_protects_itself_first() -> None:
    """Every command is closed to inspection before it reads a token or key."""
    code = (
        "import ctypes, sys\n"
        "from penstock.cli import main\n"
        "try:\n    main.main(['--version'])\n"
        "except SystemExit:\n    print('dumpable', ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "dumpable 0" in done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "PENSTOCK_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "AZURE_CLIENT_SECRET",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "OPENAI_API_KEY",
        "ANTHROPIC_AUTH_TOKEN",
        "GITHUB_TOKEN",
        "PGPASSWORD",
        "SSH_AUTH_SOCK",
        "DATABASE_URL",
        "HTTPS_PROXY",
        "LD_PRELOAD",
    ],
)
def test_no_variable_passes_that_was_not_allowed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment of programs is an allow list: a secret's name need not be known to us."""
    monkeypatch.setenv(name, "secret")
    assert name not in passed_env()
    assert passed_env([name])[name] == "secret", "the config can name it"


def test_a_command_that_starts_nodes_gets_no_password_and_its_token_ends_with_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler passes the whole environment on to another machine, which may be anybody's
    next."""
    for name in ("PGPASSWORD", "PENSTOCK_TOKEN"):
        monkeypatch.setenv(name, f"secret of {name}")
    command = "{start: [sh, -c, 'env > {name}.env; cat {token_file} > {name}.token'], "
    command += "stop: ['true', '{name}'], max_nodes: 1}"
    config = demo_config(0, [f"autoscale.node_types={{far: {command}}}"])
    folder = RunFolder(tmp_path / "run")
    folder.write_config(config)
    Signer.create(folder.keys, config.name)
    folder.allocate_endpoints(tmp_path, ())
    launcher: Any = SimpleNamespace(nodes=dict[str, float])
    scaler = build_scaler(
        config, folder, launcher, log_dir=tmp_path, read_report=lambda: None, notify=print
    )
    name = scaler.hands["far"].start(0)
    scaler.hands["far"].close()
    shown = (tmp_path / f"{name}.env").read_text()
    assert "HOME=" in shown and "secret of" not in shown
    token = (tmp_path / f"{name}.token").read_text().strip()
    verifier = Signer.read(folder.keys, config.name).verifier(Audience.DATAFLOW)
    assert verifier.verify(token).subject == name
    scaler.revoke(name)
    with pytest.raises(Unauthorized, match="revoked"):
        Signer.read(folder.keys, config.name).verifier(Audience.DATAFLOW).verify(token)
    assert not [*(folder.keys / "nodes").iterdir()]


def test_the_ledger_s_password_never_enters_the_memory_that_services_share(tmp_path: Path) -> None:
    """The fork server reads the environment of each service before it forks the next: a node or
    trainer, which runs code of others, would find the password in its own memory."""
    server = ForkServer(tmp_path / "server.log")
    try:
        env = {**os.environ, "PGPASSWORD": "secret of the ledger"}
        started = server.start((), env=env, cwd=None, log=tmp_path / "log", preload=())
        assert started is None, "it is started in the ordinary way"
    finally:
        server.close()


# --- walls ----------------------------------------------------------------------------------------


async def _say(use: Use, settings: IsolationSettings, *argv: str) -> str:
    box = await Isolation(settings).open(use, folders=(Path(argv[-1]).parent,))
    async with Opened(box):
        done = await run(box, argv)
    return done.stdout.decode() + done.stderr.decode()


async def test_the_folder_of_runs_looks_empty(project: Path) -> None:
    """A module's folder is visible, the run folder below it is not, also where links lead there."""
    run_folder = project / "outputs" / "run"
    run_folder.mkdir(parents=True)
    (run_folder / "key").write_text("secret")
    (project / "shortcut").symlink_to(run_folder)
    settings = IsolationSettings(hidden=(project / "outputs",))
    for path in (run_folder / "key", project / "shortcut" / "key"):
        argv = ("sh", "-c", 'ls "$1/.." >/dev/null; cat "$0"', str(path), str(project / "evil.py"))
        said = await _say(Use.TOOLS, settings, *argv)
        assert "secret" not in said and "No such file" in said


async def test_an_argument_does_not_show_a_file_of_a_run(project: Path) -> None:
    """A command that names a key, as text of a model may, sees neither it nor its folder."""
    keys = project / "outputs" / "run" / "keys"
    keys.mkdir(parents=True)
    (keys / "signing").write_text("secret")
    settings = IsolationSettings(hidden=(project / "outputs",))
    said = await _say(Use.WORKFLOW, settings, "cat", str(keys / "signing"))
    assert "secret" not in said and "No such file" in said


def test_a_container_hides_the_folder_of_runs(project: Path) -> None:
    """The engine mounts an empty folder over it, as the other back ends do."""
    hidden = project / "outputs"
    hidden.mkdir()
    spec = SandboxSpec(grants=Grants(folders=(project,), hidden=(hidden,)))
    box = ContainerBackend("image", engine="docker").create(spec)
    walls = box._walls()  # pyright: ignore[reportPrivateUsage]
    assert walls.index(f"--volume={project}:{project}:ro") < walls.index(
        f"--tmpfs={hidden}:ro,size=4k,mode=0555"
    )


async def test_the_home_folder_is_never_granted(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module in the home folder is granted alone: keys beside it stay out of reach."""
    (project / ".ssh").mkdir()
    (project / ".ssh" / "id_ed25519").write_text("secret")
    monkeypatch.setenv("HOME", str(project))
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    found = narrowed((*python_folders(), *module_files("evil:reward"), *program_folders(["sh"])))
    assert project / "evil.py" in found
    assert not any(project == path or project.is_relative_to(path) for path in found)


@pytest.mark.parametrize("argument", ["/etc/shadow", "/proc/1/environ", "/run/secrets/x"])
def test_a_command_shows_no_file_of_the_host_by_naming_it(argument: str) -> None:
    """Arguments of a command grant scripts, never files of the system."""
    assert not any(str(path).startswith(argument[:5]) for path in program_folders(["sh", argument]))


def test_a_file_among_the_arguments_shows_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may have written an argument: it names a file, and gets that file at most; of hidden
    private files of the home folder not even that."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    named, key = tmp_path / "data" / "named.txt", tmp_path / "home" / ".ssh" / "id_ed25519"
    for path in (named, key):
        path.parent.mkdir(parents=True)
        path.write_text("secret")
    key.chmod(0o600)
    found = program_folders(["sh", str(named), str(key)])
    assert named in found
    assert not any(key.is_relative_to(path) or path == named.parent for path in found)


async def test_secrets_of_one_use_are_out_of_reach_of_another(project: Path) -> None:
    """The key of a judge is a grant for rewards; code that a model wrote does not see it."""
    (project / "judge.key").write_text("of the judge")
    granted = UseSettings(grants=Grants(secrets={"judge": project / "judge.key"}))
    settings = IsolationSettings(uses={Use.REWARD: granted})
    read = ("cat", "/run/secrets/judge", str(project / "evil.py"))
    assert "of the judge" in await _say(Use.REWARD, settings, *read)
    assert "of the judge" not in await _say(Use.TOOLS, settings, *read)


async def test_only_granted_hosts_are_reached_and_only_through_the_proxy(project: Path) -> None:
    """A grant of one host opens nothing else: neither another host nor a way around."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    granted = UseSettings(grants=Grants(hosts=(f"127.0.0.1:{port}",)))
    settings = IsolationSettings(uses={Use.TOOLS: granted})
    script = (
        "curl -s --noproxy '' http://127.0.0.1:$1/; curl -s --noproxy '' http://127.0.0.1:1/ -w "
        "' %{http_code}'; curl -s --noproxy '*' http://127.0.0.1:$1/ || echo ' no way around'"
    )
    async with server:
        said = await _say(Use.TOOLS, settings, "sh", "-c", script, "sh", str(port), "/nowhere/x")
    assert said.startswith("reached") and " 403" in said and "no way around" in said, said


async def test_a_grant_of_a_host_shows_no_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools that may call a host see the interpreter of the proxy's forwarder, not the project."""
    (project / "answers.txt").write_text("the answer")
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    granted = UseSettings(grants=Grants(hosts=("example.com",)))
    isolation = Isolation(IsolationSettings(uses={Use.TOOLS: granted}))
    async with Opened(await isolation.open(Use.TOOLS)) as box:
        done = await run(box, ["cat", str(project / "answers.txt")])
    assert b"No such file" in done.stderr and not done.stdout


@pytest.mark.parametrize(("use", "served"), [(Use.REWARD, 3), (Use.TOOLS, 1)])
async def test_long_answers_do_not_cut_a_reward_off_from_its_judge(
    use: Use, served: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on bytes is of one attempt; a reward's proxy lives as long as the node."""
    monkeypatch.setattr("penstock.rollout.egress.proxy.MAX_BYTES", 200)
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    granted = UseSettings(grants=Grants(hosts=(f"127.0.0.1:{port}",)))
    isolation = Isolation(IsolationSettings(uses={use: granted}))
    script = "for i in 1 2 3; do curl -s --noproxy '' http://127.0.0.1:$0/; done"
    async with server, Opened(await isolation.open(use)) as box:
        done = await run(box, ["sh", "-c", script, str(port)])
    assert done.stdout.count(b"reached") == served, done


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\nconnection: close\r\n\r\nreached")
    await writer.drain()
    writer.close()


# --- fails closed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("use", [Use.WORKFLOW, Use.TOOLS])
async def test_without_isolation_code_of_others_does_not_start(
    use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fallback for commands, tools and graders; the message names the cure."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("penstock.rollout.isolation._tested", {})
    with pytest.raises(SandboxError, match="apt install bubblewrap"):
        await Isolation().open(use)


async def test_a_reward_without_isolation_runs_limited_unless_the_run_demands_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner's own reward falls back with a clean environment, never silently below a demand."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("penstock.rollout.isolation._tested", {})
    assert (await Isolation().backend(Use.REWARD)).level is Level.LIMITS
    for demand in (Level.NAMESPACES, Level.GVISOR):
        with pytest.raises(SandboxError, match="no sandbox of level"):
            await Isolation(IsolationSettings(demand=demand)).backend(Use.REWARD)
    chosen = IsolationSettings(backend="bubblewrap")
    with pytest.raises(SandboxError):
        await Isolation(chosen).backend(Use.REWARD)


async def test_a_first_reward_runs_on_a_host_without_a_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also as root, where the interpreter lies below a folder that only root may enter."""
    monkeypatch.setattr("penstock.rollout.isolation._tested", {})
    isolation = Isolation()
    with monkeypatch.context() as without:
        without.setenv("PATH", "/nowhere")
        await isolation.backend(Use.REWARD)
    sandbox = await isolation.open(Use.REWARD, folders=python_folders())
    await sandbox.start()
    try:
        assert (await run(sandbox, [sys.executable, "-c", "pass"])).exit.code == 0
    finally:
        await sandbox.kill()


@needs_root
@pytest.mark.parametrize("backend", ["auto", "bubblewrap"])
async def test_a_private_folder_does_not_undo_a_chosen_back_end(
    backend: str, project: Path
) -> None:
    """A reward that only root can read runs without walls where none were asked for, never in the
    place of the back end that the owner named."""
    os.chmod(project, 0o700)
    isolation = Isolation(IsolationSettings(backend=backend))
    if backend == "auto":
        assert isinstance(await isolation.open(Use.REWARD, folders=[project]), LimitsSandbox)
        return
    with pytest.raises(SandboxError, match="chmod -R"):
        await isolation.open(Use.REWARD, folders=[project])


async def test_none_does_not_meet_a_demand() -> None:
    """`backend: none` is an explicit choice, and contradicts every demand."""
    assert (await Isolation(IsolationSettings(backend="none")).backend(Use.TOOLS)).level == 0
    for demand in (Level.LIMITS, Level.NAMESPACES):
        with pytest.raises(SandboxError):
            settings = IsolationSettings(backend="none", demand=demand)
            await Isolation(settings).backend(Use.TOOLS)


# --- error paths ----------------------------------------------------------------------------------

ERROR_PATHS = {
    "a reward that raises its environment": "raise ValueError(dict(os.environ))",
    "a reward that raises its parent's environment": (
        "raise ValueError(open(f'/proc/{os.getppid()}/environ').read())"
    ),
    "a reward that raises the first environment": (
        "raise ValueError(open('/proc/1/environ').read())"
    ),
    "a reward that returns its environment": "return [str(dict(os.environ))]",
    "a reward that exits with its environment": "raise SystemExit(str(dict(os.environ)))",
    "a reward that prints its environment": "print(dict(os.environ)); raise ValueError",
    "a reward that lists the run folder": "raise ValueError(os.listdir(RUN))",
    "a reward that opens the key": "open(os.path.join(RUN, 'key'))",
    "a reward that warns": (
        "import warnings; warnings.warn(str(dict(os.environ))); raise ValueError"
    ),
    "a reward that dumps its frames": (
        "import faulthandler; faulthandler.dump_traceback(); raise ValueError(sys._getframe())"
    ),
}
CANARY_NAMES = ("PENSTOCK_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN")


@pytest.mark.parametrize("path", ERROR_PATHS)
async def test_no_canary_leaves_through_an_error(
    path: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Three canaries through each of ten error paths: none is in the failure or in the log."""
    for name in CANARY_NAMES:
        monkeypatch.setenv(name, f"canary-{name}")
    run_folder = project / "outputs" / "run"
    run_folder.mkdir(parents=True)
    (run_folder / "key").write_text("canary-key")
    head = f"import os, sys\nRUN = {str(run_folder)!r}\ndef reward(completions, **_):\n"
    (project / "leaks.py").write_text(f"{head}    {ERROR_PATHS[path]}\n")
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    settings = IsolationSettings(hidden=(project / "outputs",))
    result = await score_once("leaks:reward", Isolation(settings))
    assert isinstance(result, Failed) and result.kind is FailureKind.REWARD
    captured = capfd.readouterr()
    assert "canary-" not in result.detail + captured.out + captured.err


# --- the node's memory ----------------------------------------------------------------------------

LONG_ANSWER = """
import os

def reward(completions, **_):
    empty = b"\\xa0" * (4 << 20)
    body = b"\\x82\\xa6values\\xdd" + len(empty).to_bytes(4, "big") + empty + b"\\xa5error\\xa0"
    for fd in range(3, 20):
        try:
            with os.fdopen(os.dup(fd), "wb") as pipe:
                pipe.write(len(body).to_bytes(4, "little") + body)
        except OSError:
            pass
    os._exit(0)
"""


async def test_a_long_answer_of_a_reward_is_not_decoded(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of an answer is a value of a list: a reward that was taken over could fill the
    node."""
    (project / "long.py").write_text(LONG_ANSWER)
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    result = await score_once("long:reward", Isolation())
    assert isinstance(result, Failed) and "corrupted its worker's pipe" in result.detail


async def test_a_tool_that_prints_without_end_does_not_fill_the_node() -> None:
    """Each of hundreds of attempts may print up to its limit; the node keeps the end of it."""
    tools = ToolSandbox(Isolation())
    try:
        done = await tools.exec(["sh", "-c", "yes | head -c 8000000; echo end"])
    finally:
        await tools.close()
    assert done.code == 0 and done.stdout.endswith("end\n") and len(done.stdout) <= 1 << 20


@pytest.mark.parametrize(
    "word", ["a\0b", "\ud800", "x" * (3 << 20)], ids=["NUL", "surrogate", "megabytes"]
)
async def test_a_command_that_no_program_can_have_is_a_result(word: str) -> None:
    """A model writes arguments: what cannot be started fails the tool, not the attempt."""
    tools = ToolSandbox(Isolation())
    try:
        refused = await tools.exec(["echo", word])
        after = await tools.exec(["echo", "usable"])
    finally:
        await tools.close()
    assert refused.code == 126 and refused.stderr
    assert after.stdout == "usable\n"


async def test_a_reward_that_prints_without_end_does_not_fill_the_log() -> None:
    """Over all its processes: who is killed for it and starts again gets no new budget."""
    budget = LogBudget()
    written = b"".join(budget.cut(b"x" * (1 << 14)) for _ in range(1000))
    assert MAX_LOG_BYTES <= len(written) < MAX_LOG_BYTES + (64 << 10)
    assert written.count(b"is not logged") == 1
    budget.counted_at -= 60.0
    assert budget.cut(b"later") == b"later", "a quiet minute gives some of it back"
