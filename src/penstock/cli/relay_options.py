# SPDX-License-Identifier: Apache-2.0
"""Options shared by the commands that use or run a relay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.output import print_note
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.rollout.peer_relay import PeerRelayConfig
    from penstock.wire.held_token import HeldToken
    from penstock.wire.serving import Tls

RELAY_EXAMPLE = "https://relay.example:18090"


def read_public_key(given: str | None) -> str:
    """The key itself, or the content of the file with it."""
    if not given:
        raise ConfigError(
            "--public-key is required to verify tokens; pass the line in keys/public.key of the "
            "run folder, or that file"
        )
    path = Path(given)
    return path.read_text().strip() if path.is_file() else given


def parse_sharing(
    serve_weights: str | None,
    serve_gb: float,
    state_dir: Path,
    tls: Tls | None,
    public_key: Callable[[], str],
    denied_file: Path | None = None,
) -> PeerRelayConfig | None:
    """The relay inside a node, from `--serve-weights` and the options that go with it.

    denied_file: the run's deny list; by default a copy in the node's own folder."""
    if serve_weights is None:
        if tls is not None:
            raise ConfigError("--tls-cert has no effect without --serve-weights")
        return None
    from penstock.cli.service_options import listen_address
    from penstock.rollout.peer_relay import PeerRelayConfig
    from penstock.wire.serving import require_tls_off_loopback

    host, _, port = serve_weights.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not int(port):
        raise ConfigError(
            f"--serve-weights {serve_weights!r}: expected HOST:PORT, such as 127.0.0.1:18090"
        )
    require_tls_off_loopback(host, tls)
    listen_address("", host, int(port))
    print_relay_hint(host, int(port), tls)
    return PeerRelayConfig(
        host=host,
        port=int(port),
        tls=tls,
        public_key=public_key(),
        denied_file=denied_file or state_dir / "denied",
        max_bytes=parse_gigabytes(serve_gb, state_dir, "--serve-gb"),
    )


def parse_gigabytes(gb: float, folder: Path, option: str) -> int:
    """An option in GB as bytes; warns when the disk has less."""
    from penstock.fleet.run_folder import free_bytes

    if gb <= 0:
        raise ConfigError(f"{option} {gb:g}: must be greater than 0 GB")
    size, free = int(gb * 1e9), free_bytes(folder.absolute())
    if size > free:
        print_note(
            f"warning: {option} is {gb:g}, but only {free / 1e9:.1f} GB are free in {folder}"
        )
    return size


def print_relay_hint(host: str, port: int, tls: Tls | None) -> None:
    scheme = "http" if tls is None else "https"
    print_note(f"nodes use this relay with: --relay {scheme}://{host}:{port}")


def read_relay_token(relay: str | None, path: Path | None) -> tuple[str, HeldToken] | None:
    """The relay and the token to use there, if both are given."""
    if relay is None or path is None:
        return None
    from penstock.wire.held_token import HeldToken

    return relay, HeldToken.from_file(path.absolute())
