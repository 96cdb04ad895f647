# SPDX-License-Identifier: Apache-2.0
"""An S3 server for tests, in this process and on loopback."""

from __future__ import annotations

import urllib.request
from collections.abc import Generator
from contextlib import contextmanager

import pytest

BUCKET = "penstock-tests"


@contextmanager
def running_s3() -> Generator[str]:
    """The URL of an empty bucket, reachable by what stands in the environment meanwhile."""
    from moto.server import ThreadedMotoServer  # takes seconds to import

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        endpoint = f"http://127.0.0.1:{port}"
        make = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(make):
            pass
        surroundings = {
            "AWS_ENDPOINT": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "of-the-tests",
            "AWS_SECRET_ACCESS_KEY": "of-the-tests",
            "AWS_REGION": "us-east-1",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in surroundings.items():
                patch.setenv(name, value)
            yield f"s3://{BUCKET}"
    finally:
        server.stop()
