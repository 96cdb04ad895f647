# SPDX-License-Identifier: Apache-2.0
"""The password in a store's URL: separated from the address, so that no file of a run has it.

Owns where a URL may have a password. Stores nothing; a service gets the password from its
environment."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

PASSWORD_ENV = "PGPASSWORD"
"""The variable that PostgreSQL's own tools read too."""
_KEY = "password"


def password_in(store: str) -> str:
    """The password; empty if the URL has none, or if the store is not a URL."""
    parts = urlsplit(store)
    return unquote(parts.password or "") or dict(parse_qsl(parts.query)).get(_KEY, "")


def without_password(store: str) -> str:
    """The same address without its password; other URLs are returned unchanged."""
    if not password_in(store):
        return store
    parts = urlsplit(store)
    user, _, host = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    query = [(key, value) for key, value in parse_qsl(parts.query) if key != _KEY]
    netloc = f"{name}@{host}" if name else host
    return urlunsplit(parts._replace(netloc=netloc, query=urlencode(query)))
