# SPDX-License-Identifier: Apache-2.0
"""Plain progress lines on stderr, for logs, pipes and `--headless`."""

from __future__ import annotations

from penstock.cli.output import format_clock, format_duration, pluralise, print_note
from penstock.dataflow.service.operators.messages import EvaluationStatus, PolicyStatus
from penstock.runs.monitor import RunView, resume_note

MIN_INTERVAL_S = 2.0
IDLE_INTERVAL_S = 15.0
"""Minimum time between lines when something other than the step changed, and when nothing did."""


class ProgressLines:
    """One line per step, or every two seconds while anything else changes; problems immediately."""

    def __init__(self) -> None:
        self._steps: tuple[int, ...] = ()
        self._text: str = ""
        self._written_s = -IDLE_INTERVAL_S
        self._note: str = ""
        self._incarnations: dict[str, int] = {}

    def update(self, view: RunView) -> None:
        status = view.status
        steps = tuple(policy.number for policy in status.policies) if status else ()
        text = progress_line(view)
        waited_s = view.elapsed_s - self._written_s
        self._explain_rewinds(view)
        is_due = steps != self._steps or waited_s >= IDLE_INTERVAL_S
        if is_due or (text != self._text and waited_s >= MIN_INTERVAL_S):
            self._steps, self._text, self._written_s = steps, text, view.elapsed_s
            print_note(f"{format_clock(view.elapsed_s):>7}  {text}")
        if view.note and view.note != self._note:
            self._note = view.note
            print_note(f"{format_clock(view.elapsed_s):>7}  {view.note}")

    def _explain_rewinds(self, view: RunView) -> None:
        """Say once, for each start of a trainer, which steps it repeats."""
        policies = view.status.policies if view.status else ()
        for policy in policies:
            if self._incarnations.get(policy.policy) == policy.incarnation:
                continue
            self._incarnations[policy.policy] = policy.incarnation
            if (note := resume_note(policy)) and policy.number <= policy.repeats_to:
                name = f"{policy.policy} " if len(policies) > 1 else ""
                print_note(f"{format_clock(view.elapsed_s):>7}  {name}{note}")

    def notify(self, text: str) -> None:
        self._note = text  # the next view repeats it
        print_note(text)

    def close(self) -> None:
        return


def evaluation_text(found: EvaluationStatus) -> str:
    """What was evaluated last, what is best, and what is evaluated now."""
    parts: list[str] = []
    if found.last is not None:
        scores = ", ".join(f"{suite} {score:.3f}" for suite, score in found.scores.items())
        best = f" (best: @{found.best})" if found.best is not None else ""
        parts.append(f"@{found.last} {scores}{best}")
    if found.running is not None:
        of = f"{found.num_answered}/{found.num_questions} questions"
        parts.append(f"@{found.running} in progress, {of}")
    return " · ".join(parts) or "none yet"


def progress_line(view: RunView) -> str:
    """The run in one line, without the elapsed time."""
    status = view.status
    if status is None:
        return "starting: services are loading and connecting"
    if view.unreachable_s > 5.0:
        return f"no response from the dataflow for {format_duration(round(view.unreachable_s))}"
    parts = [_policy(policy, many=len(status.policies) > 1) for policy in status.policies]
    parts.append(pluralise(status.trajectories, "trajectory", "trajectories"))
    parts.append(f"{status.tokens_per_s:,.0f} tokens/s")
    if status.evaluation is not None and status.evaluation.last is not None:
        parts.append(f"evaluation {evaluation_text(status.evaluation)}")
    if status.finished:
        return " · ".join([*parts, "finished"])
    live = sum(node.state == "live" for node in status.nodes)
    parts.append(f"{pluralise(live, 'node')} live")
    if status.waiting:
        longest = max(status.waiting, key=lambda waiting: waiting.since_s)
        if longest.since_s >= 2.0:
            parts.append(f"{longest.who} is waiting for {longest.on}")
    return " · ".join(parts)


def _policy(policy: PolicyStatus, *, many: bool) -> str:
    parts = [f"{policy.policy} " if many else "", f"step {policy.number}/{policy.steps}"]
    if policy.skipped:
        batches = pluralise(policy.skipped, "batch", "batches")
        parts.append(f" · {batches} skipped ({policy.last_skip.replace('_', ' ')})")
    if policy.reward_mean is not None:
        parts.append(f" · reward {policy.reward_mean:.3f}")
    if policy.staleness_mean is not None:
        parts.append(f" · staleness {policy.staleness_mean:.2f} (max {policy.staleness_max})")
    return "".join(parts)
