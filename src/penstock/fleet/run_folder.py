# SPDX-License-Identifier: Apache-2.0
"""The run folder: its layout, its lock, and the addresses of the run's services.

Also owns log folders and tokens. Knows nothing about processes, and never opens the ledger, the
weights or a checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog

from penstock.config import RunConfig, dump, load_stored
from penstock.config.loader import MAX_FILE_BYTES
from penstock.config.network import NetworkConfig
from penstock.durable import FolderId, open_own, read_own, regular_descriptor, write_durably
from penstock.errors import BadRequest, ConfigError, LaunchError
from penstock.fleet.ports import free_port
from penstock.fleet.scaling_records import ScaleRequest, ScalingRecord
from penstock.observe.admin_log import AdminLog
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.codec import JSON, decode, encode_json
from penstock.wire.trust import trust, trust_at

T = TypeVar("T")
LOCK_TIMEOUT_S = 1.0
"""A process that checks for the launcher takes the lock for a moment, so retry this long."""
MAX_RECORD_BYTES = 64 << 20
_MAX_PID_CHARS = 20

LOOPBACK_ONLY = NetworkConfig()
AUDIENCES: Mapping[Role, tuple[Audience, ...]] = {
    Role.ADMIN: (Audience.DATAFLOW, Audience.WEIGHTS, Audience.GATEWAY),
    Role.RELAY: (Audience.WEIGHTS, Audience.RELAY),
    Role.GATEWAY: (Audience.DATAFLOW, Audience.WEIGHTS, Audience.GATEWAY),
    Role.SESSION: (Audience.GATEWAY,),
}
"""Services that accept a token of these roles; all other roles use dataflow and weights."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """`run/endpoints.json`: addresses are chosen at the first start and kept, so that nodes which
    joined find the run again."""

    dataflow: str
    weights: str
    work_dir: str
    """Where `penstock run` was first started; relative paths in the config refer to it."""
    python_path: tuple[str, ...] = ()
    """Folders of the user's modules: the folder of the config file."""
    folder: str = ""
    """Where the run folder was when these paths were recorded; it may have moved since."""
    partitions: tuple[str, ...] = ()
    """URLs of the additional data partitions, from number 1."""
    ca: str = ""
    """The private authority of these addresses; empty for none."""
    certificate: str = ""
    """This host's certificate, for services that ask their callers for one."""
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherRecord:
    """`run/launcher.json`: the launcher of the run and its child processes."""

    pid: int
    started_at: float
    attempt: int
    services: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRecord:
    """`run/finished.json`: written when the last step is committed and all services have exited."""

    finished_at: float
    steps: int
    trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """`run/ended.json`: why the last launch ended before the last step. A launcher that was killed
    leaves none."""

    ended_at: float
    signal: int = 0
    """The signal that stopped it; 0 for none."""
    error: str = ""
    """The error that ended it; empty for none."""
    budget: str = ""
    """The budget that is spent; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """`run/usage.json`: what the run has used, over all its starts."""

    tokens: int = 0
    node_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrigin:
    """`run/parent.json`: where a forked run comes from."""

    run: str
    """Folder of the other run."""
    step: int
    """The step of the other run that is step 0 here."""
    weights_only: tuple[str, ...] = ()
    """Policies that started from weights only, with a fresh optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDigests:
    """`run/sources.json`: detects a changed dataset."""

    digests: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeDigests:
    """`run/code.json`: detects an edited workflow, reward, task, rule or stage."""

    digests: dict[str, str]
    """By module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNote:
    """One line of `notes.jsonl`: something that a reader of the curves should know."""

    time: float
    step: int
    """The last step before it."""
    note: str


class LockHolder(NamedTuple):
    """Who has the lock, by one opened lock: any user can write any pid into their files."""

    pid: int | None
    """As its launcher wrote it; None if the lock names no process."""
    owner: int
    """The user whose lock it is."""


class RunFolder:
    """One run on disk: the folder that was at this path when its keys, records or lock were first
    used. One that its owner puts there later, perhaps as a link to a run of who opens it, is
    refused: that run's token would go to the address that this one named."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._id: FolderId | None = None
        self.config_file = self.path / "config.yaml"
        self.keys = self.path / "keys"
        self.service_tokens = self.keys / "tokens"
        self.logs = self.path / "logs"
        self.metrics = self.path / "metrics.jsonl"
        self.notes = self.path / "notes.jsonl"
        self.weights = self.path / "weights"
        self.checkpoints = self.path / "checkpoints"
        self.acks = self.path / "acks"
        self.nodes = self.path / "nodes"
        self.admin_log = AdminLog(self.path)
        """What operators did to this run."""
        self._run = self.path / "run"
        self.report = self._run / "report.json"
        """The newest balance report; the dataflow service stores it at intervals and at its end."""

    @classmethod
    def open_existing(cls, path: Path) -> RunFolder:
        folder = cls(path)
        if not folder.config_file.is_file():
            raise ConfigError(
                f"{path} is not a run folder (no config.yaml); pass OUTPUT_DIR/NAME of the config, "
                "which `penstock run` creates"
            )
        return folder

    def read_config(self) -> RunConfig:
        return load_stored(self.config_file)

    def _bound(self) -> FolderId:
        """This folder, whatever is at its path later. OSError if there is none."""
        if self._id is None:
            self._id = FolderId.of(os.stat(self.path))
        return self._id

    def _create(self) -> None:
        """For the owner alone: others could read tasks, answers and keys."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)

    def write_config(self, config: RunConfig) -> None:
        content = _stored(config)
        self._create()
        _write_file(self.config_file, content)

    def last_started_config(self) -> RunConfig | None:
        """The config of the last launch, whatever config.yaml contains now."""
        stored = self._run / "adopted.yaml"
        return load_stored(stored) if stored.exists() else None

    def write_last_started_config(self, config: RunConfig) -> None:
        _write_file(self._run / "adopted.yaml", _stored(config))

    def sources(self) -> dict[str, str]:
        """Digest of each source's tasks, from the last launch that checked them."""
        stored = self._read("sources.json", SourceDigests)
        return {} if stored is None else stored.digests

    def parent(self) -> ForkOrigin | None:
        """The run that this one was forked from, if it was."""
        return self._read("parent.json", ForkOrigin)

    def write_parent(self, parent: ForkOrigin) -> None:
        self._write("parent.json", parent)

    def write_source_digests(self, digests: Mapping[str, str]) -> None:
        self._write("sources.json", SourceDigests(digests=dict(digests)))

    def code(self) -> dict[str, str] | None:
        """Digest of each of the user's modules at the last launch; None before the first."""
        stored = self._read("code.json", CodeDigests)
        return None if stored is None else stored.digests

    def write_code(self, digests: Mapping[str, str]) -> None:
        self._write("code.json", CodeDigests(digests=dict(digests)))

    def add_note(self, note: RunNote) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with os.fdopen(regular_descriptor(self.notes, flags, 0o666), "ab") as file:
            file.write(encode_json(note) + b"\n")

    # --- state of the run -------------------------------------------------------------------------

    def endpoints(self) -> Endpoints:
        """The addresses of this run. This process trusts its authority there from now on."""
        found = self._read("endpoints.json", Endpoints)
        if found is None:
            raise ConfigError(
                f"{self.path} was never started; start it with `penstock run {self.path}`"
            )
        found = self._relocated(found)
        addresses = (found.dataflow, found.weights, *found.partitions)
        trust_at(addresses, _path(found.ca), _path(found.certificate), _path(found.key))
        return found

    def trusted_endpoints(self) -> Endpoints:
        """As `endpoints`, for a process of this run: it and its children trust the authority of the
        run also at relays, and at partitions on other hosts."""
        found = self.endpoints()
        trust(_path(found.ca), _path(found.certificate), _path(found.key))
        return found

    def python_path(self) -> tuple[str, ...]:
        """Folders of the user's modules, as of the last start."""
        stored = self._read("endpoints.json", Endpoints)
        return () if stored is None else self._relocated(stored).python_path

    def _relocated(self, found: Endpoints) -> Endpoints:
        """With the paths of a run folder that was moved: what is gone from its old place may have
        moved with the folder, to the same place relative to it."""

        def relocate(path: str) -> str:
            if not found.folder or os.path.exists(path):
                return path
            moved = (self.path / os.path.relpath(path, found.folder)).resolve()
            return str(moved) if moved.exists() else path

        return replace(
            found,
            folder=str(self.path),
            work_dir=relocate(found.work_dir),
            python_path=tuple(map(relocate, found.python_path)),
        )

    def allocate_endpoints(
        self,
        work_dir: Path,
        python_path: tuple[str, ...],
        *,
        num_partitions: int = 1,
        network: NetworkConfig = LOOPBACK_ONLY,
    ) -> Endpoints:
        """The addresses of this run; free ports are picked once and kept. So is the working
        directory while it exists. `python_path`, where given, replaces the recorded one."""
        stored = self._read("endpoints.json", Endpoints)
        if stored is not None:
            stored = self._relocated(stored)
            stored = replace(stored, python_path=python_path or stored.python_path)
            if not Path(stored.work_dir).is_dir():
                stored = replace(stored, work_dir=str(work_dir.absolute()))
        else:
            first = free_port()
            stored = Endpoints(
                dataflow=f"{network.origin}:{first}",
                weights=f"{network.origin}:{free_port(exclude=(first,))}",
                work_dir=str(work_dir.absolute()),
                python_path=python_path,
                folder=str(self.path),
            )
        partitions = list(stored.partitions)
        while len(partitions) < num_partitions - 1:
            urls = (stored.dataflow, stored.weights, *partitions)
            port = free_port(exclude=(int(url.rpartition(":")[2]) for url in urls))
            partitions.append(f"{network.origin}:{port}")
        chosen = _on_network(replace(stored, partitions=tuple(partitions)), network)
        self._write("endpoints.json", chosen)
        return chosen

    def write_launcher(self, launcher: LauncherRecord) -> None:
        self._write("launcher.json", launcher)

    def launcher(self) -> LauncherRecord | None:
        """The last launch of the run, whether it is running or not; None before the first."""
        return self._read("launcher.json", LauncherRecord)

    def end(self) -> EndRecord | None:
        return self._read("ended.json", EndRecord)

    def write_end(self, end: EndRecord) -> None:
        self._write("ended.json", end)

    def clear_end(self) -> None:
        (self._run / "ended.json").unlink(missing_ok=True)

    def usage(self) -> UsageRecord:
        return self._read("usage.json", UsageRecord) or UsageRecord()

    def write_usage(self, usage: UsageRecord) -> None:
        self._write("usage.json", usage)

    def scale_request(self) -> ScaleRequest | None:
        return self._read("scale.json", ScaleRequest)

    def write_scale_request(self, request: ScaleRequest) -> None:
        self._write("scale.json", request)

    def scaling(self) -> ScalingRecord | None:
        return self._read("autoscaler.json", ScalingRecord)

    def write_scaling(self, record: ScalingRecord) -> None:
        self._write("autoscaler.json", record)

    def finish(self) -> FinishRecord | None:
        return self._read("finished.json", FinishRecord)

    def write_finish(self, finish: FinishRecord) -> None:
        self._write("finished.json", finish)

    def clear_finish(self) -> None:
        (self._run / "finished.json").unlink(missing_ok=True)

    def _read(self, name: str, kind: type[T]) -> T | None:
        path = self._run / name
        try:
            content = read_own(path, MAX_RECORD_BYTES, within=self._bound())
            return decode(content, kind, media_type=JSON)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except BadRequest as error:
            raise ConfigError(f"{path} is damaged: {error}; delete it and run again") from None

    def _write(self, name: str, record: object) -> None:
        _write_file(self._run / name, encode_json(record))

    # --- the lock ---------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Generator[None]:
        """Lock the run; a second launcher is rejected with the pid of the first.

        The lock belongs to the open file, so it ends with the process, however that ends."""
        self._create()
        self._run.mkdir(exist_ok=True)
        lock = self._open_lock(os.O_RDWR | os.O_CREAT)
        try:
            if not _try_lock(lock, fcntl.LOCK_EX, timeout_s=LOCK_TIMEOUT_S):
                launcher_pid = self.launcher_pid()
                raise LaunchError(
                    f"{self.path} is already running (pid {launcher_pid or 'unknown'}); "
                    f"`penstock status {self.path}` shows it, `penstock stop {self.path}` stops it"
                )
            _write_pid(lock)
            yield
        finally:
            os.close(lock)

    def launcher_pid(self) -> int | None:
        """Pid of the launcher that has the lock, or None."""
        holder = self.lock_holder()
        return None if holder is None else holder.pid

    def lock_holder(self) -> LockHolder | None:
        """Tests with a shared lock, so that two tests do not mistake each other for a launcher."""
        try:
            lock = self._open_lock(os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if _try_lock(lock, fcntl.LOCK_SH):
                return None
            text = os.read(lock, _MAX_PID_CHARS).strip()
            return LockHolder(int(text) if text.isdigit() else None, os.fstat(lock).st_uid)
        finally:
            os.close(lock)

    def _open_lock(self, flags: int) -> int:
        """Never the lock of another run, whose launcher would be stopped in place of this one's."""
        path = self._run / "lock"
        try:
            return open_own(path, flags, 0o644, within=self._bound())
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ConfigError(f"{path}: {error.strerror}; delete the link") from None
            if error.errno in (errno.ESTALE, errno.EINVAL, errno.ENXIO):
                raise ConfigError(f"{path}: {error.strerror}") from None
            raise

    # --- logs, tokens -----------------------------------------------------------------------------

    def new_attempt(self) -> tuple[int, Path]:
        """A new log folder for this start of the run; `logs/latest` points to it."""
        self.logs.mkdir(parents=True, exist_ok=True)
        numbers = [int(p.name[8:]) for p in self.logs.glob("attempt_*") if p.name[8:].isdigit()]
        number = max(numbers, default=0) + 1
        attempt = self.logs / f"attempt_{number}"
        attempt.mkdir()
        partial = self.logs / "latest.partial"
        partial.unlink(missing_ok=True)
        partial.symlink_to(attempt.name)
        partial.replace(self.logs / "latest")
        return number, attempt

    def token(
        self,
        run: str,
        role: Role,
        *,
        ttl_s: float,
        subject: str = "",
        is_trusted: bool = True,
        renew_s: float = 0.0,
    ) -> str:
        """A token for this role; needs a readable signing key."""
        audiences = AUDIENCES.get(role, (Audience.DATAFLOW, Audience.WEIGHTS))
        return self._signer(run).mint(
            role,
            audiences,
            ttl_s=ttl_s,
            subject=subject,
            is_trusted=is_trusted,
            renew_s=renew_s,
        )

    def relay_token(self, run: str, role: Role, *, ttl_s: float, subject: str = "") -> str:
        """A token for this role that only relays accept."""
        return self._signer(run).mint(role, [Audience.RELAY], ttl_s=ttl_s, subject=subject)

    def _signer(self, run: str) -> Signer:
        """Of this folder only, as `endpoints` are."""
        try:
            return Signer.read(self.keys, run, within=self._bound())
        except OSError as error:
            raise ConfigError(
                f"{self.path}: {error.strerror}; pass the folder of a run that was started"
            ) from None

    def public_key(self) -> str:
        return read_own(self.keys / "public.key", MAX_RECORD_BYTES).decode().strip()


def free_bytes(path: Path) -> int:
    """Free disk space at this path, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _on_network(endpoints: Endpoints, network: NetworkConfig) -> Endpoints:
    """At the addresses of this network, which the config may have changed; on its ports, or else on
    the same ones."""

    def at(url: str, number: int) -> str:
        port = url.rpartition(":")[2] if network.port is None else network.port + number
        return f"{network.origin}:{port}"

    def absolute(path: str | None) -> str:
        return os.path.abspath(path) if path else ""

    tls = network.tls
    return replace(
        endpoints,
        dataflow=at(endpoints.dataflow, 0),
        weights=at(endpoints.weights, 1),
        partitions=tuple(at(url, 2 + n) for n, url in enumerate(endpoints.partitions)),
        ca=absolute(tls and tls.ca),
        certificate=absolute(tls and tls.cert),
        key=absolute(tls and tls.key),
    )


# --- files ---------------------------------------------------------------------------------------


def _try_lock(descriptor: int, kind: int, *, timeout_s: float = 0.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(0.01)


def _write_pid(lock: int) -> None:
    text = f"{os.getpid()}\n".encode()
    try:
        os.pwrite(lock, text, 0)
        os.ftruncate(lock, len(text))
    except OSError as error:  # a full disk; the lock itself holds
        _log.warning("pid not written to lock file", error=str(error))


def _stored(config: RunConfig) -> bytes:
    """Refused if no command could read it again."""
    content = dump(config).encode()
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(
            f"the resolved config has {len(content):,} bytes, more than {MAX_FILE_BYTES:,}; "
            "shorten the templates of `prompts`, or other long texts"
        )
    return content


def _write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, content)
