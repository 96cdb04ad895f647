# SPDX-License-Identifier: Apache-2.0
"""Opens and lists object storage (`s3://`, `gs://`, `az://`), if the extra `s3` is installed.

Credentials come from the environment (`AWS_…`, `GOOGLE_…`, `AZURE_…`), never from a config file.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import ObjectStore


def open_objects(url: str, what: str, *, retry_timeout_s: float | None = None) -> ObjectStore:
    """A bucket for `what`; without a timeout, failing requests are retried as obstore does."""
    if importlib.util.find_spec("obstore") is None:
        raise ConfigError(f"no obstore for {what} in object storage; pip install 'penstock-rl[s3]'")
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    options: dict[str, Any] = {}
    if retry_timeout_s is not None and not url.startswith(("file:", "memory:")):
        # No client options: they would override those from the environment.
        retry_timeout = timedelta(seconds=retry_timeout_s)
        options["retry_config"] = {"max_retries": 10, "retry_timeout": retry_timeout}
    try:
        return from_url(url, **options)
    except (BaseError, ValueError) as error:
        raise ConfigError(
            f"cannot open object store {url}: {error}; use s3://bucket/run, gs://… or az://…"
        ) from error


def list_objects(objects: ObjectStore, folder: str) -> Iterator[tuple[str, int]]:
    """Full names and sizes, in any order."""
    for page in objects.list(folder):  # pyright: ignore[reportUnknownMemberType]
        yield from ((meta["path"], meta["size"]) for meta in page)
