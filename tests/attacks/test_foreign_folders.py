# SPDX-License-Identifier: Apache-2.0
"""A run folder of somebody else can be opened: it takes nothing from the environment of who opens
it, writes through no link, and has none of their processes ended."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from msgspec import structs
from tests.unit.dashboard.recorded_run import record_run

from penstock import load_config
from penstock.config import demo_config
from penstock.dataflow.ledger.tables import open_tables
from penstock.dataflow.records import RowRecord
from penstock.durable import write_durably
from penstock.errors import ConfigError, LaunchError, StoreError, Unauthorized, WireError
from penstock.fleet import process_state
from penstock.fleet.run_folder import RunFolder
from penstock.runs import control
from penstock.runs.control import make_status_client, stop_run
from penstock.runs.decoded import copy_small_files
from penstock.runs.evaluations import read_best
from penstock.runs.export.trajectories import export_trajectories
from penstock.runs.fork import fork_run
from penstock.runs.listing import list_runs
from penstock.runs.result_files import read_results
from penstock.runs.target import read_target
from penstock.runs.tokens import revoke, rotate
from penstock.trainer.checkpoint_manifest import (
    CheckpointManifest,
    Cursor,
    UnusableCheckpoint,
    read_checkpoint_manifest,
    write_checkpoint_manifest,
)
from penstock.types import PolicyName, RowId
from penstock.weights.manifest import FileEntry, digest_of, encode_manifest, make_manifest
from penstock.weights.store import DirectoryStore
from penstock.weights.tensors import TensorEntry
from penstock.wire import trust
from penstock.wire.auth import Audience, Role, Signer, Verifier
from penstock.wire.certificates import Authority
from penstock.wire.codec import encode_json

SECRET = "hf_of_who_opens_it"
STOLEN = [
    "name: ${oc.env:RED_SECRET}",
    "name: ${${output_dir}:RED_SECRET}\noutput_dir: oc.env",
    "name: a-${oc.decode:${oc.env:RED_SECRET}}",
    "name: \\\\${oc.env:RED_SECRET}",
    "name: ${oc.env:RED_UNSET}",
]


def foreign_folder(path: Path, name: str = "") -> RunFolder:
    folder = RunFolder(path)
    folder.write_config(demo_config(0))
    Signer.create(folder.keys, "theirs")
    if name:
        text = re.sub(r"(?m)^(name|output_dir): .*\n", "", folder.config_file.read_text())
        folder.config_file.write_text(f"{name}\n{text}")
    return folder


def _openings() -> dict[str, Callable[[RunFolder], object]]:
    return {
        "read_config": lambda folder: folder.read_config(),
        "read_target": lambda folder: read_target(folder.path),
        "load_config": lambda folder: load_config(folder.path),
        "fork": lambda folder: fork_run(folder, (), 1, "new"),
    }


@pytest.mark.parametrize("name", STOLEN)
@pytest.mark.parametrize("opening", _openings())
def test_a_stored_config_takes_nothing_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, opening: str
) -> None:
    """The name of a run stands in every token, and so went to the server that the folder names."""
    monkeypatch.setenv("RED_SECRET", SECRET)
    folder = foreign_folder(tmp_path / "evil", name)
    with pytest.raises(ConfigError, match=r"name: \$\{\} is for run files") as refused:
        _openings()[opening](folder)
    assert SECRET not in str(refused.value)


def test_a_list_of_runs_shows_such_a_folder_and_asks_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RED_SECRET", SECRET)
    foreign_folder(tmp_path / "evil", STOLEN[0])
    [found] = list_runs(tmp_path)
    assert found.state == "unreadable"
    assert "is for run files" in found.why and SECRET not in found.why


def test_text_that_looks_like_an_interpolation_stays(tmp_path: Path) -> None:
    """What `dump` wrote is read again: it escapes such text."""
    config = demo_config(0, ["output_dir='\\${oc.env:HOME}'"])
    folder = RunFolder(tmp_path / "run")
    folder.write_config(config)
    assert folder.read_config().output_dir == config.output_dir == "${oc.env:HOME}"


@pytest.mark.parametrize("is_hard", [False, True])
def test_a_file_is_never_written_through_a_link(tmp_path: Path, is_hard: bool) -> None:
    """`penstock stop`, `scale` and `token` write into the folder, perhaps as root."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    planted = tmp_path / ".new-admin.head"
    if is_hard:
        planted.hardlink_to(precious)
    else:
        planted.symlink_to(precious)
    write_durably(tmp_path / "admin.head", b"1 abc\n")
    assert precious.read_text() == "precious"
    assert (tmp_path / "admin.head").read_text() == "1 abc\n"
    assert not (tmp_path / "admin.head").is_symlink()


