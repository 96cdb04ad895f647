# SPDX-License-Identifier: Apache-2.0
"""Thirty canary secrets through every error path (C8): none is found in a log, an error body, the
outcome of a rollout, a report or what a command prints."""

from __future__ import annotations

import io
import json
import logging
import secrets
import sys
import tempfile
import warnings
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TextIO

import httpx2
import pytest
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from tests.attacks.scoring import score_once
from tests.unit.gateway.gateway_harness import POLICY, write_snapshot
from tests.unit.weights.weight_servers import listening

from penstock import redaction
from penstock.cli import main as cli
from penstock.errors import BadRequest, ConfigError, EngineError, PenstockError, WireError
from penstock.fleet.run_folder import RunFolder
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.gateway.online import REWARD_KEY_PREFIX
from penstock.gateway.renderer import Renderer
from penstock.gateway.server import build_app as build_gateway
from penstock.gateway.session import KEY_PREFIX
from penstock.observe import logs
from penstock.redaction import HIDDEN, hide_secrets, register_secret
from penstock.rollout.attempt import failed
from penstock.rollout.isolation import Isolation, IsolationSettings, Use, UseSettings
from penstock.rollout.programs import run_program
from penstock.rollout.rewards.scorer import Failed
from penstock.rollout.sandbox.types import Grants
from penstock.rollout.user_errors import user_traceback
from penstock.rollout.visible_folders import interpreter_folders
from penstock.runs.launch import StopRequest, _end_recorded  # pyright: ignore[reportPrivateUsage]
from penstock.types import FailureKind, SamplingSpec
from penstock.wire.auth import PREFIX, Audience, Renewer, Role, Signer
from penstock.wire.client import AsyncServiceClient
from penstock.wire.routes import Call, Health, Route
from penstock.wire.server import build_app
from penstock.wire.trust import refuse_clear_text

PEM = "-----BEGIN PRIVATE KEY-----\nMIG{}\n-----END PRIVATE KEY-----"


def drawn(num_bytes: int = 20) -> str:
    return secrets.token_hex(num_bytes)


def tokens(folder: Path) -> dict[str, str]:
    signer = Signer.create(folder, "run")
    made = {
        f"{role} token": signer.mint(role, [Audience.DATAFLOW], ttl_s=60, subject="x", renew_s=1e6)
        for role in (Role.ADMIN, Role.ROLLOUT, Role.STAGE, Role.SESSION)
    }
    credential = signer.verifier(Audience.DATAFLOW).verify(made["admin token"])
    renewed = Renewer(folder).renew(made["admin token"], credential)
    assert renewed != made["admin token"]
    keys = {name: (folder / name).read_text().split()[0] for name in ("root.key", "signing.key")}
    return {**made, "renewed token": renewed, **keys}


