# SPDX-License-Identifier: Apache-2.0
"""Texts that others chose, long and made to be costly: what is refused is searched for secrets, and
its length must not be what a refusal costs."""

from __future__ import annotations

import asyncio
import io
import re
import secrets
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import mcp_types
import pytest
import structlog

from penstock import redaction
from penstock.dataflow.columns.row_leases import ReaderRequest
from penstock.dataflow.service.nodes.messages import Heartbeat
from penstock.errors import BadRequest, EngineError, WireError
from penstock.fleet.run_folder import RunFolder
from penstock.gateway.exchange import error_for_agent
from penstock.observe import logs
from penstock.redaction import (
    FORMS,
    HIDDEN,
    MAX_CUT_CHARS,
    excerpt,
    hide_secrets,
    register_secret,
)
from penstock.rollout.user_errors import shorten
from penstock.runs.export.prompt_parts import _TOOLS  # pyright: ignore[reportPrivateUsage]
from penstock.runs.mcp_server import OperatorServer
from penstock.tinker.service import _failure  # pyright: ignore[reportPrivateUsage]
from penstock.wire.client import _raise_for_status  # pyright: ignore[reportPrivateUsage]
from penstock.wire.codec import JSON, decode, encode_json
from penstock.wire.server import error_response

EXAMPLES = (
    "penstock2.abcdefgh.abcdefgh",
    "sk-penstock-abcdefgh",
    "sk-abcdefghabcdefgh",
    "AKIAabcdefghabcd",
    "eyJabcdefgh.abcdefgh.abcdefgh",
    "-----BEGIN RSA PRIVATE KEY-----",
    "bearer: abcdefgh",
    "x://me:abcdefgh@",
    "password'  =  b'abcdefghabcd",
)
"""What each form hides."""
JOINERS = ("", "-", ".", " ", "/", ":", "=", "'", "@")
SIZES = (2000, 8000)
MORE = " z" * 6000
LONG = "eyJ-" * 250_000
MODEL_ANSWERS = {"gateway/dialects/dialect.py", "runs/logged_gateway.py"}
"""Read `answer.text` of a model, which is a string."""
SHOWN_CHARS = SEARCHED_CHARS = 40_000


def cost(form: re.Pattern[str], piece: str, size: int) -> int:
    """Processor time for a text of this size, the least of three."""
    text = (piece * size)[:size]
    taken: list[int] = []
    for _ in range(3):
        started = time.thread_time_ns()
        form.sub("", text)
        taken.append(time.thread_time_ns() - started)
    return min(taken)


@pytest.mark.parametrize("at", range(len(EXAMPLES)))
def test_no_form_takes_the_square_of_what_begins_like_a_secret(at: int) -> None:
    """`eyJ-eyJ-…` took minutes for a message of a megabyte, and no other thread ran meanwhile.
    Every form against repetitions of every beginning of every secret: four times the text takes
    four times as long, not sixteen times."""
    form, _ = FORMS[at]
    assert form.search(EXAMPLES[at]) and len(EXAMPLES) == len(FORMS)
    starts = {text[:end] for text in EXAMPLES for end in range(1, len(text) + 1)}
    steep = [start + joiner for start in sorted(starts) for joiner in JOINERS]
    for _ in range(5):  # again, if something else took the time
        steep = [
            piece
            for piece in steep
            if cost(form, piece, SIZES[1]) > 9 * cost(form, piece, SIZES[0])
        ]
    assert steep == []


def test_tools_of_a_prompt_are_found_in_time_that_grows_with_it() -> None:
    """An agent's system prompt kept the export of its whole run busy for hours."""
    began = time.process_time()
    assert not _TOOLS.findall("<tools>" * 30_000)
    assert time.process_time() - began < 5
    assert _TOOLS.findall("<tools><tools>\n{}</tools>x<tools>{1}</tools>") == ["\n{}", "{1}"]


@pytest.mark.parametrize("before", ["", " ", "'", "-", "session-", "a.b.c ", "x.", "x_y-"])
def test_a_web_token_is_hidden_whatever_stands_before_it(before: str) -> None:
    token = f"eyJ{secrets.token_hex(8)}.{secrets.token_hex(20)}.{secrets.token_hex(20)}"
    assert hide_secrets(f"{before}{token}'") == f"{before}{HIDDEN}'"
    assert hide_secrets(f"{before}eyJ-{token}") == f"{before}{HIDDEN}"


# --- every door ----------------------------------------------------------------------------------


def client_error(content: bytes) -> str:
    with pytest.raises(WireError) as raised:
        _raise_for_status(httpx2.Response(400, content=content), "http://x/v1")
    return str(raised.value)


def logged(text: str) -> str:
    stream = io.StringIO()
    logs.configure("node", stream=stream)
    structlog.get_logger("x").info(text, detail=text)
    return stream.getvalue()


