# SPDX-License-Identifier: Apache-2.0
"""A run folder and the processes of `penstock dataflow` over it, as people start them: home with
its partition, and further partitions. Each dies by SIGKILL at the end; nothing here is graceful."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import psutil

from benchmarks.harness import Server
from penstock.config import RunConfig
from penstock.fleet.run_folder import RunFolder
from penstock.wire.auth import Signer


def make(path: Path, config: RunConfig, *, num_partitions: int = 1) -> RunFolder:
    """Keys made and addresses chosen; nothing runs yet."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True)
    flow = config.dataflow.model_copy(update={"partitions": num_partitions})
    folder.write_config(config.model_copy(update={"dataflow": flow}))
    Signer.create(folder.keys, config.name)
    folder.allocate_endpoints(folder.path, (), num_partitions=num_partitions)
    folder.logs.mkdir()
    return folder


def signer(folder: RunFolder) -> Signer:
    return Signer.read(folder.keys, folder.read_config().name)


def environment(folder: RunFolder) -> dict[str, str]:
    """Of a service: its modules are compiled once, as those of an installed package are."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    bytecode = str(folder.path / "bytecode")
    return {**inherited, "PYTHONPYCACHEPREFIX": bytecode, "OPENBLAS_NUM_THREADS": "1"}


class ServiceProcess:
    """One process of `penstock dataflow`, from its start on."""

    def __init__(self, folder: RunFolder, partition: int = 0) -> None:
        endpoints = folder.endpoints()
        url = endpoints.partitions[partition - 1] if partition else endpoints.dataflow
        words = ["dataflow", "--run-dir", str(folder.path)]
        words += ["--partition", str(partition)] if partition else []
        self.log = folder.logs / f"dataflow-{partition}.log"
        with self.log.open("ab") as out:
            self.began_at = time.perf_counter()
            self._child = subprocess.Popen(
                [str(Path(sys.executable).with_name("penstock")), *words],
                stdout=out,
                stderr=out,
                env=environment(folder),
            )
        self.server = Server(url=url, pid=self._child.pid)

    def check(self) -> None:
        """Raise when it ended by itself."""
        if self._child.poll() is not None:
            raise RuntimeError(f"penstock dataflow ended:\n{self.log.read_text()[-2000:]}")

    def rss_mb(self) -> float:
        return psutil.Process(self.server.pid).memory_info().rss / (1 << 20)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()


@contextlib.contextmanager
def running(folder: RunFolder, partition: int = 0) -> Generator[ServiceProcess]:
    process = ServiceProcess(folder, partition)
    try:
        yield process
    finally:
        process.kill()
