# SPDX-License-Identifier: Apache-2.0
"""`penstock`: the table of commands and their exit codes.

Owns names, one-line help and exit codes (0 done, 1 failed, 2 wrong usage, 5 stalled, 6 budget
spent, 128 + n signal n).
Imports a command only when it is called, so `penstock --help` is fast.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence
from keyword import iskeyword

from cyclopts import App, Group, Parameter

from penstock import __version__
from penstock.errors import PenstockError, Stalled
from penstock.fleet.inspection import forbid_inspection

EXIT_STALLED = 5
"""Nothing in the run advanced; `stall` in the run file."""
START = Group("Start here", sort_key=1)
RUNS = Group("Runs", sort_key=2)
SERVICES = Group("Single services", sort_key=3)

COMMANDS = (
    ("demo", START, "Train a tiny model on this CPU in two minutes."),
    ("init", START, "Create a task, a reward and a config to start from."),
    ("check", START, "Check a config, its code and this machine before a run."),
    ("try", START, "Make a few rollouts without training, and print them."),
    ("doctor", START, "List installed components and how to add missing ones."),
    ("run", START, "Start or resume a run on this machine."),
    ("ls", RUNS, "List runs: state, step, reward, age and size."),
    ("status", RUNS, "Show a run's state and what it is waiting for."),
    ("top", RUNS, "Watch flow, curves and fleet of a run on one screen."),
    ("dashboard", RUNS, "Show runs in a browser: curves, trajectories, flow, fleet, spend."),
    ("logs", RUNS, "Show a run's logs, all services in order of time."),
    ("plot", RUNS, "Draw the reward, or any metric, of one or more runs."),
    ("track", RUNS, "Send a run's metrics to trackio, W&B, TensorBoard or MLflow."),
    ("report", RUNS, "Show how well rollout and training are balanced."),
    ("scale", RUNS, "Grow or shrink the rollout pool, or let the autoscaler do it."),
    ("tag", RUNS, "Add or remove tags of a node, such as train or rollout."),
    ("samples", RUNS, "Show what the model said, with rewards."),
    ("eval", RUNS, "Score a version, a model folder or a server on suites of questions."),
    ("compare", RUNS, "Compare two runs or versions: scores, significance, rewards, time."),
    ("solve", RUNS, "Watch a run's agent work on one question."),
    ("explain", RUNS, "Explain why a task, row or batch was used or dropped."),
    ("simulate", RUNS, "Simulate a recorded run under different data rules."),
    ("replay", RUNS, "Recompute a training step and compare it bit for bit."),
    ("fork", RUNS, "Create a new run from a checkpoint of another run."),
    ("mcp", RUNS, "Let an agent watch and operate a run, over MCP."),
    ("drain", RUNS, "Take one rollout node out of a running run."),
    ("stop", RUNS, "Stop a run gracefully; `penstock run` resumes it."),
    ("audit", RUNS, "Verify that no data was lost or trained twice."),
    ("push", RUNS, "Upload an exported folder to the Hugging Face Hub."),
    ("join", RUNS, "Join a run as a rollout node."),
    ("forget", RUNS, "Exclude an external agent's session from future training."),
    ("dataflow", SERVICES, "Run the dataflow service: the ledger between nodes and trainers."),
    ("rollout", SERVICES, "Run one rollout node."),
    ("trainer", SERVICES, "Run the trainer of one policy."),
    ("stage", SERVICES, "Run a worker for a pipeline stage outside the trainer."),
    ("gateway", SERVICES, "Serve external agents and train on their sessions."),
    ("relay", SERVICES, "Cache a run's weights close to its nodes."),
)


def build() -> App:
    app = App(
        name="penstock",
        help="Reinforcement learning for LLM agents.",
        version=__version__,
        help_format="plaintext",
        default_parameter=Parameter(negative=()),
        usage="Usage: penstock COMMAND [OPTIONS]   (penstock COMMAND --help for details)",
    )
    for order, (name, group, text) in enumerate(COMMANDS):
        module = f"{name}_" if iskeyword(name) or hasattr(builtins, name) else name
        path = f"penstock.cli.{module}:{module}"
        app.command(path, name=name, help=text, group=group, sort_key=order)
    weights = App(name="weights", help="Inspect and verify a run's weights.", group=RUNS)
    for verb, text in (
        ("ls", "List versions and how each one is stored."),
        ("show", "Show one version: files, tensors and deltas."),
        ("verify", "Verify checksums; report any damage and how to fix it."),
        ("diff", "Compare two versions tensor by tensor."),
        ("serve", "Serve weights over HTTP, read-only."),
        ("gc", "Delete unreferenced versions."),
    ):
        weights.command(f"penstock.cli.weights:{verb}", name=verb, help=text)
    app.command(weights)
    export = App(name="export", help="Take trajectories and models away.", group=RUNS)
    for verb, text in (
        ("trajectories", "Write them as Parquet, a Hugging Face dataset or ATIF."),
        ("model", "Write a version as a Hugging Face folder with a model card."),
        ("gguf", "Write a version for llama.cpp and Ollama."),
    ):
        export.command(f"penstock.cli.export:{verb}", name=verb, help=text)
    app.command(export)
    app.command(_build_token())
    app.command(_build_plan())
    conformance = App(name="conformance", help="Test a third-party node or trainer.", group=RUNS)
    for role, text in (("rollout", "Test a rollout node."), ("trainer", "Test a trainer.")):
        conformance.command(f"penstock.cli.conformance:{role}", name=role, help=text)
    app.command(conformance)
    tls = App(name="tls", help="Make certificates, for runs that other hosts join.", group=RUNS)
    for verb, text in (
        ("init", "Make a private authority and this host's certificate."),
        ("issue", "Make a certificate for another host."),
    ):
        tls.command(f"penstock.cli.tls:{verb}", name=verb, help=text)
    app.command(tls)
    app.command(_build_prm())
    tools = App(name="tools", help="Serve the built-in tools.", group=SERVICES)
    serve = "Serve Python, search and files as an MCP server."
    tools.command("penstock.cli.tools:serve", name="serve", help=serve)
    app.command(tools)
    tinker = App(name="tinker", help="Serve the Tinker API on one base model.", group=SERVICES)
    for verb, text in (
        ("serve", "Serve it on a folder, which keeps every request and result."),
        ("token", "Create a client's key."),
        ("revoke", "Refuse all keys of a client."),
    ):
        tinker.command(f"penstock.cli.tinker:{verb}", name=verb, help=text)
    app.command(tinker)
    options = Group("Options", sort_key=9)
    complete = "Complete commands and options with Tab in this shell (bash, zsh, fish)."
    app.register_install_completion_command(  # pyright: ignore[reportUnknownMemberType]
        help=complete, group=options
    )
    app["--help"].group = app["--version"].group = options
    return app


def _build_prm() -> App:
    found = App(name="prm", help="Process rewards: collect, label, train and serve.", group=RUNS)
    for verb, text in (
        ("collect", "Write a run's trajectories as steps with their outcome."),
        ("label", "Rate the steps with a judge or a program."),
        ("train", "Train a process reward model on the labels."),
        ("serve", "Score the steps of a running run."),
    ):
        found.command(f"penstock.cli.prm:{verb}", name=verb, help=text)
    return found


def _build_token() -> App:
    """`penstock token RUN` creates a token; with a verb it does something else."""
    from penstock.cli.token import token

    order = next(i for i, (name, *_) in enumerate(COMMANDS) if name == "join")
    found = App(
        name="token",
        help="Create, list and revoke access tokens of a run.",
        group=RUNS,
        sort_key=order - 0.5,
    )
    found.default(token)
    for verb, text in (
        ("ls", "List live tokens."),
        ("revoke", "Refuse a token, or all tokens of a name."),
        ("rotate", "Replace the signing key."),
    ):
        found.command(f"penstock.cli.token:{verb}", name=verb, help=text)
    return found


def _build_plan() -> App:
    """`penstock plan RUN` shows a pipeline; `penstock plan capacity` does without a run."""
    from penstock.cli.plan import plan

    order = next(i for i, (name, *_) in enumerate(COMMANDS) if name == "doctor")
    text = "Show the training pipeline: stages, placement, memory, predicted steps."
    found = App(name="plan", help=text, group=START, sort_key=order - 0.5)
    found.default(plan)
    capacity = "Show what a run of a given size needs, and what breaks first."
    found.command("penstock.cli.capacity:capacity", name="capacity", help=capacity)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code. A PenstockError is printed without a traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    forbid_inspection()
    try:
        code = build()(args, result_action="return_value")
    except PenstockError as error:
        from penstock.cli.output import print_json, printable
        from penstock.redaction import hide_secrets

        sys.stdout.flush()
        message = hide_secrets(str(error))
        print(f"error: {printable(message)}", file=sys.stderr)
        if "--json" in args:
            print_json({"error": message})
        code = EXIT_STALLED if isinstance(error, Stalled) else 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # `penstock status | head`
        sys.stderr.close()
        code = 141
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
