# SPDX-License-Identifier: Apache-2.0
"""Which readers a credential may declare and act for, and how many.

A stage of the run file belongs to the token of its name, `stage-NAME`; no other token writes its
columns, or any reward. Owns these rules; reads and writes no row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager

from penstock.config.stages import stage_subject
from penstock.dataflow.core.names import REWARD, TRAIN
from penstock.dataflow.service.open_polls import OpenPolls
from penstock.errors import Busy, Forbidden
from penstock.wire.auth import Credential, Role

MAX_READERS = 256
"""Readers that one credential declared; each keeps a window of rows in memory."""
MAX_ALL_READERS = 4096
MAX_POLLS = 1024
"""Lease requests of one credential that are held open: one for each of its workers."""
RETRY_S = 10.0


class ReaderRights:
    def __init__(self, stages: Mapping[str, Collection[str]]) -> None:
        """`stages`: of the run file, by name, with the columns that each writes."""
        self._stages = stages
        self._owned = frozenset({REWARD}.union(*stages.values()))
        self._declared: dict[str, set[str]] = {}
        """Readers by the subject that declared them, since the start of the service."""
        self._polls = OpenPolls()

    def require(
        self, credential: Credential, name: str, space: str, writes: Collection[str]
    ) -> None:
        """Raise Forbidden unless it may declare, and act for, a reader that writes these columns:
        columns of a stage of the run file are for that stage alone."""
        if writes and credential.role is Role.READER:
            raise Forbidden(
                f"role reader may not act for {name!r}, which writes {sorted(writes)}; use a token "
                "with role stage"
            )
        is_own = credential.subject == stage_subject(name)
        is_other = credential.role in (Role.STAGE, Role.READER) and not is_own
        if name in self._stages and is_other:
            raise Forbidden(
                f"this token is for {credential.subject!r}, and {name!r} is a stage of the run "
                f"file; use its own token: `penstock token RUN --role stage --name "
                f"{stage_subject(name)}`"
            )
        own = self._stages.get(name, ())
        owned = {*map(_base, self._owned)}
        taken = {one for one in writes if _base(one) in owned and not _is_among(one, own)}
        if taken and space == TRAIN and credential.role is not Role.ADMIN:
            raise Forbidden(
                f"reader {name!r} may not write {sorted(taken)}: only stages of the run file "
                "write rewards and the columns that they name; add a stage to `dataflow.stages`, "
                "or choose another column"
            )

    def reserve(self, credential: Credential, name: str, known: Collection[str]) -> None:
        """Raise Busy when this credential, or all together, declared too many readers. `known`:
        readers that exist."""
        if name in known:
            return
        subject = _subject_of(credential)
        own = self._declared.get(subject, set[str]()).intersection(known)
        if len(own) >= MAX_READERS or len(known) >= MAX_ALL_READERS:
            raise Busy(
                f"credential {subject!r} declared {len(own)} readers, of {len(known)} in this run; "
                f"the limits are {MAX_READERS} and {MAX_ALL_READERS}. Delete some first: DELETE "
                "/v1/readers/NAME",
                retry_after_s=RETRY_S,
            )
        self._declared[subject] = own | {name}

    def poll(self, credential: Credential) -> AbstractContextManager[None]:
        """One lease request of the credential is open. Raises Busy when it has too many."""
        subject = _subject_of(credential)
        if self._polls.num_open(subject) >= MAX_POLLS:
            raise Busy(
                f"credential {subject!r} has {MAX_POLLS} lease requests of readers open, the most "
                "that it may have; lease more rows with each, or give some workers another token: "
                "`penstock token RUN --name NAME`",
                retry_after_s=RETRY_S,
            )
        return self._polls.hold(subject)


def _subject_of(credential: Credential) -> str:
    return credential.subject or credential.role.value


def _is_among(column: str, columns: Collection[str]) -> bool:
    """Whether it is one of these, or one by version (`score@7`)."""
    return column in columns or _base(column) in columns


def _base(column: str) -> str:
    """Who writes a column writes its versions, too."""
    return column.partition("@")[0]
