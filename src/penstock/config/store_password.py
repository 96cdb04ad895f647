# SPDX-License-Identifier: Apache-2.0
"""The password in a store's URL: told apart from the address, so that no file of a run keeps it.

Owns where a password may stand in a URL. Stores nothing; a service gets the password from its
environment."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

PASSWORD_ENV = "PGPASSWORD"
"""Where PostgreSQL's own tools look for it too."""
_KEY = "password"


def password_in(store: str) -> str:
    """Empty when the URL has none, and for a store that is no URL."""
    parts = urlsplit(store)
    return unquote(parts.password or "") or dict(parse_qsl(parts.query)).get(_KEY, "")


def without_password(store: str) -> str:
    """The same address; a URL without a password stays as it is written."""
    if not password_in(store):
        return store
    parts = urlsplit(store)
    user, _, host = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    query = [(key, value) for key, value in parse_qsl(parts.query) if key != _KEY]
    netloc = f"{name}@{host}" if name else host
    return urlunsplit(parts._replace(netloc=netloc, query=urlencode(query)))
