# SPDX-License-Identifier: Apache-2.0
"""Messages to text to tokens, from the files of a snapshot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.gateway.chatml import AB, END_ID, TEMPLATE, VOCAB, ids_of, write_snapshot

from penstock.errors import BadRequest, WeightsError
from penstock.gateway.renderer import MAX_CACHED, Renderer
from penstock.gateway.template_probe import load_probed

HELLO = [{"role": "user", "content": "hello"}]


def test_renders_up_to_the_answer(tmp_path: Path) -> None:
    renderer = Renderer.load(write_snapshot(tmp_path))
    text = renderer.render(HELLO)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.render([dict(message) for message in HELLO]) == text
    assert renderer.stop_ids == {END_ID}


def test_encodes_and_decodes(tmp_path: Path) -> None:
    renderer = Renderer.load(write_snapshot(tmp_path))
    assert renderer.encode("abc") == (AB, VOCAB["c"])
    assert renderer.decode([*ids_of("abc"), END_ID]) == "abc<|im_end|>"
    assert renderer.decode_visible([*ids_of("abc"), END_ID]) == "abc"


def test_the_cache_is_bounded_and_right(tmp_path: Path) -> None:
    renderer = Renderer.load(write_snapshot(tmp_path, template="{{ messages[0].content }}"))
    for number in range(MAX_CACHED + 10):
        assert renderer.render([{"role": "user", "content": str(number)}]) == str(number)
    assert len(renderer._texts) <= MAX_CACHED  # pyright: ignore[reportPrivateUsage]


def test_a_template_inside_tokenizer_config(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path)
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    for template in (TEMPLATE, named):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert "hello<|im_end|>" in Renderer.load(folder).render(HELLO)


def test_stop_ids_of_the_generation_config_win(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert Renderer.load(folder).stop_ids == {3, 4}


@pytest.mark.parametrize("missing", ["tokenizer.json", "chat_template.jinja"])
def test_an_incomplete_snapshot_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    folder = write_snapshot(tmp_path)
    (folder / missing).unlink()
    with pytest.raises(WeightsError, match=missing.replace(".", r"\.")):
        Renderer.load(folder)


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(WeightsError, match="tokenizer_config"):
        Renderer.load(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].missing.deeper }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
    ],
)
def test_forbidden_template_actions_are_client_errors(tmp_path: Path, template: str) -> None:
    renderer = Renderer.load(write_snapshot(tmp_path, template=template))
    with pytest.raises(BadRequest, match="chat template"):
        renderer.render(HELLO)


def test_a_template_that_does_not_compile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="compile"):
        load_probed(write_snapshot(tmp_path, template="{% for %}"))


def test_a_template_sees_the_special_tokens_and_plain_json(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path, template="{{ eos_token }}{{ messages[0] | tojson }}")
    text = Renderer.load(folder).render([{"role": "user", "content": "<é>"}])
    assert text == '<|im_end|>{"role": "user", "content": "<é>"}'
