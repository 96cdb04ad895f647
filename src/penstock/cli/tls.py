# SPDX-License-Identifier: Apache-2.0
"""`penstock tls`: certificates for runs that other hosts join."""

from __future__ import annotations

from pathlib import Path

DAYS = 90.0


def init(
    folder: Path = Path("tls"), /, *, host: list[str], days: float = DAYS, json: bool = False
) -> int:
    """Make a private authority and a certificate for this host, or renew the certificate.

    Args:
        folder: Folder for the files.
        host: Name or address that other hosts use for this one; repeat for several.
        days: Days until the certificate expires.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_note
    from penstock.wire.certificates import Authority

    names = list(dict.fromkeys([*host, "localhost", "127.0.0.1"]))
    authority = Authority.create(folder)
    issued = authority.issue("server", names, days=days)
    if json:
        found = {"ca": authority.certificate, "cert": issued.certificate, "key": issued.key}
        print_json({name: str(path) for name, path in found.items()} | {"hosts": names})
        return 0
    print("network:\n  host: 0.0.0.0")
    print(f"  advertise: {host[0]}\n  tls:")
    print(f"    ca: {authority.certificate}")
    print(f"    cert: {issued.certificate}\n    key: {issued.key}")
    print_note(
        f"the lines above belong in the run file. Copy {authority.certificate} to the other hosts; "
        "there: penstock join URL --ca ca.pem"
    )
    print_note(f"keep {folder / 'ca.key'} on this host: who has it can pose as any service")
    return 0


def issue(
    name: str, /, *, folder: Path = Path("tls"), host: list[str] | None = None, days: float = DAYS
) -> int:
    """Make a certificate for another host: a relay, a gateway, or a node of a run that verifies
    its clients.

    Args:
        name: Name of the files: NAME.pem and NAME.key.
        folder: Folder that `penstock tls init` made.
        host: Name or address that others use for that host; repeat for several. By default NAME.
        days: Days until the certificate expires.
    """
    from penstock.cli.output import print_note
    from penstock.config.base import NAME
    from penstock.errors import ConfigError
    from penstock.wire.certificates import Authority

    if not NAME.fullmatch(name) or name in ("ca", "server"):
        raise ConfigError(
            f"{name!r} cannot name a certificate; use up to 64 letters, digits, _ and -, other "
            "than ca and server"
        )
    issued = Authority(folder).issue(name, host or [name], days=days)
    print(issued.certificate)
    print(issued.key)
    print_note(
        f"copy both and {folder / 'ca.pem'} to that host; its commands take --tls-cert {name}.pem "
        f"--tls-key {name}.key --ca ca.pem"
    )
    return 0
