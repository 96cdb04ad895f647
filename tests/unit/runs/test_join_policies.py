# SPDX-License-Identifier: Apache-2.0
"""`penstock join --policies`: which policies a node asks to serve."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.rollout.node import require_known
from penstock.runs.join import split_policies
from penstock.types import PolicyName

RUN = (PolicyName("a"), PolicyName("b"), PolicyName("c"))


def test_names_are_split_and_ordered_as_in_the_run() -> None:
    assert split_policies(None) == ()
    assert require_known(split_policies(None), RUN) == RUN
    assert require_known(split_policies("c, a"), RUN) == ("a", "c")


@pytest.mark.parametrize("text", ["", "a,,b", ","])
def test_a_list_with_an_empty_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write names separated by commas"):
        split_policies(text)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r'--policies: unknown policy "d"; use a \| b \| c'):
        require_known(split_policies("d"), RUN)
