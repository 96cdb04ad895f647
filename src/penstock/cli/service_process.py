# SPDX-License-Identifier: Apache-2.0
"""How every service command begins: die with the launcher, log in one form, find the user's
modules."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import sys
from pathlib import Path
from typing import NoReturn

from penstock.config import RunConfig
from penstock.errors import ConfigError
from penstock.fleet.processes import exit_with_parent
from penstock.fleet.run_folder import Endpoints, RunFolder
from penstock.fleet.services import TOKEN_ENV, TOKEN_TTL_S
from penstock.wire.auth import Role
from penstock.wire.serving import Tls


def enter_run(run_dir: Path, service: str) -> tuple[RunFolder, RunConfig, Endpoints]:
    """The run this process serves; from here on its working directory and modules are the run's."""
    exit_with_parent()
    from penstock.observe import logs

    logs.configure(service)
    folder = RunFolder.open_existing(run_dir)
    endpoints = folder.endpoints()
    add_import_paths(endpoints.python_path)
    if Path(endpoints.work_dir).is_dir():
        os.chdir(endpoints.work_dir)
    return folder, folder.read_config(), endpoints


def add_import_paths(folders: tuple[str, ...]) -> None:
    """Make the user's modules importable here and in every child."""
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [*folders, *(inherited.split(os.pathsep) if inherited else ())]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def service_token(folder: RunFolder, config: RunConfig, role: Role) -> str:
    """The launcher's token, or a new one where the signing key is readable."""
    given = os.environ.pop(TOKEN_ENV, "")
    return given or folder.token(config.name, role, ttl_s=TOKEN_TTL_S)


def exit_now(code: int) -> NoReturn:
    """End at once: the interpreter's own farewell takes seconds where torch is loaded."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def address(url: str, host: str | None, port: int | None) -> tuple[str, int]:
    """Where to listen: what was asked for, else what the run chose."""
    chosen_host, _, chosen_port = url.rpartition("//")[2].rpartition(":")
    where = host or chosen_host, int(chosen_port) if port is None else port
    _check_port_free(*where)
    return where


def _check_port_free(host: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: ports are 0 to 65535")
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} is taken; choose another with --port") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None


def resolve_policy(config: RunConfig, policy: str | None) -> str:
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
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if not path.is_file():
            raise ConfigError(f"{option} {path}: no such file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{certificate} and {key} are no certificate and its key, in PEM: {error}"
        ) from None
    return Tls(certificate=certificate.absolute(), key=key.absolute())
