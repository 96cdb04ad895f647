# SPDX-License-Identifier: Apache-2.0
"""What the probe finds out about a chat template, and what is refused because of it."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
from tests.unit.gateway.bpe import TEMPLATES, renderer, tokenizer
from tests.unit.gateway.chatml import TEMPLATE

from penstock.errors import BadRequest
from penstock.gateway.gateway import Gateway
from penstock.gateway.parsing import ToolFormat
from penstock.gateway.renderer import Renderer
from penstock.gateway.template_probe import TOOL, HistoryMode, probe
from penstock.types import PolicyName, SamplingSpec

POLICY = PolicyName("policy")


async def nobody(*args: object, **kwargs: object) -> None:
    raise AssertionError("refused before the engine")


@pytest.mark.parametrize("kind", TEMPLATES)
def test_each_kind_of_template_is_recognised(kind: str) -> None:
    traits = probe(renderer(kind))
    assert traits.prefix == HistoryMode(kind)
    assert traits.can_switch_thinking and traits.shows_tools
    assert traits.tool_format is ToolFormat.HERMES


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        (TEMPLATE, HistoryMode.APPEND_ONLY),
        ("{{ messages[0].content }}", HistoryMode.REWRITES),
        ("{{ raise_exception('never') }}", HistoryMode.REWRITES),
        (TEMPLATE.replace("message.content", "message.content.rstrip()"), HistoryMode.REWRITES),
    ],
)
def test_templates_that_know_neither_tools_nor_thinking(template: str, prefix: HistoryMode) -> None:
    traits = probe(Renderer(tokenizer(), template))
    assert traits.prefix is prefix
    assert not traits.can_switch_thinking and not traits.shows_tools


def test_the_verdict_is_one_line_of_the_log() -> None:
    with structlog.testing.capture_logs() as lines:
        gateway = Gateway(nobody)  # pyright: ignore[reportArgumentType]
        gateway.set_renderer(POLICY, renderer("strips-thinking"))
    (line,) = lines
    assert line["template"] == "strips-thinking" and line["policy"] == POLICY
    assert line["branches"] == "after each answer with reasoning"
    assert (line["thinking_switch"], line["tools"]) == (True, "hermes")
    assert gateway.template_traits[POLICY].prefix is HistoryMode.STRIPS_THINKING


XML_CALLS = TEMPLATE + "{% if tools %}{{ tools }}<tool_call><function=name>{% endif %}"


@pytest.mark.parametrize(
    ("template", "wants", "says"),
    [
        (TEMPLATE, {"thinking": True}, "thinking cannot be switched"),
        (TEMPLATE, {"thinking": False}, "thinking cannot be switched"),
        (TEMPLATE, {"tools": [TOOL]}, "does not show them"),
        (XML_CALLS, {"tools": [TOOL]}, "cannot parse"),
    ],
)
async def test_what_a_template_would_ignore_is_refused(
    template: str, wants: dict[str, Any], says: str
) -> None:
    gateway = Gateway(nobody)  # pyright: ignore[reportArgumentType]
    gateway.set_renderer(POLICY, Renderer(tokenizer(), template))
    session = gateway.open(policies=[POLICY], sampling=SamplingSpec(), seed=0)
    with pytest.raises(BadRequest, match=says):
        await session.chat([{"role": "user", "content": "q"}], **wants)
