# SPDX-License-Identifier: Apache-2.0
"""Every finding has at least one attack in this folder."""

from __future__ import annotations

import re
from pathlib import Path

from tests.attacks.conftest import FINDINGS


def test_every_finding_has_an_attack() -> None:
    folder = Path(__file__).parent
    marked = "".join(path.read_text() for path in folder.glob("test_*.py"))
    found = {int(number) for number in re.findall(r"mark\.finding\((\d+)\)", marked)}
    assert found == FINDINGS.keys()
