# SPDX-License-Identifier: Apache-2.0
"""Recorded tokens as text, with the tokenizer that the run itself published.

Reads the small files of a version in the run's weight store, never its tensors. Decodes only: no
text becomes tokens here.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, PenstockError, WeightsError
from penstock.fleet.run_folder import RunFolder
from penstock.types import PolicyName, Trajectory, Turn, view_ids
from penstock.weights.manifest import parse_manifest
from penstock.weights.store import DirectoryStore

if TYPE_CHECKING:
    from penstock.gateway.renderer import Renderer

MAX_SMALL_BYTES = 256 << 20
"""Of the files of a version beside its tensors; what goes beyond that is left out."""
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedToolCall:
    name: str
    arguments: str
    """A JSON object, as the model wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedTurn:
    """One model call as text."""

    policy: str
    role: str
    parent: int
    """Index of the turn that it continues; -1 for a new context."""
    prompt: str
    """What was added since that turn, with the special tokens of the chat template."""
    answer: str
    """What the model wrote, without special tokens, reasoning and tool calls."""
    reasoning: str
    tool_calls: tuple[DecodedToolCall, ...]
    versions: tuple[str, ...]
    """The versions that sampled it, such as `policy@1.5`."""
    finish: str
    num_tokens: int
    """Sampled tokens."""
    agent: str = ""
    """The sub-agent that made the call, such as `0.2`; empty for the workflow."""
    reward: float | None = None
    """Its own reward, if the workflow gave it one."""

    @property
    def raw_answer(self) -> str:
        """The complete answer: reasoning, text, then tool calls."""
        parts = [f"<think>{self.reasoning}</think>"] if self.reasoning else []
        parts += [self.answer] if self.answer else []
        parts += [f"{call.name}({call.arguments})" for call in self.tool_calls]
        return "\n".join(parts)


class Decoder:
    """Decodes trajectories of one run; loads the tokenizer of each policy once."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._renderers: dict[PolicyName, Renderer] = {}

    def turns(self, trajectory: Trajectory) -> tuple[DecodedTurn, ...]:
        return tuple(self._turn(turn) for turn in trajectory.turns)

    def last_answer(self, trajectory: Trajectory) -> str:
        """Text of the last answer that the workflow received."""
        turn = next((turn for turn in reversed(trajectory.turns) if turn.reached_agent), None)
        if turn is None:
            raise ValueError("no answer reached the workflow")
        return self._turn(turn).answer

    def _turn(self, turn: Turn) -> DecodedTurn:
        from penstock.gateway.parsing import THINK, AnswerFormat, parse_answer

        renderer = self.renderer(turn.policy)
        prompt = renderer.decode(view_ids(turn.prompt_ids))
        answer_format = AnswerFormat(
            has_thinking=renderer.has_thinking,
            is_thinking=renderer.has_thinking and prompt.rstrip().endswith(THINK),
            tools=renderer.tool_format,
        )
        text = renderer.decode_answer(view_ids(turn.sampled_ids).tolist(), turn.finish).visible
        parsed = parse_answer(text, answer_format, str)
        return DecodedTurn(
            policy=turn.policy,
            role=turn.role,
            parent=turn.parent,
            prompt=prompt,
            answer=parsed.text,
            reasoning=parsed.reasoning,
            tool_calls=tuple(
                DecodedToolCall(name=call.name, arguments=call.arguments)
                for call in parsed.tool_calls
            ),
            versions=tuple(
                dict.fromkeys(f"{turn.policy}@{s.incarnation}.{s.number}" for s in turn.spans)
            ),
            finish=turn.finish.value,
            num_tokens=len(view_ids(turn.sampled_ids)),
            agent=turn.agent,
            reward=turn.reward,
        )

    def renderer(self, policy: PolicyName) -> Renderer:
        """Its tokenizer and chat template."""
        found = self._renderers.get(policy)
        if found is None:
            found = self._renderers[policy] = load_renderer(self._folder, policy)
        return found


def load_renderer(folder: RunFolder, policy: PolicyName) -> Renderer:
    """The tokenizer and chat template of this policy: from any of its versions on disk, or else
    from the folder of its initial model."""
    try:
        from penstock.gateway.renderer import Renderer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"text needs {error.name}, which is not installed; pip install 'penstock-rl[tokens]'"
        ) from None
    with tempfile.TemporaryDirectory(prefix="penstock-tokenizer-") as temporary:
        if copy_small_files(DirectoryStore(folder.weights), policy, Path(temporary)):
            return Renderer.load(Path(temporary))
    init = initial_model_folder(folder, policy)
    if (init / TOKENIZER).is_file():
        return Renderer.load(init)
    raise WeightsError(
        f"the text of policy {policy} cannot be decoded: no version in {folder.weights} has a "
        f"{TOKENIZER}, nor has its initial model; its token ids are in `turns`"
    )


def initial_model_folder(folder: RunFolder, policy: PolicyName) -> Path:
    """Its folder; a relative path counts from where the run was started."""
    model = folder.read_config().models[policy]
    try:
        return Path(folder.endpoints().work_dir) / model.init
    except ConfigError:  # a folder that no launcher made
        return Path(model.init)


def copy_small_files(store: DirectoryStore, policy: PolicyName, target: Path) -> bool:
    """Copy the files beside the tensors of one version that has a tokenizer."""
    for digest in store.manifests():
        try:
            manifest = parse_manifest(store.read_manifest(digest))
        except (PenstockError, OSError):
            continue  # deleted meanwhile, or damaged
        names = {entry.name for entry in manifest.files}
        if manifest.policy != policy or TOKENIZER not in names:
            continue
        small = (entry for entry in manifest.files if not entry.name.endswith(".safetensors"))
        left = MAX_SMALL_BYTES
        try:
            for entry in small:
                with store.open_blob(entry.blob) as blob:
                    size = os.fstat(blob.fileno()).st_size
                    if size <= left:
                        left -= (target / entry.name).write_bytes(blob.read(size))
            return True
        except OSError:  # deleted meanwhile, or a link
            continue
    return False
