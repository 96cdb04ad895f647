# SPDX-License-Identifier: Apache-2.0
"""A template that only puts messages together is rendered without a process, to the same text; one
that could do more is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tests.unit.gateway.chatml import TEMPLATE, write_snapshot

from penstock.gateway.plain_template import MAX_CHARS, MAX_PROMPT_BYTES, plain_template
from penstock.gateway.renderer import Renderer
from penstock.gateway.template_process import TemplateProcess, shared_process
from penstock.gateway.tokenizer_files import PLAIN_TEMPLATE

WITH_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}{{ '<|im_start|>' "
    "+ message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BRANCHES = (
    "{{ bos_token }}\n  {% for m in messages %}\n {% if m.role == 'user' or not loop.last %}"
    "[{{ m.content | trim }}]{% elif m['name'] and m.content %}{{ m.name ~ ':' ~ m.content }}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
USUAL = (PLAIN_TEMPLATE, TEMPLATE, WITH_SYSTEM, BRANCHES)
CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": " hi "}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "\ud800 <b> {{ 7 * 7 }} é"}],
    [{"role": "assistant", "content": "x", "name": "n"}, {"role": "tool"}, {"role": "user"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "user", "content": None}],
    [{"content": "no role"}],
)


@pytest.mark.parametrize("source", USUAL)
def test_the_text_is_that_of_the_process(source: str) -> None:
    here, process = plain_template(source, {}), TemplateProcess(source)
    assert here is not None
    for messages in CONVERSATIONS:
        values = {"messages": messages, "add_generation_prompt": True, "bos_token": "<s>"}
        assert _text_or_error(here, values) == _text_or_error(process.render, values)
    process.close()


def _text_or_error(render: Any, values: dict[str, Any]) -> str:
    try:
        return render(**values)
    except TemplateError as error:
        return f"error: {error}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in messages %}{% for b in messages %}{{ b.content }}{% endfor %}{% endfor %}",
        "{% for a in messages %}{{ messages }}{% endfor %}",
        "{% for a in messages %}{{ messages[0].content }}{% endfor %}",
        "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% for loop in messages %}{{ loop.x }}{% endfor %}",
        "{% for a in messages %}{{ a.content * 99999 }}{% endfor %}",
        "{% for a in messages %}{{ '%99999999s' % a.content }}{% endfor %}",
        "{% for a in messages %}{{ a.content | replace('', 'x') }}{% endfor %}",
        "{% for a in messages %}{{ a.content.format(1) }}{% endfor %}",
        "{% for a in messages %}{{ a.items }}{% endfor %}",
        "{% for a in messages %}{{ a['__class__'] }}{% endfor %}",
        "{% for a in messages %}{{ a.content.__class__ }}{% endfor %}",
        "{% for a in messages if a.content * 9 %}{{ a.role }}{% endfor %}",
        "{% set x = 'a' %}{% set x = x + x %}{{ x }}",
        "{% macro m() %}{% endmacro %}{{ m() }}",
        "{{ self }}{{ cycler }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% include 'x' %}",
        "{% if %}",
        "{{ " + "(" * 400 + "1" + ")" * 400 + " }}",
        PLAIN_TEMPLATE + " " * MAX_CHARS,
    ],
)
def test_what_could_do_more_is_not_plain(source: str) -> None:
    assert plain_template(source, {}) is None


def test_long_special_tokens_are_for_the_process() -> None:
    """A model brings them, and its template may repeat them for every message."""
    assert plain_template(TEMPLATE, {"bos_token": "<s>", "eos_token": "x" * 200}) is not None
    assert plain_template(TEMPLATE, {"bos_token": "<s>", "eos_token": "x" * 300}) is None


def test_only_a_long_prompt_starts_a_process(tmp_path: Path) -> None:
    source = TEMPLATE + "{# no other test has its process #}"
    renderer, process = (
        Renderer.load(write_snapshot(tmp_path, template=source)),
        shared_process(source),
    )
    assert renderer.render([{"role": "user", "content": "a"}]).endswith("assistant\n")
    assert process.pid is None
    text = renderer.render([{"role": "user", "content": "a" * MAX_PROMPT_BYTES}])
    assert len(text) > MAX_PROMPT_BYTES and process.pid is not None
    process.close()
