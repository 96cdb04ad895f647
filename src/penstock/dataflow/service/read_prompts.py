# SPDX-License-Identifier: Apache-2.0
"""Reads the prompt templates of a run from its files. Apart from `build`, as `build_sources` is.

Owns their digests. Does not parse them: a node does, and `penstock check` before it."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from penstock.config import RunConfig
from penstock.config.prompts import PromptConfig
from penstock.errors import ConfigError

MAX_CHARS = 1 << 18
"""Of one template: every node gets all of them when it registers."""


def prompt_texts(config: RunConfig) -> dict[str, str]:
    """The text of every template: as the run started with it, else from its file."""
    return {
        name: read_prompt(name, prompt) if prompt.text is None else prompt.text
        for name, prompt in config.prompts.items()
    }


def with_prompts(config: RunConfig) -> RunConfig:
    """The config with the text and digest that each template has now. A file that is gone leaves
    those that the run already has."""
    if not config.prompts:
        return config
    prompts = {name: _with_text(name, prompt) for name, prompt in config.prompts.items()}
    return config.model_copy(update={"prompts": prompts})


def read_prompt(name: str, prompt: PromptConfig) -> str:
    """The text of a template's file; ConfigError says why it cannot be read."""
    where = f"prompt {name}: {prompt.path}"
    try:
        text = Path(prompt.path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where} cannot be read ({error}); write the template there, or correct the path"
        ) from None
    if len(text) > MAX_CHARS:
        raise ConfigError(
            f"{where} has {len(text)} characters; a template has at most {MAX_CHARS}: pass long "
            "texts as values of its placeholders"
        )
    return text


def _with_text(name: str, prompt: PromptConfig) -> PromptConfig:
    is_gone = not Path(prompt.path).expanduser().exists()
    if is_gone and prompt.text is not None:
        return prompt
    text = read_prompt(name, prompt)
    digest = blake3(text.encode()).hexdigest()
    return PromptConfig(path=prompt.path, digest=digest, text=text)
