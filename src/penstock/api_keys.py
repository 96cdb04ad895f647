# SPDX-License-Identifier: Apache-2.0
"""The header with an API key, for every client of a model on a foreign server.

Owns one rule: a key does not cross a network in clear text, neither to the server nor to a proxy of
the environment. Reads no environment: the caller says which variable the key is from."""

from __future__ import annotations

from urllib.parse import urlsplit

from penstock.addresses import is_loopback
from penstock.errors import ConfigError


def key_headers(url: str, key: str, variable: str) -> dict[str, str]:
    """The headers of a request to this URL; empty without a key. ConfigError if all on the way
    could read the key. `variable`: where it is from."""
    if not key:
        return {}
    address = urlsplit(url)
    if address.scheme != "https" and not is_loopback(address.hostname or ""):
        raise ConfigError(
            f"{variable} would be sent in clear text to {address.hostname}; use a URL that begins "
            "with https://, or a tunnel (ssh -L 8000:127.0.0.1:8000 HOST) and "
            f"http://127.0.0.1:8000, or set {variable} to nothing if that server asks for no key"
        )
    return {"Authorization": f"Bearer {key}"}


def may_use_proxy(url: str) -> bool:
    """Whether a client of this URL may go by the proxies of the environment. To a server on this
    host it may not: without TLS a proxy elsewhere would read the key and all that is said."""
    return not is_loopback(urlsplit(url).hostname or "")