def test_stop_ends_no_process_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pid in the lock is what the owner of the folder wrote there."""
    folder = foreign_folder(tmp_path / "evil")
    (tmp_path / "evil" / "run").mkdir()
    with subprocess.Popen(["sleep", "600"]) as victim:
        lock = os.open(tmp_path / "evil" / "run" / "lock", os.O_RDWR | os.O_CREAT)
        try:
            os.write(lock, f"{victim.pid}\n".encode())
            fcntl.flock(lock, fcntl.LOCK_EX)
            monkeypatch.setattr(control, "owner_of", lambda _: os.getuid() + 1)  # pyright: ignore
            with pytest.raises(LaunchError, match="not of the user who owns the lock"):
                stop_run(folder, timeout_s=1.0)
            assert victim.poll() is None
            assert process_state.owner_of(victim.pid) == os.getuid()
        finally:
            os.close(lock)
            victim.kill()


@pytest.fixture
def own(tmp_path: Path) -> RunFolder:
    """A run of who opens the foreign folder, with the same name."""
    folder = foreign_folder(tmp_path / "own")
    (folder.path / "run").mkdir()
    (folder.path / "run" / "lock").write_text("")
    return folder


KEYS = ("keys", "keys/signing.key", "keys/root.key")


def _linked(own: RunFolder, path: Path, what: str) -> RunFolder:
    """A foreign folder in which this is a link to the same place of `own`."""
    folder = foreign_folder(path)
    there = folder.path / what
    if there.is_dir():
        there.rename(folder.path / "elsewhere")
    else:
        there.parent.mkdir(exist_ok=True)
        there.unlink(missing_ok=True)
    there.symlink_to(own.path / what)
    return folder


@pytest.mark.parametrize("what", KEYS)
def test_no_token_is_signed_with_a_key_to_which_the_folder_links(
    own: RunFolder, tmp_path: Path, what: str
) -> None:
    """The name of the run and the address that gets its tokens are what the folder says: a token
    that the key of another run signs would be the owner's of that folder."""
    folder = _linked(own, tmp_path / "evil", what)
    with pytest.raises(ConfigError, match="is a link, which may lead to a file of yours"):
        folder.token("theirs", Role.READER, ttl_s=60)
        revoke(folder, name="somebody")  # by the root key
    [found] = [one for one in list_runs(tmp_path) if one.name == "own"]
    assert found.state == "new"


