# SPDX-License-Identifier: Apache-2.0
"""vLLM servers: a child process of this node, or a server at a given address.

The child runs in vLLM's virtual environment, in a separate process group that dies with the node.
It listens on a unix socket in a folder of the node's user only, never on a port: its routes load
weights and call workers without a credential. Where bubblewrap works it also has a separate
network, because its workers talk to each other over ports. It gets none of the node's credentials.
It starts with the first snapshot as its model. On a machine with GPUs it computes with CUDA graphs,
in the precision of the trainer; on others eagerly. The user's options follow ours on the
command line, so they take precedence, except for where it listens.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from penstock.devices import VISIBLE_ENV, visible_devices
from penstock.errors import EngineError
from penstock.rollout.engines.vllm.control import REQUIRED_OPTIONS, Control
from penstock.rollout.engines.vllm.expert_choices import NO_EXPERTS, OPTION
from penstock.rollout.http_client import HttpClient
from penstock.rollout.programs import inherited_env
from penstock.weights.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS

START_S = 1800.0
STOP_S = 15.0
POLL_S = 0.5
LOG_INTERVAL_S = 15.0
"""Time between log lines while a server is starting."""
COMPACT_JSON = '{"backend": "xgrammar", "disable_any_whitespace": true}'
"""Without this, a model under a schema may generate whitespace forever."""
PLUGIN_DIR = Path(__file__).parent / "plugin"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
"""If set, vLLM loads only the plugins it lists; ours is in PLUGIN_DIR."""
OWN_NETWORK = ("bwrap", "--dev-bind", "/", "/", "--unshare-net", "--")
"""Runs a program with all files, and with a loopback that no other process has."""
SELF_TEST_S = 20.0
BWRAP_FIX = "install bubblewrap, and allow user namespaces if the node is not root"
ON_CPU = ("--enforce-eager",)
"""There are no CUDA graphs on a CPU."""
DTYPES = ("float32", "bfloat16", "float16")
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The LoRA ranks vLLM supports."""
MAX_ADAPTERS = 16
"""Most adapters in memory, over all policies."""
log = structlog.get_logger(__name__)


def default_environment() -> Path:
    """The environment that `make setup-engine` creates."""
    return Path(os.environ.get("PENSTOCK_CACHE", "~/.cache/penstock")).expanduser() / "vllm"


class _ModelConfig(msgspec.Struct, gc=False):
    """The precision of a snapshot, under either of its names."""

    dtype: str | None = None
    torch_dtype: str | None = None


class Server(Protocol):
    @property
    def is_running(self) -> bool:
        """False only if the server is known to have exited."""
        ...

    async def start(self, folder: Path) -> tuple[str, bool]:
        """Start the server, after stopping a running one. Returns its address, and whether it has
        loaded the folder's weights."""
        ...

    async def stop(self) -> None: ...


@dataclass(slots=True)
class RemoteServer:
    """A server that is already running."""

    _url: str
    _: KW_ONLY
    start_s: float = START_S

    @property
    def is_running(self) -> bool:
        return True

    async def start(self, folder: Path) -> tuple[str, bool]:
        control = Control(HttpClient(self._url))
        deadline = time.monotonic() + self.start_s
        while not await control.is_healthy():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"no response from vLLM at {self._url} after {self.start_s:g} s; "
                    "check that it is running"
                )
            await asyncio.sleep(POLL_S)
        return self._url, False

    async def stop(self) -> None:
        pass