def tool_error(text: str) -> str:
    """Of an operator's tool that is called with a wrong argument, by whoever may only read."""
    folder = RunFolder(Path("nowhere"))
    server = OperatorServer(folder=folder, verifier=cast(Any, None))
    asked = mcp_types.CallToolRequestParams(name="samples", arguments={"order": text})
    ctx = cast(Any, SimpleNamespace(request=None))
    result = asyncio.run(server._call(ctx, asked))  # pyright: ignore[reportPrivateUsage]
    (content,) = result.content
    assert isinstance(content, mcp_types.TextContent)
    return content.text


DOORS: dict[str, Callable[[str], str]] = {
    "error body": lambda text: bytes(error_response(BadRequest(text)).body).decode(),
    "service's refusal": lambda text: client_error(
        encode_json({"error": {"code": "forbidden", "message": text[:99_000]}})
    ),
    "other server's refusal": lambda text: client_error(text.encode()),
    "result for a Tinker client": lambda text: _failure(BadRequest(text), "user").content.decode(),
    "operator's tool": tool_error,
    "outcome of a rollout": shorten,
    "log line": logged,
    "error for an agent": lambda text: str(error_for_agent(EngineError(text))),
}


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> Generator[list[int]]:
    """Lengths of the texts that are searched for secrets."""
    sizes: list[int] = []
    hide = redaction._hide  # pyright: ignore[reportPrivateUsage]

    def counted(text: str, fill: str) -> str:
        sizes.append(len(text))
        return hide(text, fill)

    monkeypatch.setattr(redaction, "_hide", counted)
    yield sizes


@pytest.mark.parametrize("door", DOORS)
def test_long_text_is_cut_before_it_is_searched(door: str, searched: list[int]) -> None:
    shown = DOORS[door](f"begin {LONG}")
    assert "begin" in shown and len(shown) < SHOWN_CHARS
    assert searched and max(searched) < SEARCHED_CHARS


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Heartbeat, {"boot_id": "b", "secret": "s", "state": LONG}),
        (ReaderRequest, {"on": LONG}),
        (ReaderRequest, {"on": "x", LONG: 1}),
    ],
)
def test_what_does_not_decode_is_not_repeated(
    kind: type, body: dict[str, Any], searched: list[int]
) -> None:
    """A value that is none of an enum's was the error's text, whatever its length."""
    with pytest.raises(BadRequest) as refused:
        decode(encode_json(body), kind, media_type=JSON)
    assert kind.__name__ in str(refused.value) and len(str(refused.value)) < 500
    assert max(searched) < SEARCHED_CHARS


def test_the_field_that_does_not_decode_is_named() -> None:
    body = {"boot_id": "b", "secret": "s", "state": "sleeping" * 999}
    with pytest.raises(BadRequest, match=r"Invalid enum value 'sleeping.* - at `\$\.state`"):
        decode(encode_json(body), Heartbeat, media_type=JSON)


# --- secrets at a cut ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_hidden", [0, 700, 4600])
@pytest.mark.parametrize("cut", [600, 600 + MAX_CUT_CHARS])
def test_no_half_of_a_secret_is_shown_where_a_text_is_cut(cut: int, num_hidden: int) -> None:
    """Of a secret without a form, half is not known as one; and what is hidden beside it must not
    move it into what is shown."""
    secret = secrets.token_urlsafe(40)
    register_secret(secret)
    parts = {secret[at : at + 12] for at in range(len(secret) - 12)}
    hidden = f" Bearer {'x' * num_hidden} " if num_hidden else " "
    for at in range(cut - len(secret) - 5, cut + 5, 7):
        room = max(0, at - len(hidden))
        words = "ab " * (room // 3) + "." * (room % 3)
        for text in (words + hidden + secret + MORE, MORE + secret + hidden + words):
            shown = excerpt(text, 600, 600)
            assert len(shown) <= 1203
            assert not any(part in shown for part in parts)


@pytest.mark.parametrize("size", [1, 900, 1497, 1498, 1503, 4000, 9000, 50_000])
def test_both_ends_of_a_text_are_kept(size: int) -> None:
    text = ("first " + "." * size + " last")[-max(size, 11) :]
    shown = excerpt(text, 900, 600)
    assert shown.endswith("last") and shown[0] == text[0]
    assert len(shown) == min(len(text), 1503)
    assert (shown == text) == (len(text) <= 1500)


@pytest.mark.parametrize("charset", ["hex", "zlib", "idna", "punycode", "utf-16"])
def test_a_server_chooses_no_codec(charset: str) -> None:
    """Some raise what stopped a node from asking the next server, some take the square of the
    text."""
    content_type = {"content-type": f"text/plain; charset={charset}"}
    answer = httpx2.Response(404, headers=content_type, content=b"not here \xff-aa" + b"x" * 9000)
    with pytest.raises(WireError, match="404 not here \ufffd-aa"):
        _raise_for_status(answer, "http://there")


def test_no_answer_of_a_server_is_read_by_its_codec() -> None:
    source = Path(redaction.__file__).parent
    used = re.compile(r"\b(?:answer|reply|response)\.text\b|\.(?:iter|aiter)_(?:text|lines)\(")
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if "httpx" in (text := path.read_text()) or "wire.client" in text
        for line in text.splitlines()
        if used.search(line.split("#")[0]) and "`" not in line
    }
    assert found == MODEL_ANSWERS
