# SPDX-License-Identifier: Apache-2.0
"""What vLLM's workers learn from penstock: weights of a folder, put into the running model.

vLLM imports this file in its own environment (`--worker-extension-cls penstock_worker.Extension`),
where there is no penstock; the folder it lies in is no part of that package. Two traps of vLLM's
own reload are closed here. A checkpoint with a tied head has no tensor for it, so on a CPU the
head would go on with its old packed copy: heads are tied and packed anew. q, k and v are one layer
inside vLLM, gate and up another: an update with a part of one is refused before anything changes.
The route that calls this asks for no credentials, so folders outside `$PENSTOCK_WEIGHTS_ROOT` are
refused too. Two more traps, of engines on a CPU, are closed by `apply_cpu_patches`, which vLLM
calls in each of its processes: the folder beside this file names it as a plugin.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = "PENSTOCK_WEIGHTS_ROOT"
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
NAP_S = 0.0001


class Extension:
    """vLLM mixes these methods into its worker."""

    model_runner: Any

    def penstock_check(self, folder: str) -> dict[str, int]:
        """Whether `penstock_load` would take this folder; changes nothing."""
        files = weight_files(folder)
        names = [name for path in files for name in _names(path)]
        if (why := missing_fused_part(names)) is not None:
            raise ValueError(f"{folder}: {why}")
        return {"num_files": len(files), "num_tensors": len(names)}

    def penstock_load(self, folder: str) -> dict[str, int]:
        """Put the folder's weights into the model; vLLM must be paused."""
        found = self.penstock_check(folder)
        torch = importlib.import_module("torch")
        with torch.no_grad():
            self.model_runner.reload_weights(weights_iterator=_tensors(weight_files(folder)))
            found["num_heads"] = repack_heads(self.model_runner.get_model())
        return found


def weight_files(folder: str) -> list[Path]:
    root = os.environ.get(ROOT, "")
    if not root:
        raise PermissionError(f"{ROOT} is not set, so no folder may be loaded")
    path = Path(folder).resolve(strict=True)
    if not path.is_relative_to(Path(root).resolve(strict=True)):
        raise PermissionError(f"{folder} is not under {root}, which {ROOT} allows")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors file in {folder}")
    return files


def missing_fused_part(names: list[str]) -> str | None:
    """Which part of a fused layer is missing, if any."""
    known = set(names)
    for name in names:
        words = name.split(".")
        for group in FUSED:
            for at, word in enumerate(words):
                if word not in group:
                    continue
                for part in group:
                    other = ".".join([*words[:at], part, *words[at + 1 :]])
                    if other not in known:
                        return f"{name} without {other}; vLLM keeps them as one layer, send both"
    return None


def repack_heads(model: Any) -> int:
    """Tie output heads to the new embedding and pack both anew."""
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


def apply_cpu_patches() -> None:
    """Where vLLM computes on a CPU, two habits that suit a GPU harm it."""
    if not importlib.import_module("torch").accelerator.is_available():
        stub_generator_offset()
        sleep_while_waiting()


def stub_generator_offset() -> None:
    """vLLM takes back the draw of a token that it throws away (a prompt read in parts) through its
    generator's offset. Generators of a CPU have none, and the engine dies of it. There the draw
    stays used: the one after it is as fair."""
    torch: Any = importlib.import_module("torch")

    class Generator(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> None:
            pass

    torch.Generator = Generator


def sleep_while_waiting() -> None:
    """vLLM's processes wait for each other by yielding in a loop. On cores that compute as well
    they then lose their turns: a pause waited up to 18 s behind the answers of another engine."""
    waiting: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    waiting.sched_yield = lambda: time.sleep(NAP_S)


def _names(path: Path) -> list[str]:
    with importlib.import_module("safetensors").safe_open(path, framework="pt") as file:
        return list(file.keys())


def _tensors(paths: list[Path]) -> Iterator[tuple[str, Any]]:
    for path in paths:
        with importlib.import_module("safetensors").safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (the file itself is no mapping)
                yield name, file.get_tensor(name)
