# SPDX-License-Identifier: Apache-2.0
"""What commands that run a service share: token, listen address, TLS files, ranks."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from penstock.config.network import NetworkConfig
from penstock.errors import ConfigError
from penstock.runs.service_process import pop_token_file
from penstock.wire.held_token import HeldToken
from penstock.wire.serving import Tls

if TYPE_CHECKING:
    from penstock.trainer.ranks.supervisor import HostRanks


def require_token(option: Path | None, *, role: str) -> HeldToken:
    """The token in the file of --token-file or PENSTOCK_TOKEN_FILE."""
    path = option or pop_token_file()
    if path is None:
        raise ConfigError(
            "no token: pass --token-file FILE, or set PENSTOCK_TOKEN_FILE. On the machine that has "
            f"the run folder, `penstock token RUN --role {role} --out FILE` writes one. A token is "
            "never taken from the command line or an environment, which other programs can read"
        )
    return HeldToken.from_file(path.absolute())


def check_url(url: str, *, example: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"not a URL: {url!r} (expected e.g. {example})")
    return url


def listen_address(
    url: str, host: str | None, port: int | None, default_host: str = ""
) -> tuple[str, int]:
    """Host and port to listen on: the options, else the run's own address."""
    where = host or default_host, int(url.rpartition(":")[2]) if port is None else port
    _check_port_free(*where)
    return where


def _check_port_free(host: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: must be between 0 and 65535")
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is already in use; choose another with --port"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None


def run_tls(network: NetworkConfig) -> Tls | None:
    """The TLS files of the run's own config; relative paths as the config has them."""
    tls = network.tls
    if tls is None:
        return None
    found = make_tls(Path(tls.cert), Path(tls.key))
    assert found is not None
    return (
        replace(found, client_ca=Path(tls.ca).absolute())
        if tls.verify_clients and tls.ca
        else found
    )


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
            f"cannot load {certificate} and {key} as a PEM certificate and its key: {error}"
        ) from None
    return Tls(certificate=certificate.absolute(), key=key.absolute())


def exit_now(code: int) -> NoReturn:
    """Exit immediately; normal interpreter shutdown takes seconds once torch is loaded."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_per_rank(
    ranks: HostRanks,
    *,
    final_codes: Collection[int],
    is_stopping: Callable[[], bool] = lambda: False,
    env: Mapping[str, str] | None = None,
) -> int:
    """Execute this command again in a process for each rank of this host; returns the exit code.

    final_codes: exit codes after which the ranks are not restarted.
    env: added to the environment of every rank."""
    from penstock.trainer.ranks.supervisor import run_ranks

    return run_ranks(
        [sys.executable, "-m", "penstock.cli.main", *sys.argv[1:]],
        ranks,
        env={**os.environ, **(env or {})},
        is_stopping=is_stopping,
        final_codes=final_codes,
    )