@pytest.fixture(scope="module")
def canaries() -> Generator[dict[str, tuple[str, str]]]:
    """By name: the secret, and the text in which it would appear. What has no form of its own is
    known to the process: from its environment, or as a granted secret."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        made = tokens(Path(name))
        key, reward_key = KEY_PREFIX + drawn(32), REWARD_KEY_PREFIX + drawn(32)
        env = {
            "AWS_SECRET_ACCESS_KEY": drawn(),
            "PGPASSWORD": drawn(6),
            "MY_SERVICE_TOKEN": drawn(),
            "JUDGE_API_KEY": drawn(8),
        }
        for variable, value in env.items():
            patch.setenv(variable, value)
        redaction._of_environment.cache_clear()  # pyright: ignore[reportPrivateUsage]
        granted = {"granted secret": drawn(), "signing key": made.pop("signing.key")}
        granted["root key"] = made.pop("root.key")
        for value in granted.values():
            register_secret(value)
        plain = {**made, "session key": key, "reward key": reward_key, **env, **granted}
        plain |= {
            "Hugging Face": f"hf_{drawn()}",
            "OpenAI": f"sk-proj-{drawn()}",
            "Anthropic": f"sk-ant-api03-{drawn()}",
            "GitHub": f"ghp_{drawn()}",
            "GitHub, fine": f"github_pat_{drawn()}",
            "Google": f"AIza{drawn()}",
            "Slack": f"xoxb-{drawn()}",
            "JSON web token": f"eyJ{drawn(8)}.{drawn()}.{drawn()}",
        }
        found = {name: (secret, secret) for name, secret in plain.items()}
        for name, around in (
            ("bearer header", "Authorization: Bearer {}"),
            ("bearer in a mapping", "{{'authorization': 'Bearer {}'}}"),
            ("basic header", "authorization: Basic {}"),
            ("password of a URL", "postgresql://penstock:{}@db.example:5432/run"),
            ("key of a proxy", "http://me:{}@proxy.example:3128"),
            ("assignment", "password={}"),
            ("JSON field", '{{"client_secret": "{}"}}'),
            ("query", "https://x.example/?access_token={}&page=2"),
            ("keyword argument", "Client(api_key='{}')"),
            ("private key", PEM),
        ):
            secret = drawn()
            found[name] = secret, around.format(secret)
        assert len(found) >= 30
        yield found
    redaction._of_environment.cache_clear()  # pyright: ignore[reportPrivateUsage]


def leaked(text: str, canaries: dict[str, tuple[str, str]]) -> list[str]:
    """Names of the canaries in it, whole or by their most secret part."""
    return [
        name
        for name, (secret, _) in canaries.items()
        if secret in text or secret.rpartition(".")[2][-16:] in text
    ]


class Sink(io.StringIO):
    def __init__(self, *, is_terminal: bool = False) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def configure(stream: TextIO) -> None:
    """Logs as services write them; the fixture of every test puts them back."""
    logs.configure("node", stream=stream)


def _hold(local: str, text: str) -> None:
    """Some formatters show local variables."""
    raise ValueError(text)


# --- logs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_log_line_shows_a_secret(
    is_terminal: bool,
    canaries: dict[str, tuple[str, str]],
) -> None:
    """As the message, a field, an exception with its cause, a local variable of a traceback, a
    library's log, a warning."""
    sink = Sink(is_terminal=is_terminal)
    configure(sink)
    log = structlog.get_logger("penstock.test")
    for name, (secret, text) in canaries.items():
        log.info(f"said {text}")
        log.warning("said", detail=text, nested={"headers": [text]})
        try:
            try:
                _hold(secret, text)
            except ValueError as error:
                raise RuntimeError(f"{name} failed") from error
        except RuntimeError:
            log.exception("call failed")
            logging.getLogger("other").error("library failed", exc_info=True)
        logging.getLogger("other").warning("used %s", text)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(text, stacklevel=1)
    shown = sink.getvalue()
    assert len(shown.splitlines()) >= 6 * len(canaries)
    assert leaked(shown, canaries) == []
    if not is_terminal:
        assert all(json.loads(line) for line in shown.splitlines()), "each line is still JSON"


# --- outcomes of rollouts ------------------------------------------------------------------------


def test_no_outcome_shows_a_secret(canaries: dict[str, tuple[str, str]]) -> None:
    """What a workflow raises, such as the error of a client with its headers, is delivered, stored
    and shown in samples, reports and explanations."""
    for name, (_, text) in canaries.items():
        try:
            raise PermissionError(f"401: the key {text} is wrong")
        except PermissionError as error:
            outcome = failed(FailureKind.WORKFLOW, user_traceback(error))
        assert HIDDEN in outcome.detail, name
        assert leaked(outcome.detail, {name: canaries[name]}) == []
        assert leaked(failed(FailureKind.ENGINE, text).detail, canaries) == []


async def test_no_failed_program_shows_a_secret(canaries: dict[str, tuple[str, str]]) -> None:
    """In its error output, and in the words of the command."""
    isolation = Isolation()
    text = "\n".join(text for _, text in canaries.values())
    box = await isolation.open(Use.WORKFLOW, folders=interpreter_folders())
    with pytest.raises(PenstockError) as raised:
        await run_program(box, ["sh", "-c", "cat >&2; exit 3", text], stdin=text.encode())
    assert "exited with code 3" in str(raised.value)
    assert leaked(str(raised.value), canaries) == []


REWARD = """
import os, pathlib, sys
def reward(completions, **_):
    key = pathlib.Path(os.environ["PENSTOCK_SECRETS"], "judge").read_text()
    print(key, file=sys.stderr)
    raise ValueError(key)
"""


