# SPDX-License-Identifier: Apache-2.0
"""How the rollout pool grows and shrinks while a run runs.

Owns the shape of `autoscale` and the placeholders of its commands. The thresholds of the rule are
in `dataflow.report`; decides and starts nothing."""

from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt

from penstock.config.base import Name, Section
from penstock.options import Contradiction, non_empty
from penstock.plugins import quoted

PLACEHOLDERS = ("name", "url", "token_file", "tags", "run_dir")
"""Of a command: the node's name, the run's URL, the file with its token, what it passes as --tags,
and the run folder."""


def _template(words: tuple[str, ...]) -> tuple[str, ...]:
    for word in words:
        try:
            found = [field for _, *field in Formatter().parse(word) if field[0] is not None]
        except ValueError as error:
            raise ValueError(f"{quoted(word)}: {error}; write a literal brace twice") from None
        for name, spec, conversion in found:
            if name not in PLACEHOLDERS or spec or conversion:
                known = ", ".join(f"{{{one}}}" for one in PLACEHOLDERS)
                raise ValueError(
                    f"{quoted(word)} has an unknown placeholder; use {known}, and write a literal "
                    "brace twice"
                )
    return words


Command = Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_template)]
"""A program and its arguments. No shell reads it."""


class NodeTypeConfig(Section):
    """A kind of node that can be started and retired."""

    gpus: PositiveInt = 1
    """GPUs of one node; a node on a CPU counts as one."""
    cost_per_hour: float = Field(default=0.0, ge=0, le=1e6)
    """Cost of one node, in any currency: of two types, the cheaper per GPU is started first."""
    spot: bool = False
    """Can be taken away at any time; started before all types that cannot."""
    max_nodes: PositiveInt | None = None
    """Never more nodes of this type; null for no limit."""
    start: Command = ()
    """Command that starts a node, such as [sbatch, --job-name, "{name}", node.sh, "{url}",
    "{token_file}", "{tags}"]; empty: the launcher starts it on this machine."""
    stop: Command = ()
    """Command that ends it, such as [scancel, --name, "{name}"]."""

    @property
    def tags(self) -> tuple[str, ...]:
        """What a node of this type says about itself, as far as it is worth saying."""
        gpus = (f"gpus={self.gpus}",) if self.gpus > 1 else ()
        cost = (f"cost={self.cost_per_hour:g}",) if self.cost_per_hour else ()
        return (*gpus, *cost, *(("spot",) if self.spot else ()))

    def _contradictions(self) -> Iterator[Contradiction]:
        if bool(self.start) != bool(self.stop):
            text = "start and stop belong together: a node that is started must be ended, too"
            yield Contradiction(text=text, keys=(("start",), ("stop",)))
        for key, words in (("start", self.start), ("stop", self.stop)):
            if words and not any("{name}" in word for word in words):
                text = (
                    f"{key} does not contain {{name}}, so nodes could not be distinguished; add it"
                )
                yield Contradiction(text=text, keys=((key,),))


class AutoscaleConfig(Section):
    """The size of the rollout pool while the run runs; `dataflow.report` has its thresholds."""

    mode: Literal["recommend", "act"] = "recommend"
    """`act`: change the pool as the rule decides. `recommend`: only say what it decided;
    `penstock scale` changes the pool."""
    node_types: Annotated[Mapping[Name, NodeTypeConfig], non_empty()] = Field(
        default_factory=lambda: {"local": NodeTypeConfig()}
    )
    """Kinds of nodes, by name."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """A node that has not joined this long after its start is given up, and its type rests."""

    @property
    def launched_type(self) -> str | None:
        """The type of the nodes that the launcher starts; None: it starts only what the run file
        says."""
        return next((name for name, one in self.node_types.items() if not one.start), None)

    def _contradictions(self) -> Iterator[Contradiction]:
        launched = [name for name, one in self.node_types.items() if not one.start]
        if len(launched) > 1:
            text = f"{' and '.join(launched)} have no start command, and all nodes that the "
            text += "launcher starts are of one type; give the others start and stop"
            yield Contradiction(text=text, keys=(("node_types",),))
