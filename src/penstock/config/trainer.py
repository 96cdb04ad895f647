# SPDX-License-Identifier: Apache-2.0
"""Settings of learning: sampling and training. The algorithm is in `algorithms`.

Owns their defaults and the contradictions inside each. Does not know policies, sources or storage,
and builds nothing."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from penstock.config.base import Section
from penstock.config.hosts import HostName
from penstock.config.pipeline import ParallelConfig
from penstock.config.stages import Tags
from penstock.options import Contradiction, non_empty
from penstock.types import MAX_TEMPERATURE, MIN_TEMPERATURE

Recompute = Literal["none", "layer", "selective"]
STALENESS_BY_MODE: Mapping[str, int] = {"sync": 0, "one_step": 1, "async": 8}
"""`max_staleness` of each mode; of async only where the file gives none."""


def _temperature(value: object) -> object:
    if value == 0 and not isinstance(value, bool):
        raise ValueError(
            "with 0 all members of a group would be the same answer; set temperature > 0"
        )
    return value


class SamplingConfig(Section):
    """How engines turn logits into tokens; recorded log-probs are under exactly this."""

    temperature: Annotated[float, BeforeValidator(_temperature)] = Field(
        default=1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE
    )
    """Divides the logits; 1.0 samples from the policy itself."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens with this share of the probability; 1.0 keeps all."""
    top_k: NonNegativeInt = 0
    """Keep this many likeliest tokens; 0 keeps all."""
    max_tokens: PositiveInt = 256
    """Most tokens sampled in one turn."""


class TrainingConfig(Section):
    """How batches become versions."""

    steps: PositiveInt
    """Batches to train on; the run is finished after the last."""
    learning_rate: float = Field(default=1e-6, ge=0, lt=10)
    """AdamW's peak learning rate; 0 changes nothing, which is a useful control."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "constant"
    """The learning rate after its peak: constant, or falling to 0 after the last step;
    `warmup_stable_decay` falls only in the last 30 % of the steps."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises evenly to its peak."""
    groups_per_batch: PositiveInt = 64
    """Groups sealed into one batch."""
    minibatches: PositiveInt = 1
    """Parts a batch is cut into; one optimizer update each."""
    epochs: PositiveInt = 1
    """Passes over a batch."""
    stream: bool = False
    """Start a step before its batch is complete: groups are sealed and computed as they arrive, and
    the weights change when the last one is in. For losses whose denominators are known beforehand;
    `check` names what is not."""
    mode: Literal["sync", "one_step", "async"] | None = None
    """Pacing by name: sync is max_staleness 0, one_step 1, async 8 or the value of max_staleness;
    null: the value of max_staleness."""
    max_staleness: NonNegativeInt = 1
    """Versions a row may be older than the one it trains; 0 is fully synchronous."""
    parallel: ParallelConfig = ParallelConfig()
    """Ranks of the trainer under the algorithm's own graph; stages of a pipeline have their own."""
    hosts: Annotated[tuple[HostName, ...], Field(strict=False), non_empty()] | None = None
    """Hosts of its ranks, like ["gpu[0-3]"], one after another; null: those with the tag `train`,
    or this machine if the file has no hosts."""
    place: Tags | None = None
    """Tags that its host must have besides `train`, with launcher ssh or ray; null: none."""
    devices: Annotated[tuple[NonNegativeInt, ...], Field(strict=False), non_empty()] | None = None
    """Devices of its ranks on each of these hosts, like [0, 1, 2, 3]; null: the first that no other
    process of the run names."""
    external: bool = False
    """The launcher starts no trainer: `penstock trainer` is started on its hosts."""
    port: int = Field(default=29500, ge=1024, le=65535)
    """Where ranks on several hosts meet: a port of the first host. Neither this nor what ranks send
    each other is encrypted: it belongs in a private network."""
    rank_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that ranks wait for one of them; then all start again from the last checkpoint."""
    checkpoint_every: PositiveInt = 20
    """Steps between two checkpoints."""
    weight_decay: float = Field(default=0.01, ge=0, lt=10)
    """AdamW's weight decay, of matrices; norms and biases do not decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations in a pass; the weights that the optimizer updates, and its state,
    stay in float32. bfloat16 is faster where the processor has instructions for it, and on others
    slower."""
    recompute: Recompute | None = None
    """What a backward pass computes again instead of keeping it: nothing (none), each layer whole
    (layer: least memory, about a third more compute), or all of it but matmuls and attention
    (selective). null: layer on GPUs, none on the CPU. Does not change the gradient."""
    offload: Literal["none", "optimizer"] = "none"
    """optimizer: AdamW's two moments are in host memory between updates, and on the device one
    parameter at a time. Saves 8 bytes per parameter of a rank's share of the model, and does not
    change the result."""
    router_replay: bool = False
    """Of a mixture of experts: engines record which experts they chose for each token, and the
    trainer uses these instead of choosing again, so that rounding sends no token to other experts
    than it was sampled with. Router and weights of the chosen experts still learn."""
    micro_batch_tokens: PositiveInt = 4096
    """Most tokens in one forward pass, or one longer sample; affects memory, not the gradient."""

    @model_validator(mode="before")
    @classmethod
    def _apply_mode(cls, data: Any) -> Any:
        """Write out the values of the mode."""
        if not isinstance(data, Mapping):
            return data
        written = cast(Mapping[str, Any], data)
        mode = written.get("mode")
        if not isinstance(mode, str) or mode not in STALENESS_BY_MODE:
            return written
        return {"max_staleness": STALENESS_BY_MODE[mode], **written}

    @property
    def _matches_mode(self) -> bool:
        if self.mode == "async":
            return self.max_staleness >= 1
        return self.mode is None or self.max_staleness == STALENESS_BY_MODE[self.mode]

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.mode is not None and not self._matches_mode:
            expected = ">= 1" if self.mode == "async" else str(STALENESS_BY_MODE[self.mode])
            yield Contradiction(
                text=f"mode {self.mode} means max_staleness {expected}, not {self.max_staleness}; "
                "remove one of the two",
                keys=(("max_staleness",), ("mode",)),
            )
        if self.minibatches > self.groups_per_batch:
            yield Contradiction(
                text=f"{self.groups_per_batch} groups cannot be cut into {self.minibatches} "
                f"minibatches; set minibatches <= {self.groups_per_batch} "
                f"or groups_per_batch >= {self.minibatches}",
                keys=(("minibatches",), ("groups_per_batch",)),
            )
        for name, size in (("cp", self.parallel.cp), ("tp", self.parallel.tp)):
            if self.router_replay and size > 1:
                yield Contradiction(
                    text=f"router_replay with {name} {size}, whose ranks share the tokens of a "
                    f"sample, is not supported; set {name}: 1 and raise dp",
                    keys=(("router_replay",), ("parallel", name)),
                )
        if self.warmup_steps > self.steps:
            yield Contradiction(
                text=f"{self.warmup_steps} warmup_steps do not fit into {self.steps} steps, so the "
                f"learning rate would never reach its peak; set warmup_steps <= {self.steps}",
                keys=(("warmup_steps",), ("steps",)),
            )
