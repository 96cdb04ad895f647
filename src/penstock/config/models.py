# SPDX-License-Identifier: Apache-2.0
"""Policies of the run file: their models, and the engines that generate with them.

Owns the shape of one entry under `models`. Loads no model and starts no engine; which modules can
have an adapter is checked when a model is loaded."""

import re
from collections.abc import Iterator
from typing import Annotated, Protocol

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt

from penstock.config.algorithms import AlgorithmConfig
from penstock.config.base import Section, is_custom, matching, non_blank
from penstock.config.dataflow import PolicyDataflowConfig
from penstock.config.trainer import TrainingConfig
from penstock.options import Contradiction, non_empty
from penstock.plugins import ENGINE_GROUP, builtin_names, load_object, plugin_names, unknown

BUILTIN_MODELS = ("builtin:tiny-qwen3",)
"""Models that penstock builds itself, without a download."""
ENGINES_PACKAGE = "penstock.rollout.engines"
"""Its modules are the built-in engines. Names are listed without an import; reading a property
imports only the module of that engine. Custom engines are user code and never imported here."""


def _check_name(value: object) -> object:
    names = builtin_names(ENGINES_PACKAGE)
    if isinstance(value, str) and (value in names or is_custom(value, ENGINE_GROUP)):
        return value
    known = (*names, *plugin_names(ENGINE_GROUP))
    raise ValueError(unknown("engine", value, known, also="module:Class"))


class _EngineType(Protocol):
    @property
    def serves_adapters(self) -> bool: ...
    @property
    def is_reproducible(self) -> bool: ...


EngineName = Annotated[str, BeforeValidator(_check_name)]
"""A built-in engine, one that an installed package offers, or `module:Class`."""


def serves_adapters(engine: str) -> bool:
    """Whether it can serve LoRA adapters; a custom engine reports an error itself if not."""
    return engine not in builtin_names(ENGINES_PACKAGE) or _declared(engine).serves_adapters


def is_reproducible(engine: str) -> bool:
    """Whether it can generate the same bits again; unknown for a custom engine, so False."""
    return engine in builtin_names(ENGINES_PACKAGE) and _declared(engine).is_reproducible


def _declared(engine: str) -> _EngineType:
    return load_object(f"{ENGINES_PACKAGE}.{engine}:ENGINE")


RUN_PREFIX = "run:"
"""Starts the name of a version of another run."""
KEPT_COPY = re.compile(r"^.*/initial/(?P<digest>[0-9a-f]{64})$")
"""A version that a run copied into its own folder: the path that its config has then."""
_OWN_VERSION = re.compile(r"(?P<policy>[A-Za-z0-9][\w-]*)@(?P<number>[0-9]{1,9})", re.ASCII)


def own_version(init: str) -> tuple[str, int] | None:
    """Policy and number, if this text names a version of a policy of the same run."""
    found = _OWN_VERSION.fullmatch(init)
    return (found["policy"], int(found["number"])) if found else None


def _init(value: str) -> str:
    if value.startswith("builtin:") and value not in BUILTIN_MODELS:
        raise ValueError(unknown("built-in model", value, BUILTIN_MODELS))
    if value.startswith(RUN_PREFIX) and not value.removeprefix(RUN_PREFIX).partition("@")[0]:
        forms = "run:FOLDER, run:FOLDER@NUMBER or run:FOLDER@POLICY@NUMBER"
        raise ValueError(f"{value!r} names no run; write {forms}")
    return non_blank(value)


class VllmConfig(Section):
    """Where vLLM is, for `engine: vllm`."""

    url: str | None = None
    """A running server, like unix:/run/vllm/http.sock or http://127.0.0.1:8000; null starts one
    inside each node, on a unix socket that only the node reaches."""
    environment: str | None = None
    """Virtual environment with vLLM; null for the one that `make setup-engine` creates."""
    options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """More arguments for `vllm serve`, like [--dtype, float32]."""


class SglangConfig(Section):
    """Where SGLang is, for `engine: sglang`; untested on a real server."""

    url: str | None = None
    """The server, like http://127.0.0.1:30000."""


_MODULE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_Target = Annotated[
    str, AfterValidator(matching(_MODULE, "write the last part of a module's name, like q_proj"))
]


class LoraConfig(Section):
    """Low-rank matrices beside frozen ones: y = W x + alpha / rank · B A x."""

    rank: PositiveInt = 16
    """Rows of A, columns of B."""
    alpha: PositiveInt = 32
    """The product B A is scaled by alpha / rank."""
    targets: Annotated[tuple[_Target, ...], Field(strict=False), non_empty()] | None = None
    """Linear layers that get an adapter, by the last part of their names, like [q_proj, v_proj];
    null: all of attention and MLP."""


class ModelConfig(Section):
    """One policy: its model, its engine, and settings that differ from the shared ones."""

    init: Annotated[str, AfterValidator(_init)]
    """Initial weights: a model of the Hugging Face Hub, like Qwen/Qwen3-0.6B or
    Qwen/Qwen3-0.6B@REVISION; a folder in Hugging Face format, relative to the working directory; or
    `builtin:NAME`. The run records the commit of the Hub and keeps it. `run:FOLDER` is the newest
    version of another run, `run:FOLDER@NUMBER` or `run:FOLDER@POLICY@NUMBER` a certain one; the run
    keeps a verified copy. `POLICY@NUMBER` is a version of this run, for a frozen policy."""
    lora: LoraConfig | None = None
    """Train an adapter on frozen weights; null trains all weights."""
    engine: EngineName = "hf"
    """What generates: transformers in the node, vLLM or SGLang in a separate process, a table of
    answers, or a simulation of timing."""
    vllm: VllmConfig = VllmConfig()
    """Where vLLM is, for `engine: vllm`."""
    sglang: SglangConfig = SglangConfig()
    """Where SGLang is, for `engine: sglang`."""
    replicas: NonNegativeInt = 1
    """Rollout nodes that the launcher starts with these engines; 0 for none. Each serves all
    policies, or, where a source names its `policies`, those that share a source with this one."""
    frozen: bool = False
    """Used and never trained, such as a judge or an opponent: no trainer, and always version 0."""
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

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.engine == "sglang" and not self.sglang.url:
            text = "engine sglang needs a running server; set sglang: {url: ...}"
            yield Contradiction(text=text, keys=((),))
        if self.engine_url and self.replicas * self.engines > 1:
            text = f"{self.engine}.url names one server, and each engine needs a separate one; "
            yield Contradiction(text=f"{text}set replicas: 1 and engines: 1", keys=((),))
        if own_version(self.init) and not self.frozen:
            text = f"{self.init} is a version of this run, from which no trained policy can start; "
            text += "set frozen: true, or continue from it with `penstock fork`"
            yield Contradiction(text=text, keys=(("init",), ("frozen",)))
        for key in ("lora", "algorithm", "training", "dataflow"):
            if self.frozen and getattr(self, key) is not None:
                text = f"{key} has no effect on a frozen policy; remove it, or set frozen: false"
                yield Contradiction(text=text, keys=((key,), ("frozen",)))

    @property
    def engine_url(self) -> str:
        """URL of the engine's running server; empty if penstock starts it."""
        urls = {"vllm": self.vllm.url, "sglang": self.sglang.url}
        return urls.get(self.engine) or ""
