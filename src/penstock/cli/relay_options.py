# SPDX-License-Identifier: Apache-2.0
"""What the commands that use a relay, or are one, ask for in the same words."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.rollout.peer_relay import PeerRelayConfig
    from penstock.wire.serving import Tls

RELAY_TOKEN = "PENSTOCK_RELAY_TOKEN"


def check_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no address; it looks like https://relay.example:18090")
    return url


def read_public_key(given: str | None) -> str:
    """The key itself, or the content of the file it names."""
    if not given:
        raise ConfigError(
            "give --public-key, the line in keys/public.key of the run folder: who asks for "
            "weights is known by it"
        )
    path = Path(given)
    return path.read_text().strip() if path.is_file() else given


def parse_sharing(
    serve_weights: str | None,
    serve_gb: float,
    state_dir: Path,
    tls: Tls | None,
    public_key: Callable[[], str],
) -> PeerRelayConfig | None:
    """What `--serve-weights` and its companions ask for."""
    if serve_weights is None:
        if tls is not None:
            raise ConfigError("--tls-cert is of use only with --serve-weights")
        return None
    from penstock.cli.service_process import address
    from penstock.rollout.peer_relay import PeerRelayConfig
    from penstock.wire.serving import require_tls_off_loopback

    host, _, port = serve_weights.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not int(port):
        raise ConfigError(f"--serve-weights {serve_weights!r}: give HOST:PORT, as 127.0.0.1:18090")
    require_tls_off_loopback(host, tls)
    address("", host, int(port))
    print_relay_hint(host, int(port), tls)
    return PeerRelayConfig(
        host=host,
        port=int(port),
        tls=tls,
        public_key=public_key(),
        max_bytes=num_bytes(serve_gb, state_dir, "--serve-gb"),
    )


def num_bytes(gb: float, folder: Path, option: str) -> int:
    from penstock.cli.output import note
    from penstock.fleet.run_folder import free_bytes

    if gb <= 0:
        raise ConfigError(f"{option} {gb:g} leaves no room for a blob; give GB above 0")
    wanted, free = int(gb * 1e9), free_bytes(folder.absolute())
    if wanted > free:
        note(f"{option} {gb:g}, but {folder} has only {free / 1e9:.1f} GB free now")
    return wanted


def print_relay_hint(host: str, port: int, tls: Tls | None) -> None:
    from penstock.cli.output import note

    scheme = "http" if tls is None else "https"
    note(f"nodes may use: --relay {scheme}://{host}:{port}")


def pop_relay_token() -> str:
    """Taken out of the environment, so that no child inherits it."""
    return os.environ.pop(RELAY_TOKEN, "")