@dataclass(slots=True)
class ChildServer:
    _environment: Path
    _options: Sequence[str] = ()
    _: KW_ONLY
    devices: Sequence[str] = ()
    """GPUs that it may use, as in CUDA_VISIBLE_DEVICES; empty: all that this process sees."""
    state_dir: Path | None = None
    """Folder for the server's log; by default a temporary one."""
    start_s: float = START_S
    num_policies: int = 1
    """The server has room for the adapters of so many policies."""
    adapter_rank: int = 16
    """The largest rank of any adapter."""
    records_experts: bool = False
    """It returns the experts that it chose."""
    _process: asyncio.subprocess.Process | None = None
    _scratch: Path | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def group(self) -> int | None:
        """Process group of the running server."""
        return None if self._process is None else self._process.pid

    async def start(self, folder: Path) -> tuple[str, bool]:
        await self.stop()
        program = self._environment / "bin" / "vllm"
        if not os.access(program, os.X_OK):
            raise EngineError(
                f"vLLM not found at {program}; see `penstock doctor` for how to install it, "
                "or set models.NAME.vllm.environment"
            )
        self._scratch = Path(tempfile.mkdtemp(prefix="penstock-vllm-"))
        socket_path = self._scratch / "http.sock"
        name = self._scratch.name.removeprefix("penstock-")
        log_path = (self.state_dir or self._scratch) / f"{name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        model, more = folder, ()
        if (folder / ADAPTER_CONFIG).exists():
            model = _base_of(folder, self._scratch / "base")
            more = _for_adapters(self.num_policies, self.adapter_rank)
        listens = ("--uds", str(socket_path))
        is_cuda = bool(await asyncio.to_thread(visible_devices))
        if self.records_experts:
            if not is_cuda:
                raise EngineError(f"vLLM cannot return expert choices on a CPU; {NO_EXPERTS}")
            more = (*more, OPTION)
        ours = _arguments(model, _on_cuda(folder) if is_cuda else ON_CPU)
        argv = [str(program), *ours, *more, *self._options, *listens]
        argv = [*await _own_network(), *argv]
        log.info("starting vLLM", command=shlex.join(argv), log=str(log_path))
        with log_path.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(PLUGIN_DIR / "guardian.py"), *argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=_environment(folder, self._scratch, self.devices),
                start_new_session=True,
            )
        url = f"unix:{socket_path}"
        try:
            await self._wait_until_healthy(self._process, url, log_path)
        except BaseException:
            await self.stop()
            raise
        return url, True

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                with suppress(ProcessLookupError, TimeoutError):
                    process.send_signal(signal.SIGTERM)
                    async with asyncio.timeout(STOP_S):
                        await process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    async def _wait_until_healthy(
        self, process: asyncio.subprocess.Process, url: str, log_path: Path
    ) -> None:
        control = Control(HttpClient(url))
        started_at = logged_at = time.monotonic()
        while process.returncode is None:
            if await control.is_healthy():
                log.info("vLLM ready", url=url, seconds=round(time.monotonic() - started_at, 1))
                return
            now = time.monotonic()
            if now - started_at > self.start_s:
                raise EngineError(
                    f"vLLM did not start within {self.start_s:g} s; see {log_path}: "
                    f"{_end(log_path)}"
                )
            if now - logged_at >= LOG_INTERVAL_S:
                logged_at = now
                log.info(
                    "vLLM still starting",
                    seconds=round(now - started_at),
                    last_line=_end(log_path, 1)[-200:],
                )
            await asyncio.sleep(POLL_S)
        raise EngineError(f"vLLM exited during startup; see {log_path}: {_end(log_path)}")


async def _own_network() -> tuple[str, ...]:
    """What starts a program in a network namespace; nothing, with a warning, if none can be had."""
    with suppress(OSError, TimeoutError):
        probe = await asyncio.create_subprocess_exec(
            *OWN_NETWORK,
            "true",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(SELF_TEST_S):
            if await probe.wait() == 0:
                return OWN_NETWORK
    log.warning("vLLM shares the network: its workers' ports are open on loopback", fix=BWRAP_FIX)
    return ()


def _on_cuda(folder: Path) -> tuple[str, ...]:
    """CUDA graphs, and the precision that the trainer wrote into config.json. vLLM itself would
    compute float32 weights in half precision on a GPU."""
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_ModelConfig)
    dtype = config.dtype or config.torch_dtype
    return ("--dtype", dtype if dtype in DTYPES else "bfloat16", "--enable-prefix-caching")


def _arguments(folder: Path, decoding: Sequence[str]) -> list[str]:
    return [
        *("serve", str(folder)),
        *("--served-model-name", "policy", "--generation-config", "vllm"),
        *(*decoding, "--disable-uvicorn-access-log"),
        *("--structured-outputs-config", COMPACT_JSON),
        *REQUIRED_OPTIONS,
    ]


def _base_of(folder: Path, copy: Path) -> Path:
    """A copy of the folder without the adapter, which vLLM would read as part of the model."""
    copy.mkdir()
    for path in folder.resolve().iterdir():
        if path.name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            (copy / path.name).symlink_to(path)
    return copy


def _for_adapters(num_policies: int, adapter_rank: int) -> tuple[str, ...]:
    rank = next((rank for rank in RANKS if rank >= adapter_rank), adapter_rank)
    return (
        "--enable-lora",
        *("--max-lora-rank", str(rank), "--max-loras", str(2 * num_policies)),
        *("--max-cpu-loras", str(max(MAX_ADAPTERS, 2 * num_policies))),
    )


def _environment(folder: Path, scratch: Path, devices: Sequence[str]) -> dict[str, str]:
    inherited = inherited_env()
    if devices:
        inherited[VISIBLE_ENV] = ",".join(devices)
    if PLUGINS_VARIABLE in inherited:
        inherited[PLUGINS_VARIABLE] += ",penstock"
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        **inherited,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_RPC_BASE_PATH": str(scratch),
        "PYTHONPATH": str(PLUGIN_DIR),
        "PENSTOCK_WEIGHTS_ROOT": str(folder.resolve().parent),
    }


def _end(path: Path, num_lines: int = 12) -> str:
    """The last lines of a log."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-num_lines:])
