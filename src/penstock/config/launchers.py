# SPDX-License-Identifier: Apache-2.0
"""Where the launchers `ray` and `ssh` find their machines."""

from typing import Annotated

from pydantic import AfterValidator

from penstock.config.base import Section, non_blank


class RayConfig(Section):
    """A Ray cluster, with Ray's token authentication."""

    address: Annotated[str, AfterValidator(non_blank)] | None = None
    """Of a running cluster, such as 10.0.0.1:6379; `auto`: the one on this machine. Null: what
    RAY_ADDRESS says, or a new cluster of this machine alone, which ends with the run."""


class SshConfig(Section):
    """OpenSSH's client, which must not have to ask for a password."""

    config: Annotated[str, AfterValidator(non_blank)] | None = None
    """File that `ssh -F` reads: users, ports, keys; null: your own, `~/.ssh/config`."""
