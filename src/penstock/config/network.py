# SPDX-License-Identifier: Apache-2.0
"""Where the services of a run listen, and how other hosts reach them."""

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from penstock.addresses import is_loopback
from penstock.config.base import Section, non_blank

Text = Annotated[str, AfterValidator(non_blank)]


class TlsConfig(Section):
    """PEM files; `penstock tls init` makes all three."""

    cert: Text
    """Certificate of this host."""
    key: Text
    """Its key."""
    ca: Text | None = None
    """The private authority that signed it; null: one that the system trusts."""
    verify_clients: bool = False
    """Accept only callers with a certificate of this authority, besides their token."""

    @model_validator(mode="after")
    def _check(self) -> "TlsConfig":
        if self.verify_clients and self.ca is None:
            raise ValueError("verify_clients needs ca: the authority that signs the clients")
        return self


class NetworkConfig(Section):
    """The network of the dataflow service, its partitions and the weight server."""

    host: Text = "127.0.0.1"
    """Address to listen on. Beyond loopback only with tls."""
    advertise: Text | None = None
    """Host name or address in the URLs that nodes get; null: the same as host."""
    port: Annotated[int, Field(ge=1024, le=65_000)] | None = None
    """Port of the dataflow service; the weight server has the next, then come the partitions. For
    firewalls and containers. Null: free ports, chosen at the first start and kept."""
    tls: TlsConfig | None = None
    """Certificate of the services; null: plain HTTP, on loopback only."""

    @model_validator(mode="after")
    def _check(self) -> "NetworkConfig":
        if self.tls is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is reachable from other hosts, so it needs tls: `penstock tls "
                f"init --host {self.advertise or self.host}` makes certificates and prints what to "
                "write here"
            )
        if self.host in ("0.0.0.0", "::") and self.advertise is None:
            raise ValueError(
                f"host {self.host} listens everywhere: write the name or address that other hosts "
                "use as advertise"
            )
        return self

    @property
    def origin(self) -> str:
        """Scheme and host of the services' URLs."""
        host = self.advertise or self.host
        return f"{'http' if self.tls is None else 'https'}://{f'[{host}]' if ':' in host else host}"
