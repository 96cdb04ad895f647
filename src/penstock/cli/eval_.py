# SPDX-License-Identifier: Apache-2.0
"""`penstock eval`: the score of a model on suites of questions."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.evals.results import Evaluation
    from penstock.runs.evaluate import EvaluationPlan
    from penstock.runs.result_files import StoredResults

MAX_LISTED = 10


def eval_(
    target: str,
    /,
    *,
    suite: tuple[str, ...] = (),
    version: int | None = None,
    policy: str | None = None,
    samples: int = 4,
    temperature: float = 0.6,
    top_p: float = 0.95,
    max_tokens: int | None = None,
    scorer: str | None = None,
    reward: str | None = None,
    limit: int | None = None,
    model: str | None = None,
    workflow: str | None = None,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Evaluate a version of a run, a model folder or a model behind a URL, on this machine.

    Repeat the command to continue an evaluation that was stopped: what is stored is not asked
    again. Exits with 0 if at least one answer was scored.

    Args:
        target: Run folder or config file, whose workflow and tools are used; Hugging Face folder;
            or URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1. The server's
            key is read from OPENAI_API_KEY.
        suite: Name of a suite, such as aime24, or file of questions; repeat it for several.
        version: Version of a run; by default the newest.
        policy: Policy of a run that trains several.
        samples: Answers to each question.
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_p: Keep the smallest set of tokens with this share of the probability.
        max_tokens: Most tokens sampled in one turn; by default as in training.
        scorer: What scores a file of questions: math, choice, exact, code or judge.
        reward: Instead of a scorer: your own function, as module:function.
        limit: Only the first questions, this many.
        model: Model name at the server.
        workflow: What attempts the questions, for a model without a run; by default single_turn.
        out: File for the results; by default in the folder evaluations of the run, or here.
        json: Print one JSON object as the last line.
    """
    from penstock.errors import ConfigError
    from penstock.observe import logs
    from penstock.runs.eval_target import read_eval_target
    from penstock.runs.evaluate import EvaluationPlan, open_suites
    from penstock.runs.result_files import StoredResults, read_results
    from penstock.runs.service_process import add_import_paths

    if not suite:
        raise ConfigError("name at least one suite: --suite aime24, or --suite questions.jsonl")
    if samples < 1 or (limit is not None and limit < 1):
        raise ConfigError("--samples and --limit are numbers of 1 or more")
    logs.configure("eval", level="error")
    key = os.environ.get("OPENAI_API_KEY", "")
    found = read_eval_target(
        target, version=version, policy=policy, model=model, api_key=key, workflow=workflow
    )
    add_import_paths(found.run.python_path)
    plan = EvaluationPlan(
        target=found.run,
        model=found.model,
        policy=found.policy,
        version=found.version,
        suites=open_suites(suite, scorer=scorer, reward=reward, limit=limit),
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        weights=found.weights,
        server=found.server,
    )
    results = StoredResults(out or found.results)
    asyncio.run(_evaluate(plan, results))
    asked = {one.name for one in plan.suites}
    whole = read_results(results.path)
    return _show(whole, asked, results.path, json=json)


async def _evaluate(plan: EvaluationPlan, results: StoredResults) -> None:
    from penstock.cli.output import print_note
    from penstock.runs.evaluate import evaluate

    place = plan.weights.place if plan.weights else plan.model
    print_note(f"evaluating {place}")
    is_live = sys.stderr.isatty()
    last_share = -1
    async with aclosing(evaluate(plan, results)) as progress:
        async for now in progress:
            share = 10 * now.done // now.total
            if not is_live and share == last_share:
                continue
            last_share = share
            failed = f", {now.failed:,} failed" if now.failed else ""
            line = f"{now.suite}: {now.done:,} of {now.total:,} answers{failed}"
            end = "\n" if not is_live or now.done == now.total else ""
            print(f"\r\x1b[K{line}" if is_live else line, end=end, file=sys.stderr, flush=True)


def _show(evaluation: Evaluation, asked: set[str], path: Path, *, json: bool) -> int:
    from penstock.cli.eval_lines import failure_lines, figure_lines
    from penstock.cli.output import print_json, print_note, print_text
    from penstock.evals.figures import figures

    suites = [result for result in evaluation.suites if result.suite in asked and result.answers]
    found = {result.suite: figures(result) for result in suites}
    if json:
        facts = {"model": evaluation.model, "step": evaluation.step, "results": str(path)}
        print_json({**facts, "suites": found})
    else:
        print_text("\n".join(figure_lines(found)))
        for result in suites:
            for line in failure_lines(result, MAX_LISTED):
                print_text(line)
        print_note(f"\nresults in {path}")
    is_scored = any(answer.score is not None for one in suites for answer in one.answers)
    return 0 if is_scored else 1