def test_a_hard_link_to_a_key_of_another_user_is_one_too(
    own: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = foreign_folder(tmp_path / "evil")
    key = folder.keys / "signing.key"
    key.unlink()
    key.hardlink_to(own.keys / "signing.key")
    folder.token("theirs", Role.READER, ttl_s=60)  # a copy with `cp -al`, of the same user
    if os.getuid() == 0:
        os.chown(folder.keys, 12345, -1)
        with pytest.raises(ConfigError, match="is a link"):
            folder.token("theirs", Role.READER, ttl_s=60)


@pytest.mark.parametrize("what", ["run", "run/lock"])
def test_stop_does_not_follow_a_lock_to_another_run(
    own: RunFolder, tmp_path: Path, what: str
) -> None:
    folder = _linked(own, tmp_path / "evil", what)
    with subprocess.Popen(["sleep", "600"]) as launcher, (own.path / "run/lock").open("w") as lock:
        try:
            lock.write(f"{launcher.pid}\n")
            lock.flush()
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert own.launcher_pid() == launcher.pid
            with pytest.raises(ConfigError, match="is a link"):
                stop_run(folder, timeout_s=1.0)
            with pytest.raises(ConfigError, match="is a link"), folder.locked():
                pass
            assert launcher.poll() is None
        finally:
            launcher.kill()


@pytest.mark.parametrize("name", ["{victim}", "../../settings", ""])
def test_an_export_writes_no_file_that_the_ledger_names_elsewhere(
    tmp_path: Path, name: str
) -> None:
    """Ids of rows are names of documents; the checksums of a ledger hold nobody back."""
    victim = tmp_path / "settings"
    name = name.format(victim=victim)
    run = record_run(tmp_path / "evil")
    tables = open_tables(run / "ledger")
    [first, *_] = tables.read(RowRecord, "space = 'train' ORDER BY arrival DESC")
    forged = structs.replace(first.summary, row_id=RowId(name))
    tables.commit([structs.replace(first, summary=forged, delivered_at=0.0)])
    tables.close()
    with pytest.raises(StoreError, match="names no file"):
        export_trajectories(run, tmp_path / "out" / "documents", format="atif")
    assert not list(tmp_path.rglob("settings*")) and not list((tmp_path / "out").iterdir())


def test_the_authority_of_a_foreign_run_vouches_for_its_own_addresses_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of runs asks the servers of several owners: who sits between us and one of them would
    else get our token with a certificate of his own authority."""
    for name in (trust.CA_ENV, trust.CERTIFICATE_ENV, trust.KEY_ENV):
        monkeypatch.delenv(name, raising=False)
    authority = Authority.create(tmp_path / "tls").certificate
    evil, other = RunFolder(tmp_path / "evil"), "https://192.0.2.1:18500"
    evil.write_config(demo_config(0))
    evil.allocate_endpoints(tmp_path, ())
    endpoints = evil.endpoints()
    encoded = encode_json(replace(endpoints, dataflow="https://192.0.2.9:18500", ca=str(authority)))
    (evil.path / "run" / "endpoints.json").write_bytes(encoded)
    before = _num_authorities(other)
    assert _num_authorities(evil.endpoints().dataflow) == before + 1
    assert _num_authorities(other) == before
    assert trust.CA_ENV not in os.environ, "children inherit it"


def _num_authorities(url: str) -> int:
    context = trust.client_context(url)
    assert isinstance(context, ssl.SSLContext)
    return len(context.get_ca_certs())


# --- the folder is replaced while it is open ------------------------------------------------------


def _replace(folder: RunFolder, own: RunFolder) -> None:
    """What its owner can do at any moment."""
    folder.path.rename(folder.path.with_name("old"))
    folder.path.symlink_to(own.path)


@contextmanager
def _server(answer: Callable[[], None]) -> Generator[tuple[str, list[str]]]:
    """Refuses every call with 401, after `answer`: its address, and the tokens that it was sent."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["authorization"].removeprefix("Bearer "))
            answer()
            self.send_response(401)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


def _serve_at(folder: RunFolder, url: str) -> None:
    folder.allocate_endpoints(folder.path.parent, ())
    encoded = encode_json(replace(folder.endpoints(), dataflow=url))
    (folder.path / "run" / "endpoints.json").write_bytes(encoded)


def _is_accepted(own: RunFolder, token: str) -> bool:
    verifier = Verifier.read(own.keys, run="theirs", audience=Audience.DATAFLOW)
    try:
        verifier.verify(token)
    except Unauthorized:
        return False
    return True


def test_a_refusal_brings_no_token_of_the_run_that_the_folder_leads_to_now(
    own: RunFolder, tmp_path: Path
) -> None:
    """A client that is refused makes a new token, and sends it to the address that it has."""
    evil = foreign_folder(tmp_path / "evil")
    swaps = iter([lambda: _replace(evil, own)])
    with _server(lambda: next(swaps, lambda: None)()) as (url, seen):
        _serve_at(evil, url)
        with (
            closing(make_status_client(RunFolder(evil.path), "theirs", patience_s=0.0)) as client,
            pytest.raises(WireError),
        ):
            client.status()
    assert seen and evil.path.is_symlink()
    assert [token for token in seen if _is_accepted(own, token)] == []


def test_a_new_key_of_the_same_folder_is_used_at_once(tmp_path: Path) -> None:
    """`penstock token rotate RUN --now` beside a long `penstock top RUN`."""
    own = foreign_folder(tmp_path / "own", "name: theirs")
    keys: list[str] = []

    def rotate_once() -> None:
        keys.append(rotate(own, now=True) if not keys else keys[0])

    with _server(rotate_once) as (url, seen):
        _serve_at(own, url)
        with (
            closing(make_status_client(own, "theirs", patience_s=0.0)) as client,
            pytest.raises(WireError),
        ):
            client.status()
    assert [_is_accepted(own, token) for token in seen] == [False, True]


def test_a_run_folder_is_opened_through_a_link_and_moved_between_commands(
    own: RunFolder, tmp_path: Path
) -> None:
    """By its own user: a link to the newest run, and a run that was moved to another disk."""
    _serve_at(own, "http://127.0.0.1:1")
    link = tmp_path / "latest"
    link.symlink_to(own.path)
    opened = RunFolder(link)
    assert _is_accepted(own, opened.token("theirs", Role.READER, ttl_s=60))
    assert opened.endpoints().dataflow == "http://127.0.0.1:1"
    moved = RunFolder(own.path.rename(tmp_path / "moved"))
    assert _is_accepted(moved, moved.token("theirs", Role.READER, ttl_s=60))


@pytest.mark.parametrize("first", ["token", "endpoints", "lock_holder"])
@pytest.mark.parametrize("then", ["token", "endpoints", "lock_holder"])
def test_address_key_and_lock_are_of_one_folder(
    own: RunFolder, tmp_path: Path, first: str, then: str
) -> None:
    """In either order: commands for operators made the token before they read the address."""
    _serve_at(own, "http://127.0.0.1:1")
    evil = foreign_folder(tmp_path / "evil")
    _serve_at(evil, "http://127.0.0.1:2")
    (evil.path / "run" / "lock").write_text("")
    uses: dict[str, Callable[[RunFolder], object]] = {
        "token": lambda folder: folder.token("theirs", Role.ADMIN, ttl_s=60),
        "endpoints": RunFolder.endpoints,
        "lock_holder": RunFolder.lock_holder,
    }
    opened = RunFolder(evil.path)
    uses[first](opened)
    _replace(evil, own)
    with pytest.raises(ConfigError, match="its run folder is another one"):
        uses[then](opened)


# --- what never ends ------------------------------------------------------------------------------


def _endless(path: Path, kind: str, own: RunFolder) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "long":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else own.path / "config.yaml")