def _write_reward(folder: Path, canary: str) -> None:
    folder.chmod(0o755)
    (folder / "leaky.py").write_text(REWARD)
    (folder / "judge").write_text(canary)


async def test_no_reward_shows_a_granted_secret(
    canaries: dict[str, tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    """It may read the judge's key: neither its error nor what it prints has it."""
    canary = f"judge {drawn(8)} with no form"
    with tempfile.TemporaryDirectory() as name:
        _write_reward(Path(name), canary)
        monkeypatch.setattr(sys, "path", [name, *sys.path])
        grants = Grants(secrets={"judge": Path(name) / "judge"})
        settings = IsolationSettings(uses={Use.REWARD: UseSettings(grants=grants)})
        result = await score_once("leaky:reward", Isolation(settings))
    assert isinstance(result, Failed) and "ValueError" in result.detail
    printed = capfdbinary.readouterr().err.decode(errors="replace")
    assert HIDDEN in printed
    assert canary not in result.detail + printed


# --- HTTP ----------------------------------------------------------------------------------------


@asynccontextmanager
async def in_process(app: Starlette) -> AsyncGenerator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
        yield http


async def test_no_error_body_of_a_service_shows_a_secret(
    canaries: dict[str, tuple[str, str]],
    tmp_path: Path,
) -> None:
    """Refusals and crashes of handlers; and tokens that are wrong, in the header, the path and the
    query, are not said again."""
    configure(sink := Sink())
    signer = Signer.create(tmp_path, "run")
    token = signer.mint(Role.READER, [Audience.DATAFLOW], ttl_s=60, subject="me")
    errors: dict[str, Callable[[str], Exception]] = {
        "refuses": BadRequest,
        "fails": WireError,
        "crashes": RuntimeError,
    }

    async def handler(call: Call) -> object:
        raise errors[call.path["how"]](call.body["text"])

    roles = frozenset({Role.READER})
    route = Route(
        method="POST",
        path="/v1/{how}",
        handler=handler,
        roles=roles,
        summary="x",
        request=dict[str, Any],
    )
    app = build_app([route], signer.verifier(Audience.DATAFLOW), title="test")
    shown: list[str] = []
    async with in_process(app) as http:
        for secret, text in canaries.values():
            for how in errors:
                headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
                answer = await http.post(f"/v1/{how}", headers=headers, json={"text": text})
                assert answer.status_code >= 400
                shown.append(answer.text)
            wrong = {"authorization": f"Bearer {' '.join(secret.split())}x"}
            shown.append((await http.post("/v1/refuses", headers=wrong, json={})).text)
            elsewhere = {"token": secret, "api_key": secret}
            shown.append((await http.get("/v1/nothing", params=elsewhere)).text)
    assert leaked("\n".join(shown), canaries) == []
    assert "handler failed" in sink.getvalue()
    assert leaked(sink.getvalue(), canaries) == []


async def test_no_error_body_of_the_gateway_shows_a_secret(
    canaries: dict[str, tuple[str, str]],
    tmp_path: Path,
) -> None:
    """An agent, and so a model, reads what the engine's client said, such as its headers."""
    configure(sink := Sink())
    thrown: list[Exception] = []

    async def engine(request: GenerationRequest) -> Completion:
        raise thrown[-1]

    gateway = Gateway(engine)
    gateway.set_renderer(POLICY, Renderer.load(write_snapshot(tmp_path)))
    session = gateway.open(policies=[POLICY], sampling=SamplingSpec(max_tokens=4), seed=1)
    shown: list[str] = []
    async with in_process(build_gateway(gateway)) as http:
        for _, text in canaries.values():
            for kind in (EngineError, RuntimeError):
                thrown.append(kind(text))
                body = {"model": POLICY, "messages": [{"role": "user", "content": "a"}]}
                headers = {"authorization": f"Bearer {session.api_key}"}
                answer = await http.post("/v1/chat/completions", headers=headers, json=body)
                assert answer.status_code >= 500, answer.text
                shown.append(answer.text)
            wrong = {"authorization": f"Bearer {' '.join(text.split())}"}
            shown.append((await http.post("/v1/chat/completions", headers=wrong, json=body)).text)
    assert leaked("\n".join(shown) + sink.getvalue(), canaries) == []
    assert session.api_key not in sink.getvalue()


async def test_no_error_of_a_client_shows_what_a_server_says_again(
    canaries: dict[str, tuple[str, str]],
) -> None:
    """A hostile relay repeats the token that it was sent, in every form of an error."""

    async def echo(request: Request) -> Response:
        said = "\n".join(text for _, text in canaries.values())
        if request.url.path == "/plain":
            return Response(f"no {said}"[:200], 400)
        code = request.url.path.rpartition("/")[2]
        error = {"code": code, "message": f"no {request.headers['authorization']}: {said}"}
        return Response(json.dumps({"error": error}), 400, media_type="application/json")

    app = Starlette(routes=[StarletteRoute("/{path:path}", echo)])
    shown: list[str] = []
    token = next(secret for secret, _ in canaries.values() if secret.startswith(PREFIX))
    async with listening(app) as url:
        client = AsyncServiceClient(url, token)
        for path in ("/plain", "/bad_request", "/forbidden", "/fenced"):
            with pytest.raises(WireError) as raised:
                await client.call("GET", path, None, Health, deadline_s=0.0)
            shown.append(str(raised.value))
        await client.close()
    assert leaked("\n".join(shown), canaries) == []


# --- commands and files --------------------------------------------------------------------------


def test_no_command_prints_a_secret_with_its_error(
    canaries: dict[str, tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever a command was given or read: for people and for programs."""
    raising: list[Exception] = []

    def build() -> Callable[..., int]:
        def run(*_: object, **__: object) -> int:
            raise raising[-1]

        return run

    monkeypatch.setattr(cli, "build", build)
    for _, text in canaries.values():
        raising.append(ConfigError(f"dataflow.store: cannot use {text}"))
        with pytest.raises(SystemExit):
            cli.main(["run", "--json"])
        if text.startswith(("http://", "postgresql://")):
            with pytest.raises(ConfigError) as refused:
                refuse_clear_text(text.replace("postgresql", "http"))
            raising.append(refused.value)
            with pytest.raises(SystemExit):
                cli.main(["join"])
    printed = capsys.readouterr()
    assert printed.out and printed.err
    assert leaked(printed.out + printed.err, canaries) == []


def test_no_record_of_a_run_s_end_has_a_secret(
    canaries: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "run").mkdir()
    for _, text in canaries.values():
        with pytest.raises(ConfigError), _end_recorded(folder, StopRequest()):
            raise ConfigError(f"the store does not answer: {text}")
        record = (tmp_path / "run" / "ended.json").read_text()
        assert HIDDEN in record and leaked(record, canaries) == []


# --- what must stay readable ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "task key: reverse-000000000123",
        "send `Authorization: Bearer TOKEN`",
        "unknown key: training.learning_rate_scheduler",
        "pass --token-file, from `penstock token RUN --role stage --out FILE`",
        "KeyError: 'a_long_name_of_a_dictionary_key'",
        "the prompt has 123456789012 tokens; max_tokens=1234567890",
        "http://127.0.0.1:18080/v1/nodes: 403 role rollout",
        "row p0-12.3.4 of node-0.replica-1, digest " + "ab" * 32,
        "File /home/user/project/secret_sauce.py, line 12, in reward",
    ],
)
def test_ordinary_messages_are_not_changed(text: str) -> None:
    assert hide_secrets(text) == text


@pytest.mark.parametrize(
    "piece",
    [
        *("a", "token", "token ", "api_key=", "x://", "x://a:", "bearer ", "sk-", "eyJ"),
        *("penstock2.", "'", "\\", "-----BEGIN PRIVATE KEY-----", f"secret:{' ' * 9}"),
    ],
)
def test_long_text_takes_time_in_proportion(piece: str) -> None:
    """Errors have text of models in them: no pattern takes the square of its length, which would
    be hours here."""
    assert hide_secrets(piece * (300_000 // len(piece)))


def test_the_patterns_know_our_own_forms() -> None:
    """Prefixes are defined elsewhere; a new one must be hidden, too."""
    for secret in (
        f"{PREFIX}.{drawn()}.{drawn()}",
        KEY_PREFIX + drawn(),
        REWARD_KEY_PREFIX + drawn(),
    ):
        assert secret not in hide_secrets(f"used {secret} here")
