# SPDX-License-Identifier: Apache-2.0
"""A client of a Tinker server, with a key of its own: it neither holds up the others, nor fills the
memory or the disk that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.tinker.tinker_harness import Client, make_folder, opened, pass_body

from penstock.errors import BadRequest, Forbidden, NotFound
from penstock.tinker import protocol
from penstock.tinker.journal import Kind
from penstock.tinker.protocol import MESSAGES, read_forward_backward
from penstock.tinker.service import Limits

MANY = 20_000
LINE = ([4, 5], {"target_tokens": [5, 6]})
ROOM = 1 << 20
WHOLE = ("ForwardBackwardRequest", "Datum")


def field(number: int, content: bytes) -> bytes:
    """Of protobuf, on the wire."""
    size, length = len(content), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def parts(kind: str) -> bytes:
    """A request with far more parts of one kind than any client sends, each of two bytes."""
    head = field(1, b"model") + bytes([2 << 3, 1])
    good = pass_body("model", 1, [LINE])
    many = {
        "chunks": head + field(3, field(1, b"") * MANY),
        "inputs": head + field(3, field(2, b"") * MANY),
        "settings": good + field(5, b"") * MANY,
        "other settings": good + field(7, b"") * MANY,
        "data": head + field(3, b"") * MANY,
    }
    return many[kind]


@pytest.mark.parametrize("kind", ["chunks", "inputs", "settings", "other settings", "data"])
def test_parts_are_counted_before_they_are_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute, and gigabytes, for one body, while no other client is answered."""
    made = 0

    def counted(message: Any) -> Any:
        def make(*args: Any, **fields: Any) -> Any:
            nonlocal made
            made += 1
            return message(*args, **fields)

        return make

    body = parts(kind)
    # Not the classes with their parts inside: reading one makes all of them.
    counting = {name: counted(MESSAGES[name]) for name in MESSAGES if name not in WHOLE}
    monkeypatch.setattr(protocol, "MESSAGES", {**MESSAGES, **counting})
    with pytest.raises(BadRequest, match=r"up to 64 chunks, inputs or settings|1 to 4096 data"):
        read_forward_backward(body)
    assert made <= 2


@pytest.mark.parametrize(("name", "number"), [("m" * 257, 1), ("", 1), ("m", 0), ("m", -5)])
def test_names_and_numbers_have_bounds(name: str, number: int) -> None:
    """A name of 16 MB stayed in memory for good, by request."""
    with pytest.raises(BadRequest, match="names its model"):
        read_forward_backward(pass_body(name, number, [LINE]))


def test_a_request_of_the_sdk_is_read() -> None:
    found = read_forward_backward(pass_body("m", 3, [LINE], settings={"beta": 0.5}))
    assert (found.model_id, found.number, found.settings) == ("m", 3, {"beta": 0.5})
    assert found.data[0].tokens.tolist() == LINE[0]


async def test_what_one_client_keeps_on_disk_is_bounded(tmp_path: Path) -> None:
    """Requests that wait for ever, requests that fail, and weights that are overwritten: each
    filled the disk, and the server ended for all."""
    limits = Limits(max_stored_bytes=ROOM)
    async with opened(make_folder(tmp_path), limits=limits) as alice:
        service, bob = alice.service, Client(alice.service, owner="bob")
        with pytest.raises(NotFound):  # it has no such model, and leaves no trace
            await alice.send(Kind.OPTIM, "nobody", 0, b"{}")

        session = await bob.sampling_session(await bob.create("s-b"))
        failed = await bob.sample(session, 0, [1 << 30] * 20_000)
        assert "a prompt has tokens" in await bob.error(failed)
        assert service.journal.stored_bytes("bob") < 400_000, "its body is kept"

        model = await alice.create(rank=1)
        body = pass_body(model, 3, [([4] * 10_000, {"target_tokens": [5] * 10_000})])
        with pytest.raises(Forbidden, match="its limit"):
            for number in range(3, 50):  # 1 never comes
                await alice.send(Kind.FORWARD_BACKWARD, model, number, body)

        carol = Client(service, owner="carol")
        other = await carol.create("s-c", rank=1)
        with pytest.raises(Forbidden, match="its limit"):
            for _ in range(100):
                done = await carol.next(Kind.SAVE, other, path="x", overwrite=True)
                if "its limit" in (await carol.result(done)).content.decode():
                    raise Forbidden("its limit")
        stored = sum(one.stat().st_size for one in (tmp_path / "checkpoints").rglob("state.bin"))
        assert stored < 2 * ROOM
        await bob.create("s-b2")  # another client has all its room
