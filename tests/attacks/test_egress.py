# SPDX-License-Identifier: Apache-2.0
"""Sandboxed programs reach granted hosts through the proxy, and nothing inside the network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog
from tests.unit.rollout.polling import eventually

from penstock.errors import ConfigError
from penstock.rollout.egress import proxy as proxy_module
from penstock.rollout.egress.proxy import EgressProxy, Streams
from penstock.rollout.egress.rules import EgressRules

GRANTED = "api.example.com"
PUBLIC = "93.184.215.14"
METADATA = "169.254.169.254"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


@dataclass
class Outside:
    """The world behind the proxy: a name server, and one real server at every address."""

    addresses: dict[str, list[Sequence[str]]] = field(
        default_factory=dict[str, list[Sequence[str]]]
    )
    """By name, the answers of the name server in turn; the last one is repeated."""
    reply: bytes = OK
    lookups: list[str] = field(default_factory=list[str])
    dialled: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    heard: list[bytes] = field(default_factory=list[bytes])
    port: int = 0

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.lookups.append(host)
        answers = self.addresses.get(host, [[PUBLIC]])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def connect(self, address: str, port: int) -> Streams:
        self.dialled.append((address, port))
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard.append(await reader.read(1 << 16))
        writer.write(self.reply)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


@dataclass
class Inside:
    """A program in a sandbox: it has the socket of the proxy, and nothing else."""

    proxy: EgressProxy
    outside: Outside

    async def send(self, raw: bytes) -> bytes:
        """All that comes back on one connection."""
        reader, writer = await asyncio.open_unix_connection(self.proxy.path)
        writer.write(raw)
        answer = await asyncio.wait_for(reader.read(1 << 20), 60)
        while more := await asyncio.wait_for(reader.read(1 << 20), 60):
            answer += more
        writer.close()
        await writer.wait_closed()
        return answer

    async def status(self, raw: bytes) -> int:
        answer = await self.send(raw)
        return int(answer.split()[1]) if answer else 0

    async def connect(self, authority: str) -> int:
        return await self.status(
            f"CONNECT {authority} HTTP/1.1\r\nhost: {authority}\r\n\r\n".encode()
        )

    async def get(self, url: str, host: str = "") -> int:
        authority = url.partition("://")[2].partition("/")[0]
        return await self.status(
            f"GET {url} HTTP/1.1\r\nhost: {host or authority}\r\n\r\n".encode()
        )


@asynccontextmanager
async def sandbox(folder: Path, hosts: Sequence[str] = (GRANTED,)) -> AsyncGenerator[Inside]:
    outside = Outside()
    server = await asyncio.start_server(outside.serve, "127.0.0.1", 0)
    outside.port = server.sockets[0].getsockname()[1]
    async with EgressProxy(
        path=folder / "egress.sock",
        hosts=hosts,
        row_id="p0-1.0.1",
        resolve=outside.resolve,
        connect=outside.connect,
    ) as proxy:
        yield Inside(proxy, outside)
    server.close()


@pytest.fixture
async def inside(tmp_path: Path) -> AsyncIterator[Inside]:
    async with sandbox(tmp_path) as inside:
        yield inside


# --- what works ---------------------------------------------------------------------------------


async def test_a_granted_host_is_reached_and_recorded(inside: Inside) -> None:
    """Plain requests, bodies and tunnels work, and each is recorded with the trajectory."""
    answer = await inside.send(
        b"POST http://api.example.com/v1?x=1 HTTP/1.1\r\nhost: api.example.com\r\n"
        b"content-length: 3\r\nproxy-authorization: secret\r\nx-own: 1\r\n\r\nabc"
    )
    assert answer.endswith(b"hi") and b"200" in answer.splitlines()[0]
    [heard] = inside.outside.heard
    assert heard.startswith(b"POST /v1?x=1 HTTP/1.1\r\n") and heard.endswith(b"abc")
    assert b"secret" not in heard and b"x-own: 1" in heard.lower()
    tunnel = b"CONNECT api.example.com:443 HTTP/1.1\r\nhost: api.example.com:443\r\n\r\nhello"
    assert (await inside.send(tunnel)).endswith(OK)
    assert inside.outside.heard[1] == b"hello"
    assert inside.outside.dialled == [(PUBLIC, 80), (PUBLIC, 443)]
    await eventually(lambda: len(inside.proxy.records) == 2)
    plain, tunnelled = inside.proxy.records
    assert (plain.method, plain.host, plain.status) == ("POST", "api.example.com:80", 200)
    assert plain.sent_bytes > 3 and plain.received_bytes == 2 and plain.ms > 0
    assert (tunnelled.method, tunnelled.host) == ("CONNECT", "api.example.com:443")
    assert tunnelled.sent_bytes == 5 and tunnelled.received_bytes == len(OK)


async def test_chunked_bodies_pass_and_large_answers_too(inside: Inside) -> None:
    """The proxy writes framing anew, and loses no byte."""
    inside.outside.reply = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"".join(b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n" for _ in range(4))
        + b"0\r\n\r\n"
    )
    answer = await inside.send(
        b"PUT http://api.example.com/ HTTP/1.1\r\nhost: api.example.com\r\n"
        b"transfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"
    )
    assert b"abcde" in inside.outside.heard[0]
    assert answer.count(b"x") == 4 * 0xFFFF
    assert inside.proxy.records[0].received_bytes == 4 * 0xFFFF


# --- 80 vectors and more ------------------------------------------------------------------------

ADDRESS_FORMS = (
    *("127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0x7f.1"),
    *(
        "0177.0.0.1",
        "017700000001",
        "0177.0x0.1",
        "127.000.000.001",
        "00000127.0.0.1",
        "0",
        "0.0.0.0",
    ),
    *("169.254.169.254", "2852039166", "0xa9fea9fe", "0xA9.0xFE.0xA9.0xFE", "0251.0376.0251.0376"),
    *(
        "169.254.43518",
        "10.0.0.1",
        "10.1",
        "192.168.1.1",
        "172.16.0.1",
        "100.64.0.1",
        "255.255.255.255",
    ),
    *("[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::ffff:169.254.169.254]"),
    *("[0:0:0:0:0:ffff:a9fe:a9fe]", "[64:ff9b::a9fe:a9fe]", "[fe80::1]", "[fe80::1%25eth0]"),
    *("[fd00:ec2::254]", "[fc00::1]", "[::127.0.0.1]", "[2002:7f00:1::]", "[ff02::1]", "::1"),
    *("localhost", "LOCALHOST", "localhost.localdomain", "x.localhost", "metadata"),
    *("metadata.google.internal", "instance-data", "printer.local", "127.0.0.1.nip.io"),
    *("api.example.com.", "api.example.com..", ".api.example.com", "api..example.com"),
    *("api.example.com.evil.net", "evil-api.example.com", "example.com", "xapi.example.com"),
    *("api.example.com@127.0.0.1", "user:pass@api.example.com", "api.example.com%00.evil.net"),
    *("api.example.com%2eevil.net", "127.0.0.1%23api.example.com", "api.example.com#@evil.net"),
    *("api.example.com\\@evil.net", "api.example.com?@evil.net", "api.example.com;evil.net"),
    *("api_example_com", "api.example.com:443:80", "①②⑦.⓪.⓪.①", "аpi.example.com"),
    *(
        "api.example。com",
        "xn--pi-7kc.example.com",
        "-api.example.com",
        "a" * 254,
        "",
        "*",
        "*.example.com",
    ),
)
INTERNAL = (
    *("0.0.0.0", "10.9.8.7", "100.64.0.1", "100.127.255.254", "127.0.0.1", "127.255.0.9", METADATA),
    *("169.254.170.2", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.168.0.1", "198.18.0.1"),
    *(
        "192.0.2.1",
        "198.51.100.1",
        "203.0.113.1",
        "192.88.99.1",
        "224.0.0.1",
        "239.1.2.3",
        "240.0.0.1",
    ),
    *("255.255.255.255", "100.100.100.200", "168.63.129.16", "::", "::1", "::ffff:127.0.0.1"),
    *("::ffff:93.184.215.14", "::ffff:169.254.169.254", "::7f00:1", "64:ff9b::7f00:1"),
    *(
        "64:ff9b:1::1",
        "2002:7f00:1::",
        "2001:0:7f00:1::",
        "2001:db8::1",
        "fc00::1",
        "fd00:ec2::254",
    ),
    *("fe80::1", "fe80::1%2", "fec0::1", "ff02::1", "ff0e::1"),
    *("100::1", "5f00::1", "3fff::1"),
)
SMUGGLED: dict[str, bytes] = {
    "two lengths": b"content-length: 3\r\ncontent-length: 5\r\n\r\nabcde",
    "length and chunks": b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /",
    "unknown coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "two codings": b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "negative length": b"content-length: -1\r\n\r\n",
    "signed length": b"content-length: +3\r\n\r\nabc",
    "hex length": b"content-length: 0x3\r\n\r\nabc",
    "space before the colon": b"content-length : 3\r\n\r\nabc",
    "bare return": b"x: 1\rhost: evil.net\r\n\r\n",
    "NUL in a header": b"x: 1\x002\r\n\r\n",
    "folded host": b"x: 1\r\nhost: evil.net\r\n\r\n",
    "bad chunk": b"transfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "endless head": b"x: " + b"y" * (70 << 10) + b"\r\n\r\n",
}
MISMATCHED: dict[str, bytes] = {
    "Host names another": b"GET http://api.example.com/ HTTP/1.1\r\nhost: evil.net\r\n\r\n",
    "Host names metadata": b"GET http://api.example.com/ HTTP/1.1\r\nhost: 169.254.169.254\r\n\r\n",
    "Host has a port": b"GET http://api.example.com/ HTTP/1.1\r\nhost: api.example.com:22\r\n\r\n",
    "target names another": b"GET http://evil.net/ HTTP/1.1\r\nhost: api.example.com\r\n\r\n",
    "tunnel to another": b"CONNECT evil.net:443 HTTP/1.1\r\nhost: api.example.com:443\r\n\r\n",
    "tunnel, Host another": b"CONNECT api.example.com:443 HTTP/1.1\r\nhost: evil.net:443\r\n\r\n",
    "origin form": b"GET / HTTP/1.1\r\nhost: api.example.com\r\n\r\n",
    "origin form of a URL": b"GET //api.example.com/ HTTP/1.1\r\nhost: api.example.com\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nhost: api.example.com\r\n\r\n",
    "other scheme": b"GET file:///etc/passwd HTTP/1.1\r\nhost: api.example.com\r\n\r\n",
    "https in clear": b"GET https://api.example.com/ HTTP/1.1\r\nhost: api.example.com\r\n\r\n",
    "gopher": b"GET gopher://api.example.com/ HTTP/1.1\r\nhost: api.example.com\r\n\r\n",
    "tunnel without port": b"CONNECT api.example.com HTTP/1.1\r\nhost: api.example.com\r\n\r\n",
    "tunnel to a path": b"CONNECT api.example.com:443/x HTTP/1.1\r\nhost: api.example.com\r\n\r\n",
    "no host": b"GET http://api.example.com/ HTTP/1.1\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "SOCKS": b"\x05\x01\x00\r\n\r\n",
}
PORTS = ("api.example.com:22", "api.example.com:80", "api.example.com:8443", "api.example.com:0")


def test_there_are_enough_vectors() -> None:
    """The acceptance count of C5 is 80 vectors."""
    tables = (ADDRESS_FORMS, INTERNAL, SMUGGLED, MISMATCHED, PORTS)
    assert sum(map(len, tables)) >= 80
    assert all(len(set(table)) == len(table) for table in tables)


async def test_no_form_of_an_address_gets_through(inside: Inside) -> None:
    """Decimal, octal, hex, IPv6, user names, dots, escapes and look-alikes: nothing is dialled."""
    reached: list[str] = []
    for form in ADDRESS_FORMS:
        statuses = {await inside.connect(f"{form}:443"), await inside.get(f"http://{form}/")}
        if not statuses <= {400, 403}:
            reached.append(form)
    assert reached == []
    assert inside.outside.lookups == [] and inside.outside.dialled == []


async def test_granted_names_that_lead_inside_are_refused(inside: Inside) -> None:
    """Whoever controls the name's zone cannot point it at an internal address."""
    for address in INTERNAL:
        for answers in ([address], [PUBLIC, address], [address, PUBLIC]):
            inside.outside.addresses[GRANTED] = [answers]
            assert await inside.connect(f"{GRANTED}:443") == 403, answers
            assert await inside.get(f"http://{GRANTED}/") == 403, answers
    assert inside.outside.dialled == []
    assert "not a public address" in inside.proxy.records[-1].reason


