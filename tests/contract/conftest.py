# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Generator

import pytest
from tests.contract.postgres_server import running_postgres
from tests.contract.s3_server import running_s3


@pytest.fixture(scope="session")
def postgres_url() -> Generator[str]:
    with running_postgres() as url:
        yield url


@pytest.fixture(scope="session")
def s3_url() -> Generator[str]:
    """A bucket on a server that speaks S3; its address and keys are in the environment."""
    with running_s3() as url:
        yield url
