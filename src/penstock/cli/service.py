# SPDX-License-Identifier: Apache-2.0
"""How every service command begins: die with the launcher, log in one form, find the user's
modules."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from penstock.config import RunConfig
from penstock.errors import ConfigError
from penstock.fleet.folder import Endpoints, RunFolder
from penstock.fleet.plan import TOKEN, TOKEN_TTL_S
from penstock.fleet.processes import die_with_parent
from penstock.wire.auth import Role
from penstock.wire.server import Tls


def enter(run_dir: Path, service: str) -> tuple[RunFolder, RunConfig, Endpoints]:
    """The run this process serves; from here on its working directory and modules are the run's."""
    die_with_parent()
    from penstock.observe import logs

    logs.configure(service)
    folder = RunFolder.existing(run_dir)
    endpoints = folder.endpoints()
    import_from(endpoints.python_path)
    if Path(endpoints.work_dir).is_dir():
        os.chdir(endpoints.work_dir)
    return folder, folder.read_config(), endpoints


def import_from(folders: tuple[str, ...]) -> None:
    """Make the user's modules importable here and in every child."""
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [*folders, *(inherited.split(os.pathsep) if inherited else ())]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def token_for(folder: RunFolder, config: RunConfig, role: Role) -> str:
    """The launcher's token, or a new one where the signing key is readable."""
    given = os.environ.pop(TOKEN, "")
    return given or folder.token(config.name, role, ttl_s=TOKEN_TTL_S)


def leave(code: int) -> NoReturn:
    """End at once: the interpreter's own farewell takes seconds where torch is loaded."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def address(url: str, host: str | None, port: int | None) -> tuple[str, int]:
    """Where to listen: what was asked for, else what the run chose."""
    chosen_host, _, chosen_port = url.rpartition("//")[2].rpartition(":")
    return host or chosen_host, int(chosen_port) if port is None else port


def only_policy(config: RunConfig, policy: str | None) -> str:
    """The policy meant; it may be left out when there is one."""
    if policy is None:
        if len(config.models) > 1:
            raise ConfigError(
                f"this run has several policies; give --policy {'|'.join(config.models)}"
            )
        return next(iter(config.models))
    return config.for_policy(policy).name


def make_tls(certificate: Path | None, key: Path | None) -> Tls | None:
    """Both files, or neither."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("TLS needs both --tls-cert and --tls-key")
    return Tls(certificate=certificate, key=key)