async def test_rebinding_does_not_move_a_checked_name(inside: Inside) -> None:
    """A name is looked up once per request, and the checked address is the one that is dialled."""
    inside.outside.addresses[GRANTED] = [[PUBLIC], ["127.0.0.1"]]
    assert await inside.get(f"http://{GRANTED}/") == 200
    assert inside.outside.lookups == [GRANTED] and inside.outside.dialled == [(PUBLIC, 80)]
    assert await inside.get(f"http://{GRANTED}/") == 403, "the second lookup leads inside"
    assert inside.outside.dialled == [(PUBLIC, 80)]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed_and_the_next_request_is_checked(
    inside: Inside, status: int
) -> None:
    """A granted host that redirects to the metadata address gains nothing."""
    head = f"HTTP/1.1 {status} Moved\r\nlocation: http://{METADATA}/latest\r\n"
    inside.outside.reply = head.encode() + b"content-length: 0\r\n\r\n"
    assert await inside.get(f"http://{GRANTED}/") == status
    assert inside.outside.dialled == [(PUBLIC, 80)]
    assert await inside.get(f"http://{METADATA}/latest") == 403
    assert len(inside.outside.dialled) == 1


async def test_smuggled_requests_reach_nobody(inside: Inside) -> None:
    """Messages whose end can be read in two ways are refused, or read in one way only."""
    for name, rest in SMUGGLED.items():
        inside.outside.heard.clear()
        raw = b"POST http://api.example.com/ HTTP/1.1\r\nhost: api.example.com\r\n" + rest
        status, heard = await inside.status(raw), b"".join(inside.outside.heard).lower()
        assert status in (400, 403) or b"content-length" not in heard, name
        assert b"evil" not in heard and b"get /" not in heard, name