@pytest.mark.parametrize("kind", ["link", "device", "pipe", "long"])
@pytest.mark.parametrize("what", ["run/launcher.json", "run/endpoints.json", "keys/signing.key"])
def test_a_list_of_runs_reads_nothing_that_never_ends(
    own: RunFolder, tmp_path: Path, what: str, kind: str
) -> None:
    evil = foreign_folder(tmp_path / "shared" / "evil")
    _serve_at(evil, "http://127.0.0.1:1")
    _endless(evil.path / what, kind, own)
    why = {"pipe": "not a regular file", "long": "longer than"}.get(kind, "is a link")
    [found] = list_runs(tmp_path / "shared")
    assert found.state == ("unreadable" if what == "run/launcher.json" else "new")
    with pytest.raises(ConfigError, match=why):
        evil.launcher()
        evil.endpoints()
        evil.token("theirs", Role.READER, ttl_s=60)


def test_a_lock_that_is_a_pipe_blocks_nobody(own: RunFolder, tmp_path: Path) -> None:
    evil = foreign_folder(tmp_path / "shared" / "evil")
    _endless(evil.path / "run" / "lock", "pipe", own)
    [found] = list_runs(tmp_path / "shared")
    assert found.state == "unreadable" and "not a regular file" in found.why


def test_a_stored_report_and_a_config_have_an_end(own: RunFolder, tmp_path: Path) -> None:
    evil = foreign_folder(tmp_path / "evil")
    _endless(evil.report, "pipe", own)
    with pytest.raises(ConfigError, match="not a regular file"):
        control.read_stored_report(evil)
    os.truncate(evil.config_file, 1 << 40)
    with pytest.raises(ConfigError, match="longer than"):
        evil.read_config()


