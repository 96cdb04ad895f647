# SPDX-License-Identifier: Apache-2.0
"""Policies of the run file: their models, and the engines that generate with them.

Owns the shape of one entry under `models`. Loads no model and starts no engine; which modules can
have an adapter is checked when a model is loaded."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Protocol, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from penstock.config.algorithms import AlgorithmConfig
from penstock.config.base import Section, is_custom, matching, non_blank
from penstock.config.dataflow import PolicyDataflowConfig
from penstock.config.stages import Tags
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
    def records_experts(self) -> bool: ...
    @property
    def is_reproducible(self) -> bool: ...


EngineName = Annotated[str, BeforeValidator(_check_name)]
"""A built-in engine, one that an installed package offers, or `module:Class`."""


def serves_adapters(engine: str) -> bool:
    """Whether it can serve LoRA adapters; a custom engine reports an error itself if not."""
    return engine not in builtin_names(ENGINES_PACKAGE) or _declared(engine).serves_adapters


def records_experts(engine: str) -> bool:
    """Whether its answers can carry the experts that a mixture chose; a custom engine reports an
    error itself if not."""
    return engine not in builtin_names(ENGINES_PACKAGE) or _declared(engine).records_experts


def is_reproducible(engine: str) -> bool:
    """Whether it can generate the same bits again; unknown for a custom engine, so False."""
    return engine in builtin_names(ENGINES_PACKAGE) and _declared(engine).is_reproducible


def _declared(engine: str) -> _EngineType:
    return load_object(f"{ENGINES_PACKAGE}.{engine}:ENGINE")


KV_KEEPERS = ("hf", "vllm")
"""Built-in engines that can keep keys and values across versions."""
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


_Urls = Annotated[tuple[str, ...], Field(strict=False), non_empty()]
MAX_MEMORY_SHARE = 0.95
"""CUDA itself needs the rest of a device."""


class VllmConfig(Section):
    """Where vLLM is, for `engine: vllm`, and what each engine gets of the machine."""

    url: str | _Urls | None = None
    """A running server, like unix:/run/vllm/http.sock or http://127.0.0.1:8000, or a list of them,
    one for each engine; null starts one inside each node, on a unix socket that only the node
    reaches."""
    tensor_parallel: PositiveInt = 1
    """Devices over which each engine spreads its model."""
    devices: Annotated[tuple[NonNegativeInt, ...], Field(strict=False), non_empty()] | None = None
    """Devices of this machine for the engines, dealt in order, `tensor_parallel` to each; null: the
    first that no other process of the run names."""
    memory_share: float | None = Field(default=None, gt=0, le=MAX_MEMORY_SHARE)
    """Share of each device's memory that an engine takes, so that a trainer or another engine can
    use the rest; null: the engine has its devices to itself."""
    environment: str | None = None
    """Virtual environment with vLLM; null for the one that `make setup-engine` creates."""
    options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """More arguments for `vllm serve`, like [--dtype, float32]."""


class SglangConfig(Section):
    """Where SGLang is, for `engine: sglang`; untested on a real server."""

    url: str | _Urls | None = None
    """The server, like http://127.0.0.1:30000, or a list of them, one for each engine."""


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
    place: Tags | None = None
    """Tags that the hosts of these nodes must have besides `rollout`, with launcher ssh or ray;
    null: none."""
    frozen: bool = False
    """Used and never trained, such as a judge or an opponent: no trainer, and always version 0."""
    capacity: PositiveInt = 256
    """Slots that one node works on concurrently."""
    engines: PositiveInt = 1
    """Engines inside each node; requests of a lost one continue on the others. With a list of
    `url`s, as many as there are."""
    max_paused: float = Field(default=0.25, gt=0, le=1)
    """Share of a node's engines that may load new weights at the same time; always at least one."""
    kv: Literal["drop", "keep"] = "drop"
    """What happens to the keys and values of running answers, and to cached prefixes, when new
    weights are loaded: `drop` computes them again, so that each token depends on one version only;
    `keep` continues with the old ones, which is faster, and the named version alone then no longer
    gives the log-probs. Turns record how old they may be, and that counts for staleness. For
    engines hf and vllm."""
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
        yield from self._kv_contradictions()
        yield from self._server_contradictions()
        yield from self._device_contradictions()
        if own_version(self.init) and not self.frozen:
            text = f"{self.init} is a version of this run, from which no trained policy can start; "
            text += "set frozen: true, or continue from it with `penstock fork`"
            yield Contradiction(text=text, keys=(("init",), ("frozen",)))
        for key in ("lora", "algorithm", "training", "dataflow"):
            if self.frozen and getattr(self, key) is not None:
                text = f"{key} has no effect on a frozen policy; remove it, or set frozen: false"
                yield Contradiction(text=text, keys=((key,), ("frozen",)))

    @model_validator(mode="before")
    @classmethod
    def _count_servers(cls, data: Any) -> Any:
        """A list of servers is one engine each, if the file does not say how many."""
        if not isinstance(data, Mapping):
            return data
        written = cast(Mapping[str, Any], data)
        section: object = written.get(str(written.get("engine")))
        urls: object = section.get("url") if isinstance(section, Mapping) else None  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
        if "engines" in written or not isinstance(urls, list | tuple) or not urls:
            return written
        return {**written, "engines": len(cast(list[Any], urls))}

    def _kv_contradictions(self) -> Iterator[Contradiction]:
        if self.kv == "drop":
            return
        if self.engine in builtin_names(ENGINES_PACKAGE) and self.engine not in KV_KEEPERS:
            text = f"engine {self.engine} cannot keep keys and values across versions; set "
            yield Contradiction(text=f"{text}kv: drop", keys=(("kv",), ("engine",)))
        if self.lora is not None and self.engine == "vllm":
            text = "an answer of vLLM keeps its adapter to the end, and so its keys and values; "
            yield Contradiction(text=f"{text}remove kv", keys=(("kv",), ("lora",)))

    def _server_contradictions(self) -> Iterator[Contradiction]:
        urls, num_engines = self.engine_urls, self.replicas * self.engines
        if urls and self.replicas and num_engines != len(urls):
            servers = "1 server" if len(urls) == 1 else f"{len(urls)} servers"
            text = f"{self.engine}.url names {servers}, and {self.replicas} replicas × "
            text += f"{self.engines} engines need {num_engines}, one each; list {num_engines} "
            text += f"urls, or set replicas: 1 and engines: {len(urls)}"
            yield Contradiction(text=text, keys=((self.engine, "url"), ()))
        if len(set(urls)) < len(urls):
            text = f"{self.engine}.url names a server twice, and each engine needs a separate one"
            yield Contradiction(text=f"{text}; remove it", keys=((self.engine, "url"),))

    def _device_contradictions(self) -> Iterator[Contradiction]:
        written = {
            "devices": self.vllm.devices is not None,
            "tensor_parallel": self.vllm.tensor_parallel > 1,
            "memory_share": self.vllm.memory_share is not None,
        }
        for key, is_written in written.items():
            if is_written and self.engine == "vllm" and self.vllm.url:
                text = "vllm.url names a server that runs already, on its own devices; start it "
                text += f"with what it needs, and remove {key}"
                yield Contradiction(text=text, keys=(("vllm", key), ("vllm", "url")))

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """URLs of the engine's running servers, one per engine; empty if penstock starts them."""
        urls = {"vllm": self.vllm.url, "sglang": self.sglang.url}.get(self.engine)
        return (urls,) if isinstance(urls, str) else urls or ()

    @property
    def devices_per_engine(self) -> int:
        """Devices of each engine that a node starts, on a machine with devices."""
        return self.vllm.tensor_parallel if self.engine == "vllm" else 0

    @property
    def engine_options(self) -> tuple[str, ...]:
        """Arguments of an engine that is a separate program."""
        own, vllm = list[str](), self.vllm
        if self.engine == "vllm" and vllm.tensor_parallel > 1:
            own += ["--tensor-parallel-size", str(vllm.tensor_parallel)]
        if self.engine == "vllm" and vllm.memory_share is not None:
            own += ["--gpu-memory-utilization", f"{vllm.memory_share:g}"]
        return (*own, *vllm.options)