async def test_a_second_request_on_a_connection_is_not_forwarded(inside: Inside) -> None:
    """One connection, one request: what follows is neither checked by luck nor passed on."""
    first = b"GET http://api.example.com/ HTTP/1.1\r\nhost: api.example.com\r\n\r\n"
    second = b"GET http://169.254.169.254/ HTTP/1.1\r\nhost: 169.254.169.254\r\n\r\n"
    answer = await inside.send(first + second)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert len(inside.outside.heard) == 1 and METADATA.encode() not in inside.outside.heard[0]


async def test_target_and_host_must_agree(inside: Inside) -> None:
    """Absolute form, Host and method must name one granted host in the usual form."""
    for name, raw in MISMATCHED.items():
        assert await inside.status(raw) in (400, 403), name
    assert inside.outside.dialled == []


async def test_only_granted_ports_are_reached(tmp_path: Path) -> None:
    """A name alone grants 80 in clear and 443 as a tunnel; NAME:PORT grants that port only."""
    async with sandbox(tmp_path, [GRANTED, "other.example.com:8443"]) as inside:
        for authority in PORTS:
            assert await inside.connect(authority) in (400, 403), authority
        for url in ("http://api.example.com:443/", "http://api.example.com:22/"):
            assert await inside.get(url) == 403
        assert await inside.connect("other.example.com:443") == 403
        assert inside.outside.dialled == []
        assert await inside.get("http://other.example.com:8443/") == 200


