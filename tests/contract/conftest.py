# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Generator

import pytest
from tests.contract.object_store import running_s3
from tests.contract.postgres import running_postgres


@pytest.fixture(scope="session")
def postgres_url() -> Generator[str]:
    with running_postgres() as url:
        yield url


@pytest.fixture(scope="session")
def s3_url() -> Generator[str]:
    """A bucket on a server that speaks S3; its address and keys are in the environment."""
    with running_s3() as url:
        yield url
