# SPDX-License-Identifier: Apache-2.0
"""The Modelfile that tells Ollama how to run an exported GGUF file.

Ollama's chat templates are in another language than a model's own. The two simplest forms are
written here: ChatML, and contents one after another. Which one a model has is found by rendering
messages with its template, so that Ollama shows it exactly what it saw in training. For any other
template Ollama goes by the one in the GGUF file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import SamplingConfig
from penstock.errors import BadRequest
from penstock.types import JsonObject

if TYPE_CHECKING:
    from penstock.gateway.renderer import Renderer

_START, _END = "<|im_start|>", "<|im_end|>"
_CHATML = (
    "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n"
    "{{ end }}<|im_start|>assistant\n"
)
_CONTENTS = "{{- range .Messages }}{{ .Content }}{{ end }}"
_PROBE: tuple[JsonObject, ...] = (
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b c"},
    {"role": "assistant", "content": "d"},
    {"role": "user", "content": "e"},
)


def write_modelfile(model: Path, path: Path, gguf_name: str, sampling: SamplingConfig) -> None:
    """Write it beside the GGUF file; `model` is the folder that the file was made of."""
    from penstock.gateway.renderer import Renderer

    path.write_text("\n".join(_lines(Renderer.load(model), gguf_name, sampling)) + "\n")


def _lines(renderer: Renderer, gguf_name: str, sampling: SamplingConfig) -> Iterator[str]:
    yield f"# ollama create NAME -f Modelfile\nFROM ./{gguf_name}"
    if (template := _find_template(renderer)) is not None:
        yield f'TEMPLATE """{template}"""'
    if template == _CHATML and (system := _default_system(renderer)):
        yield f'SYSTEM """{system}"""'
    yield f"PARAMETER temperature {sampling.temperature:g}"
    yield f"PARAMETER top_p {sampling.top_p:g}"
    if sampling.top_k:
        yield f"PARAMETER top_k {sampling.top_k}"
    for token in sorted(renderer.decode([token]) for token in renderer.stop_ids):
        if token and '"' not in token and "\n" not in token:
            yield f'PARAMETER stop "{token}"'


def _find_template(renderer: Renderer) -> str | None:
    found = _render(renderer, _PROBE)
    turns = [f"{_START}{one['role']}\n{one['content']}{_END}\n" for one in _PROBE]
    if found == "".join(turns) + f"{_START}assistant\n":
        return _CHATML
    return _CONTENTS if found == "".join(one["content"] for one in _PROBE) else None


def _default_system(renderer: Renderer) -> str:
    """The system prompt that the template adds to a conversation without one."""
    found = _render(renderer, _PROBE[1:]) or ""
    own, _, rest = found.removeprefix(f"{_START}system\n").partition(f"{_END}\n")
    is_added = found.startswith(f"{_START}system\n") and rest.startswith(f"{_START}user\nb c")
    return own if is_added and '"""' not in own else ""


def _render(renderer: Renderer, messages: tuple[JsonObject, ...]) -> str | None:
    try:
        return renderer.render(messages)
    except BadRequest:
        return None
