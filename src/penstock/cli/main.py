# SPDX-License-Identifier: Apache-2.0
"""`penstock`: the table of commands, and how each of them ends.

Owns names, one-line helps and exit codes (0 done, 1 failed, 2 wrong usage, 128 + n signal n).
Imports no command before it is called, so `penstock --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, Group, Parameter

from penstock import __version__
from penstock.errors import PenstockError

START = Group("Start here", sort_key=1)
RUNS = Group("Runs", sort_key=2)
SERVICES = Group("One service alone", sort_key=3)

COMMANDS = (
    ("demo", START, "A real run on this CPU in two minutes: reward rises."),
    ("init", START, "Write a task, a reward and a config, ready to edit."),
    ("check", START, "Find what will fail, in seconds, before it costs hours."),
    ("plan", START, "What trainers will do with a batch, stage by stage, and where."),
    ("doctor", START, "What this machine has for runs, and how to get the rest."),
    ("run", START, "Run everything a config names on this machine; resumes by default."),
    ("status", RUNS, "What a run does now, and who waits for whom."),
    ("report", RUNS, "How trainers and nodes keep pace, and where the time went."),
    ("explain", RUNS, "Why a task, group, row, batch or version became what it is."),
    ("simulate", RUNS, "What other data rules would have made of a recorded run."),
    ("replay", RUNS, "Compute a step again from the record, and compare it bit for bit."),
    ("fork", RUNS, "Begin a new run from a checkpoint of another."),
    ("stop", RUNS, "End a run in order; `penstock run` resumes it."),
    ("audit", RUNS, "Prove from the files that nothing was lost or trained twice."),
    ("token", RUNS, "Mint a token for somebody who joins a run."),
    ("join", RUNS, "Lend this machine to a run as a rollout node."),
    ("forget", RUNS, "Remove a session of an outside agent from all future use."),
    ("dataflow", SERVICES, "The ledger between rollout nodes and trainers."),
    ("rollout", SERVICES, "One rollout node of a run folder."),
    ("trainer", SERVICES, "The trainer of one policy."),
    ("stage", SERVICES, "A worker of a pipeline stage placed away from the trainer."),
    ("gateway", SERVICES, "Serve agents outside the run, whose sessions it learns from."),
    ("relay", SERVICES, "A cache of a run's weights, near to its nodes."),
)


def build() -> App:
    app = App(
        name="penstock",
        help="Train language-model agents: reinforcement learning as a flow of data.",
        version=__version__,
        help_format="plaintext",
        default_parameter=Parameter(negative=()),
        usage="Usage: penstock COMMAND [OPTIONS]   (penstock COMMAND --help tells more)",
    )
    for order, (name, group, text) in enumerate(COMMANDS):
        path = f"penstock.cli.{name}:{name}"
        app.command(path, name=name, help=text, group=group, sort_key=order)
    weights = App(
        name="weights", help="What lies in a run's weight store, and is it sound.", group=RUNS
    )
    for verb, text in (
        ("ls", "Its versions: sizes, and how each is kept."),
        ("show", "One version: files, tensors, the deltas that lead to it."),
        ("verify", "Digest all of it; names what is damaged, and the cure."),
        ("diff", "What changed between two versions, tensor by tensor."),
        ("serve", "Its read-only HTTP front."),
    ):
        weights.command(f"penstock.cli.weights:{verb}", name=verb, help=text)
    weights.command("penstock.cli.weights_gc:gc", name="gc", help="Delete what nobody uses.")
    app.command(weights)
    conformance = App(
        name="conformance", help="Check a node or trainer written by somebody else.", group=RUNS
    )
    for role, text in (
        ("rollout", "Examine a rollout node."),
        ("trainer", "Examine a trainer."),
    ):
        conformance.command(f"penstock.cli.conformance:{role}", name=role, help=text)
    app.command(conformance)
    app["--help"].group = app["--version"].group = Group("Options", sort_key=9)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code; our own errors are told without a traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        code = build()(args, result_action="return_value")
    except PenstockError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        if "--json" in args:
            from penstock.cli.output import print_json

            print_json({"error": str(error)})
        code = 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # `penstock status | head`
        sys.stderr.close()
        code = 141
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
