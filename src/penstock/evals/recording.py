# SPDX-License-Identifier: Apache-2.0
"""Stores the evaluations of a run in its folder: a file of answers each, which one is the best, and
a line of metrics.

Writes what the ledger holds, so that a file can be made again at any time; reads none back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.dataflow.core.names import NUM_TOKENS, NUM_TURNS
from penstock.dataflow.records import EvaluatedRecord, EvaluationRecord
from penstock.dataflow.sources import slot_seeds
from penstock.durable import write_durably
from penstock.evals.figures import figures
from penstock.evals.results import Answer, Evaluation, SuiteResult
from penstock.observe.metrics import MetricsFile

FOLDER = "evaluations"
"""In the run folder: POLICY@VERSION.json for each version that the run evaluated."""
BEST_FILE = "best.json"


class BestVersion(msgspec.Struct, frozen=True, kw_only=True):
    """`evaluations/best.json`: the version with the best score."""

    policy: str
    version: int
    step: int
    suite: str
    score: float
    checkpoint: str | None = None
    """In the run folder; None if it has none there, as the weight store has the version."""


class ResultFiles:
    def __init__(self, run_dir: Path, model: str, *, scorers: Mapping[str, str], best: str) -> None:
        """`scorers`: by suite · `best`: the suite whose score names the best version."""
        self._run_dir = run_dir
        self._model = model
        self._scorers = scorers
        self._best_suite = best

    def __call__(
        self,
        done: EvaluationRecord,
        answers: Sequence[EvaluatedRecord],
        best: EvaluationRecord | None,
    ) -> None:
        """Store it; nothing changes if it is stored already."""
        folder = self._run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        found = evaluation(done, answers, self._model, self._scorers)
        text = msgspec.json.format(msgspec.json.encode(found))
        path = folder / f"{done.policy}@{done.number}.json"
        is_new = not path.exists() or path.read_bytes() != text
        if best is not None:
            write_durably(folder / BEST_FILE, self._best(best))
        if is_new:
            self._append_metrics(done, found)
            write_durably(path, text)

    def _best(self, best: EvaluationRecord) -> bytes:
        found = BestVersion(
            policy=best.policy,
            version=best.number,
            step=best.number,
            suite=self._best_suite,
            score=best.scores[self._best_suite],
            checkpoint=self._checkpoint(best),
        )
        return msgspec.json.format(msgspec.json.encode(found))

    def _checkpoint(self, best: EvaluationRecord) -> str | None:
        for folder in ("checkpoints", f"checkpoints/{best.policy}"):
            if (self._run_dir / folder / f"step_{best.number}").exists():
                return f"{folder}/step_{best.number}"
        return None

    def _append_metrics(self, done: EvaluationRecord, found: Evaluation) -> None:
        values = {f"eval/{one.suite}/avg": figures(one).avg for one in found.suites}
        metrics = MetricsFile(self._run_dir / "metrics.jsonl")
        try:
            metrics.append({"policy": str(done.policy), "number": done.number, **values})
        finally:
            metrics.close()


def evaluation(
    done: EvaluationRecord,
    answers: Sequence[EvaluatedRecord],
    model: str,
    scorers: Mapping[str, str],
) -> Evaluation:
    """The result of an evaluation, from what the ledger has of it."""
    suites = [
        SuiteResult(
            suite=suite,
            scorer=scorers.get(suite, ""),
            suite_digest=digest,
            policy=done.policy,
            version=done.number,
            samples=done.samples,
            temperature=done.temperature,
            answers=tuple(
                answer for one in answers if one.suite == suite for answer in _answers(one)
            ),
        )
        for suite, digest in done.suites.items()
    ]
    return Evaluation(model=model, step=done.number, suites=tuple(suites))


def _answers(one: EvaluatedRecord) -> Iterator[Answer]:
    rows = {int(row.row_id.split(".")[1]): row for row in one.rows}
    seeds = slot_seeds(one.seed, range(one.num_slots))
    for slot, seed in enumerate(seeds):
        row = rows.get(slot)
        if row is None:
            failure = _kind(one.failures.get(str(slot), "failed"))
            yield Answer(question=one.question, sample=slot, seed=seed, score=None, failure=failure)
            continue
        yield Answer(
            question=one.question,
            sample=slot,
            seed=seed,
            score=row.reward,
            turns=int(row.values.get(NUM_TURNS, 0)),
            tokens=int(row.values.get(NUM_TOKENS, 0)),
            row=row.row_id,
        )


def _kind(why: str) -> str:
    """Kind of failure: `failed: engine: …` is engine, `expired: …` is expired."""
    first, second, *_ = (*(part.strip() for part in why.split(":")), "")
    return second if first == "failed" and second else first
