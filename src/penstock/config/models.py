# SPDX-License-Identifier: Apache-2.0
"""Policies of the run file: their models, and the engines that generate with them.

Owns the shape of one entry under `models`. Loads no model and starts no engine."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from penstock.config.algorithms import AlgorithmConfig
from penstock.config.base import Section, non_blank, only_supported, unknown
from penstock.config.dataflow import PolicyDataflowConfig
from penstock.config.engines import EngineName
from penstock.config.lora import LoraConfig
from penstock.config.trainer import TrainingConfig

BUILTIN_MODELS = ("builtin:tiny-qwen3",)
"""Models that penstock builds itself, without a download."""


def _init(value: str) -> str:
    if value.startswith("builtin:") and value not in BUILTIN_MODELS:
        raise ValueError(unknown("built-in model", value, BUILTIN_MODELS))
    return non_blank(value)


class VllmConfig(Section):
    """Where vLLM is, for `engine: vllm`."""

    url: str | None = None
    """A running server, like http://127.0.0.1:8000; null starts one inside each node."""
    environment: str | None = None
    """Virtual environment with vLLM; null for the one that `make setup-engine` creates."""
    options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """More arguments for `vllm serve`, like [--dtype, float32]."""


class SglangConfig(Section):
    """Where SGLang is, for `engine: sglang`; untested on a real server."""

    url: str | None = None
    """The server, like http://127.0.0.1:30000."""


class ModelConfig(Section):
    """One policy: its model, its engine, and settings that differ from the shared ones."""

    init: Annotated[str, AfterValidator(_init)]
    """Initial weights: `builtin:NAME`, or a folder in Hugging Face format."""
    lora: LoraConfig | None = None
    """Train an adapter on frozen weights; null trains all weights."""
    engine: EngineName = "hf"
    """What generates: transformers in the node, vLLM or SGLang in a separate process, a table of
    answers, or a simulation of timing."""
    vllm: VllmConfig = VllmConfig()
    """Settings of vLLM."""
    sglang: SglangConfig = SglangConfig()
    """Settings of SGLang."""
    replicas: NonNegativeInt = 1
    """Rollout nodes that the launcher starts; 0 for only nodes that join."""
    frozen: Annotated[
        Literal[False], only_supported(False, "set frozen: false, or leave it out")
    ] = False
    """Used and never trained (judges, teachers); only false is supported yet."""
    capacity: PositiveInt = 256
    """Slots that one node works on concurrently."""
    engines: PositiveInt = 1
    """Engines inside each node; requests of a lost one continue on the others."""
    max_paused: float = Field(default=0.25, gt=0, le=1)
    """Share of a node's engines that may load new weights at the same time; always at least one."""
    torch_threads: PositiveInt = 1
    """CPU threads of torch in each process of this policy."""
    algorithm: AlgorithmConfig | None = None
    """This policy's algorithm; missing keys come from the shared section."""
    training: TrainingConfig | None = None
    """This policy's training; missing keys come from the shared section."""
    dataflow: PolicyDataflowConfig | None = None
    """This policy's rules."""

    @model_validator(mode="after")
    def _check_engine_server(self) -> Self:
        if self.engine == "sglang" and not self.sglang.url:
            raise ValueError("engine sglang needs a running server; set sglang: {url: ...}")
        if self.engine_url and self.replicas * self.engines > 1:
            raise ValueError(
                f"{self.engine}.url names one server, and each engine needs a separate one; "
                "set replicas: 1 and engines: 1"
            )
        return self

    @property
    def engine_url(self) -> str:
        """URL of the engine's running server; empty if penstock starts it."""
        urls = {"vllm": self.vllm.url, "sglang": self.sglang.url}
        return urls.get(self.engine) or ""