async def test_without_grants_nothing_is_reached(tmp_path: Path) -> None:
    """Default deny."""
    async with sandbox(tmp_path, []) as inside:
        assert await inside.connect(f"{GRANTED}:443") == 403
        assert "not granted" in inside.proxy.records[0].reason


async def test_an_internal_address_needs_its_own_grant(tmp_path: Path) -> None:
    """The owner may grant one address and port, for a judge nearby; never a metadata address."""
    async with sandbox(tmp_path, ["10.0.0.5:8000", f"{METADATA}:80"]) as inside:
        inside.outside.addresses = {"10.0.0.5": [["10.0.0.5"]], METADATA: [[METADATA]]}
        assert await inside.get("http://10.0.0.5:8000/v1") == 200
        assert await inside.get("http://10.0.0.5:8001/v1") == 403
        assert await inside.get("http://10.0.0.6:8000/v1") == 403
        assert await inside.get(f"http://{METADATA}/") == 403
        assert inside.outside.dialled == [("10.0.0.5", 8000)]


@pytest.mark.parametrize(
    "grant",
    [
        *("*", "*.example.com", "http://api.example.com", "api.example.com/", "10.0.0.5", "a b"),
        *("localhost", "localhost:8000", "0x7f.1:80", "api.example.com:99999", "", "é.example"),
        "[::1]:80",
    ],
)
def test_grants_that_are_too_wide_or_unclear_are_refused(grant: str) -> None:
    """A grant is one host; a mistake in it ends the start, not the fence."""
    with pytest.raises(ConfigError, match="grants"):
        EgressRules([grant])


