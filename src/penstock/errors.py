# SPDX-License-Identifier: Apache-2.0
"""Every error of penstock, named by the boundary it crossed.

PenstockError
├── ConfigError (ValueError)      the run file is wrong; names file, line and fix
├── WireError                     a call between services failed
│   ├── BadRequest 400            ContextOverflow if a prompt exceeds the model's window;
│   │                             BudgetExceeded if a sub-agent used up what its parent allowed
│   ├── Unauthorized 401 · Forbidden 403 · NotFound 404
│   ├── Conflict 409              contradicts an earlier write
│   │   ├── Fenced 409            the caller's lease, boot_id or incarnation is outdated
│   │   └── UnknownCommit 409     the ledger has no such commit to resume from
│   ├── TooLarge 413 · Busy 429 · StorageFull 507
│   ├── TlsError                  the service's certificate is not trusted, or it speaks no TLS
│   └── Unreachable               no response before the deadline
├── EngineError                   generate or load failed in an inference engine
│   └── RequestRejected           the request itself is invalid; no engine would accept it
├── WorkflowError                 the user's workflow raised or its program failed
├── RewardError                   the reward function raised, was killed, or returned no number
│   └── RewardTimeout             it exceeded its time
├── SandboxError                  the sandbox itself failed, not the program in it
├── EnvironmentFailed             an environment hung, crashed or broke its protocol
├── WeightsError                  a snapshot is missing, damaged or belongs to another model
├── StoreError                    the ledger or a segment is damaged
│   └── ResumeRejected            the ledger does not allow resuming from this checkpoint
├── TrackerError                  a tracker did not take the points; they are sent again later
└── LaunchError                   a process could not be started or kept running
    └── Stalled                   nothing in the run advances; exit code 5

A failed rollout is a record, not a crash: only the node's loop catches these, and records them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager


class PenstockError(Exception):
    """The message says what failed, where, why, and the next step."""


class ConfigError(PenstockError, ValueError):
    """A run file, an override or a name in them is wrong; each line of the message has a fix."""


class WireError(PenstockError):
    status = 500
    code = "internal"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BadRequest(WireError):
    status, code = 400, "bad_request"


class ContextOverflow(BadRequest):
    """The prompt alone fills the model's context window. Only the gateway raises it, and translates
    it for each dialect, so it is not in WIRE_ERRORS."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, num_tokens: int, window: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.window = window


class BudgetExceeded(BadRequest):
    """A sub-agent needs more than its parent allowed: `limit` is tokens, calls, depth or time. Only
    the gateway and `ctx.spawn` raise it, so it is not in WIRE_ERRORS."""

    code = "budget_exceeded"

    def __init__(self, message: str, *, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class Unauthorized(WireError):
    status, code = 401, "unauthorized"


class Forbidden(WireError):
    status, code = 403, "forbidden"


class NotFound(WireError):
    status, code = 404, "not_found"


class Conflict(WireError):
    status, code = 409, "conflict"


class Fenced(Conflict):
    code = "fenced"


class UnknownCommit(Conflict):
    code = "unknown_commit"


class TooLarge(WireError):
    status, code = 413, "too_large"


class Busy(WireError):
    status, code = 429, "busy"


class StorageFull(WireError):
    status, code = 507, "storage_full"


class Unreachable(WireError):
    status, code = 503, "unreachable"


class TlsError(WireError):
    status, code = 502, "tls_error"


class EngineError(PenstockError):
    pass


class RequestRejected(EngineError):
    pass


class WorkflowError(PenstockError):
    pass


class RewardError(PenstockError):
    pass


class RewardTimeout(RewardError):
    """The reward was not there in time, and what computes it was killed."""


class SandboxError(PenstockError):
    """The sandbox itself failed, not the program in it: an infrastructure failure."""


class EnvironmentFailed(PenstockError):
    """The environment of an attempt hung, crashed or broke its protocol; never the model's doing,
    so it never becomes a reward."""


class WeightsError(PenstockError):
    pass


class StoreError(PenstockError):
    pass


class ResumeRejected(StoreError):
    pass


class TrackerError(PenstockError):
    pass


class LaunchError(PenstockError):
    pass


class Stalled(LaunchError):
    """Nothing in the run advances; names who waits for whom."""


WIRE_ERRORS: dict[str, type[WireError]] = {
    kind.code: kind
    for kind in (
        BadRequest,
        Unauthorized,
        Forbidden,
        NotFound,
        Conflict,
        Fenced,
        UnknownCommit,
        TooLarge,
        Busy,
        StorageFull,
        Unreachable,
    )
}
"""By the code in an error body, so that a client raises the same error as the server."""


def wrap_errors(kind: type[PenstockError], what: str) -> AbstractContextManager[None]:
    """Wrap third-party exceptions in `kind`; penstock's own errors pass unchanged."""
    return _Wrapping(kind, what)


class _Wrapping:
    __slots__ = ("_kind", "_what")

    def __init__(self, kind: type[PenstockError], what: str) -> None:
        self._kind, self._what = kind, what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, PenstockError):
            raise self._kind(f"{self._what}: {type(error).__name__}: {error}") from error