@pytest.mark.parametrize("kind", ["link", "device", "pipe", "long"])
@pytest.mark.parametrize("what", ["metrics.jsonl", "evaluations/best.json", "evaluations/p@1.json"])
def test_metrics_and_results_have_an_end(
    own: RunFolder, tmp_path: Path, what: str, kind: str
) -> None:
    evil = foreign_folder(tmp_path / "shared" / "evil")
    path = evil.path / what
    _endless(path, kind, own)
    if what == "metrics.jsonl":
        [found] = list_runs(tmp_path / "shared")
        assert found.state == ("new" if kind == "long" else "unreadable")
    elif what == "evaluations/best.json":
        with pytest.raises(ConfigError, match="cannot be read"):
            read_best(evil.path)
    else:
        with pytest.raises(ConfigError, match=r"cannot read|more than"):
            read_results(path)


def test_the_best_version_of_a_foreign_run_has_the_form_of_ours(tmp_path: Path) -> None:
    """`penstock status` printed what it names, and failed on what it does not."""
    evil = foreign_folder(tmp_path / "evil")
    path = evil.path / "evaluations" / "best.json"
    path.parent.mkdir()
    for content in ("{}", '{"step": []}', "[]"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="is damaged"):
            read_best(evil.path)


@pytest.mark.parametrize("number", [0, -1, 1 << 40])
def test_a_checkpoint_names_no_endless_list_of_ranks(tmp_path: Path, number: int) -> None:
    cursor = Cursor(number=1, seq=1, incarnation=0)
    state = CheckpointManifest(policy="p", cursor=cursor, files={}, num_ranks=number)
    write_checkpoint_manifest(tmp_path, state)
    with pytest.raises(UnusableCheckpoint, match="ranks, not 1 to"):
        read_checkpoint_manifest(tmp_path)


@pytest.mark.parametrize("kind", ["link", "device", "pipe", "long"])
def test_files_beside_the_tensors_are_no_links_and_have_an_end(
    own: RunFolder, tmp_path: Path, kind: str
) -> None:
    """`penstock samples` copies them, to decode with the run's own tokenizer."""
    evil = foreign_folder(tmp_path / "evil")
    policy = PolicyName(next(iter(evil.read_config().models)))
    files = [
        FileEntry(name=name, blob=digest_of(name.encode()), bytes=1)
        for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]
    tensor = TensorEntry(name="one", dtype="F32", shape=(1,), digest=digest_of(b"tensor"))
    store = DirectoryStore(evil.weights)
    store.prepare()
    store.put_manifest(encode_manifest(make_manifest(policy, 0, files, [tensor])))
    for file in files:
        store.blob_path(file.blob).write_text("{}")
    _endless(store.blob_path(files[2].blob), kind, own)
    target = tmp_path / "target"
    target.mkdir()
    is_complete = copy_small_files(DirectoryStore(evil.weights), policy, target)
    assert is_complete is (kind == "long"), "a long file is left out, as tensors are"
    assert [path.name for path in target.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize(
    "text",
    [
        f"? &k {'1' * 400_000}\n: 1\n" + "? *k\n: 1\n" * 2_000,
        f'? &k "{"Q" * 400_000}"\n: 1\n' + "? *k\n: 1\n" * 2_000,
        f'sources:\n- {{? &k "{"Q" * 400_000}" : 1}}\n' + "- {*k : 1}\n" * 2_000,
        f'sources:\n- {{? &k "{"Q" * 256}" : 1}}\n' + "- {*k : 1}\n" * 2_000,
    ],
    ids=["no text", "again", "unknown", "many"],
)
def test_a_key_that_is_named_again_and_again_is_said_once(own: RunFolder, text: str) -> None:
    """0.4 MB with 2,000 aliases took gigabytes, and minutes."""
    own.config_file.write_text(text)
    before, started = peak_mb(), time.process_time()
    with pytest.raises(ConfigError) as caught:
        own.read_config()
    assert len(str(caught.value)) < 200_000
    assert peak_mb() - before < 100
    assert time.process_time() - started < 10


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