async def test_a_program_cannot_hold_the_proxy(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections, time and bytes of one attempt are bounded."""
    monkeypatch.setattr(proxy_module, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(proxy_module, "HEAD_S", 0.2)
    silent = [await asyncio.open_unix_connection(inside.proxy.path) for _ in range(8)]
    ends = await asyncio.gather(*(reader.read() for reader, _ in silent))
    assert sum(b"502" in end for end in ends) == 4 and ends.count(b"") == 4
    for _, writer in silent:
        writer.close()
        await writer.wait_closed()
    monkeypatch.setattr(proxy_module, "MAX_BYTES", 1000)
    inside.outside.reply = b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n" + b"x" * 5000
    answer = await inside.send(
        b"GET http://api.example.com/ HTTP/1.1\r\nhost: api.example.com\r\n\r\n"
    )
    assert answer.count(b"x") < 5000
    assert "bytes" in inside.proxy.records[-1].reason


async def test_nothing_is_left_when_the_attempt_ends(tmp_path: Path) -> None:
    """Open tunnels end with the attempt, and its socket is gone."""
    async with sandbox(tmp_path) as inside:
        reader, writer = await asyncio.open_unix_connection(inside.proxy.path)
        writer.write(b"CONNECT api.example.com:443 HTTP/1.1\r\nhost: api.example.com:443\r\n\r\n")
        assert b"200" in await reader.readuntil(b"\r\n\r\n")
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    with pytest.raises(FileNotFoundError):
        await asyncio.open_unix_connection(tmp_path / "egress.sock")


async def test_the_real_name_server_and_a_real_connection(tmp_path: Path) -> None:
    """Without fakes: an address that the owner granted is reached, loopback by name is not."""
    outside = Outside()
    server = await asyncio.start_server(outside.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    grants = [f"127.0.0.1:{port}"]
    async with EgressProxy(path=tmp_path / "egress.sock", hosts=grants, row_id="r") as proxy:
        inside = Inside(proxy, outside)
        assert await inside.get(f"http://127.0.0.1:{port}/") == 200
        assert await inside.get(f"http://localhost:{port}/") == 403
    server.close()
    assert len(outside.heard) == 1


async def test_a_program_does_not_fill_the_log_with_requests(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by their number nor by the length of the names that it chooses."""
    monkeypatch.setattr(proxy_module, "MAX_RECORDS", 5)
    with structlog.testing.capture_logs() as lines:
        for _ in range(12):
            long = "M" * 5000
            assert (
                await inside.status(
                    f"{long} http://x.example/ HTTP/1.1\r\nhost: x.example\r\n\r\n".encode()
                )
                == 403
            )
        await eventually(lambda: len(inside.proxy.records) == 5)
    assert [line["event"] for line in lines].count("egress") == 5
    assert len(str(lines)) < 5 * 2000
