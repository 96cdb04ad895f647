# SPDX-License-Identifier: Apache-2.0
"""vLLM worker extension: loads the weights of a folder into the running model.

vLLM imports this file in its own environment (`--worker-extension-cls penstock_worker.Extension`),
where penstock is not installed, so it cannot import penstock. It works around two problems of
vLLM's own reload:

- A checkpoint with a tied output head has no tensor for the head, so on a CPU the head would keep
  its old packed copy. Heads are tied and packed again after each load.
- vLLM fuses q, k and v into one layer, and gate and up into another. A folder with only a part of
  a fused layer is rejected before anything changes.

The route that calls this requires no credentials, so folders outside `$PENSTOCK_WEIGHTS_ROOT` are
rejected. vLLM calls `apply_patches` in each of its processes, as a plugin declared by the
`.dist-info` folder next to this file: it fixes two problems of engines on a CPU, and lets the
server write answers as numbers (`penstock_answers`).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock_answers import pack_answers
from penstock_patches import Patch

ROOT = "PENSTOCK_WEIGHTS_ROOT"
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
NAP_S = 0.0001


class Extension:
    """Methods that vLLM adds to its worker class."""

    model_runner: Any
    _penstock_patch: Patch

    def penstock_check(self, folder: str) -> dict[str, int]:
        """Check that `penstock_load` would accept the folder; changes nothing."""
        files = weight_files(folder)
        names = [name for path in files for name in _names(path)]
        if (why := missing_fused_part(names)) is not None:
            raise ValueError(f"{folder}: {why}")
        return {"num_files": len(files), "num_tensors": len(names)}

    def penstock_load(self, folder: str) -> dict[str, int]:
        """Load the folder's weights into the model; vLLM must be paused."""
        found = self.penstock_check(folder)
        torch = importlib.import_module("torch")
        with torch.no_grad():
            self.model_runner.reload_weights(weights_iterator=_tensors(weight_files(folder)))
            found["num_heads"] = repack_heads(self.model_runner.get_model())
        return found

    def penstock_prepare(self, patch: str, folder: str) -> None:
        """Prepare a patch that leads to the folder's version, beside the running model."""
        files = weight_files(folder)
        path = inside_root(patch)
        self._penstock_patch = Patch(self.model_runner.get_model(), path, files)
        self._penstock_patch.prepare()

    def penstock_apply(self) -> None:
        """Apply the prepared patch; vLLM must be paused."""
        with importlib.import_module("torch").no_grad():
            self._penstock_patch.apply()

    def penstock_verify(self, name: str) -> dict[str, bool]:
        """Compare a loaded tensor with the digest of its version."""
        with importlib.import_module("torch").no_grad():
            return {"is_right": self._penstock_patch.verify(name)}

    def penstock_progress(self) -> dict[str, Any]:
        """Whether the preparation is running, and its error."""
        patch = self._penstock_patch
        return {"is_busy": patch.is_busy, "error": patch.error, "num_bytes": patch.num_bytes}


def inside_root(name: str) -> Path:
    """The file or folder, if it is inside the only folder that may be loaded from."""
    root = os.environ.get(ROOT, "")
    if not root:
        raise PermissionError(f"{ROOT} is not set, so no folder can be loaded; set it")
    path = Path(name).resolve(strict=True)
    if not path.is_relative_to(Path(root).resolve(strict=True)):
        raise PermissionError(f"{name} is not inside {root}, the only folder {ROOT} allows")
    return path


def weight_files(folder: str) -> list[Path]:
    path = inside_root(folder)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors file in {folder}")
    return files


def missing_fused_part(names: list[str]) -> str | None:
    """Which part of a fused layer is missing; None if all are complete."""
    known = set(names)
    for name in names:
        components = name.split(".")
        for group in FUSED:
            for at, component in enumerate(components):
                if component not in group:
                    continue
                for part in group:
                    other = ".".join([*components[:at], part, *components[at + 1 :]])
                    if other not in known:
                        return f"{name} without {other}; vLLM fuses them, so send both"
    return None


def repack_heads(model: Any) -> int:
    """Tie output heads to the new embedding, and pack both again."""
    layers = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    tables = [part for part in model.modules() if isinstance(part, layers.VocabParallelEmbedding)]
    heads = [table for table in tables if isinstance(table, layers.ParallelLMHead)]
    embeddings = [table for table in tables if table not in heads]
    if model.config.tie_word_embeddings and embeddings:
        for head in heads:
            head.weight = embeddings[0].weight
    for table in tables:
        table.quant_method.process_weights_after_loading(table)
    return len(tables)


def apply_patches() -> None:
    """Patch this process of vLLM: the server, which no other process of vLLM started, and each one
    on a CPU."""
    if multiprocessing.parent_process() is None:
        pack_answers()
    if not importlib.import_module("torch").accelerator.is_available():
        stub_generator_offset()
        sleep_while_waiting()


def stub_generator_offset() -> None:
    """Add offset methods to CPU generators.

    When vLLM discards a token (chunked prefill), it rewinds the generator by its offset. CPU
    generators have no offset, which crashes the engine. With the stub the discarded draw stays
    consumed; the next one is equally random.
    """
    torch: Any = importlib.import_module("torch")

    class Generator(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> None:
            pass

    torch.Generator = Generator


def sleep_while_waiting() -> None:
    """Make vLLM's processes sleep while they wait for each other, instead of yielding in a loop.

    On cores that also compute, busy waiting starves them: a pause took up to 18 s while another
    engine was generating.
    """
    waiting: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    waiting.sched_yield = lambda: time.sleep(NAP_S)


def _names(path: Path) -> list[str]:
    with importlib.import_module("safetensors").safe_open(path, framework="pt") as file:
        return list(file.keys())


def _tensors(paths: list[Path]) -> Iterator[tuple[str, Any]]:
    for path in paths:
        with importlib.import_module("safetensors").safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (the file itself is not a mapping)
                yield name, file.get_tensor(name)
