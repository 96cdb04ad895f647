# SPDX-License-Identifier: Apache-2.0
"""Issues, lists and revokes the tokens of a run, and replaces its signing key while it goes on.

Needs the run folder with its keys. Records who was given a token in `keys/issued.jsonl`, never the
token itself.
"""

from __future__ import annotations

import os
import re
import secrets
import time

import msgspec

from penstock.durable import open_own, read_own
from penstock.errors import ConfigError
from penstock.fleet.run_folder import MAX_RECORD_BYTES, RunFolder
from penstock.fleet.service_tokens import TOKEN_TTL_S, changing_keys, rewrite_tokens
from penstock.observe.admin_log import AdminAction
from penstock.wire import keys
from penstock.wire.auth import RENEWED_TTL_S, Credential, Role, Signer, read_unverified
from penstock.wire.denied import Denied, read_denied, write_denied

SUBJECT = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""No dot: a node's id is the name of its token, and after a dot whatever the node likes."""
NOT_RENEWED = (Role.ADMIN, Role.SESSION)
"""An operator's token is for now; an agent's key is used by programs that cannot renew it."""
RETIRING = 1e15
"""A time that never comes: a key that is being replaced. If that is interrupted, the next rotation
finds it."""


class IssuedToken(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `keys/issued.jsonl`."""

    id: str
    subject: str
    role: Role
    audiences: tuple[str, ...]
    is_trusted: bool
    issued_at: float
    expires_at: float
    renew_until: float
    key_id: str

    @property
    def ends_at(self) -> float:
        """When it is of no more use, however often it was renewed."""
        return max(self.expires_at, self.renew_until)


def issue(
    folder: RunFolder,
    role: Role,
    *,
    name: str | None = None,
    ttl_s: float,
    renew_s: float = 0.0,
    is_trusted: bool = True,
    for_relay: bool = False,
) -> tuple[str, Credential]:
    """A new token, and what it says. `name`: who it is for; drawn if None."""
    subject = f"{role}-{secrets.token_hex(3)}" if name is None else name
    if not SUBJECT.fullmatch(subject):
        raise ConfigError(
            f"--name {subject!r}: must be 1 to 64 letters, digits, - or _, such as laptop-1"
        )
    if not is_trusted and role is not Role.ROLLOUT:
        raise ConfigError(
            f"--untrusted with --role {role}: only what a rollout node delivers is checked again; "
            f"give the role {role} to holders that you trust"
        )
    run = folder.read_config().name
    with changing_keys(folder):  # so that the record names the key that signed it
        key_id = Signer.read(folder.keys, run).key_id
        if subject in _denied(folder).subjects:
            raise ConfigError(
                f"--name {subject}: this name was revoked, and stays so; choose another name"
            )
        if for_relay:
            token = folder.relay_token(run, role, ttl_s=ttl_s, subject=subject)
        else:
            token = folder.token(
                run,
                role,
                ttl_s=ttl_s,
                subject=subject,
                is_trusted=is_trusted,
                renew_s=0.0 if role in NOT_RENEWED else max(ttl_s, renew_s),
            )
        credential = read_unverified(token)
        assert credential is not None
        _record(folder, credential, key_id)
    folder.admin_log.append(
        AdminAction.TOKEN_ISSUED,
        id=credential.id,
        name=subject,
        role=role.value,
        is_trusted=is_trusted,
    )
    return token, credential


def _record(folder: RunFolder, credential: Credential, key_id: str) -> None:
    record = IssuedToken(
        id=credential.id,
        subject=credential.subject,
        role=credential.role,
        audiences=credential.audiences,
        is_trusted=credential.is_trusted,
        issued_at=round(time.time(), 3),
        expires_at=credential.expires_at,
        renew_until=credential.renew_until,
        key_id=key_id,
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    descriptor = open_own(folder.keys / "issued.jsonl", flags)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(record) + b"\n")
        file.flush()
        os.fsync(descriptor)


def issued_tokens(folder: RunFolder) -> list[IssuedToken]:
    """Every token that was issued by command, oldest first."""
    try:
        lines = read_own(folder.keys / "issued.jsonl", MAX_RECORD_BYTES).splitlines()
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=IssuedToken) for line in lines if line]


def live_tokens(folder: RunFolder) -> list[IssuedToken]:
    """Those that some service may still accept."""
    denied, now = _denied(folder), time.time()
    return [
        token
        for token in issued_tokens(folder)
        if token.ends_at > now
        and token.id not in denied.tokens
        and token.subject not in denied.subjects
        and denied.keys.get(token.key_id, now + 1) > now
    ]


def revoke(folder: RunFolder, *, id: str | None = None, name: str | None = None) -> Denied:
    """Refuse one token, or every token of a name, from now on and for good."""
    if (id is None) == (name is None):
        raise ConfigError("pass the id of one token, or --name NAME for all tokens of a name")
    known = {token.id: token.subject for token in issued_tokens(folder)}
    if id is not None and id not in known:
        raise ConfigError(
            f"no token {id} was issued by command; `penstock token ls RUN` lists the live ones"
        )
    if name is not None and not SUBJECT.fullmatch(name):
        raise ConfigError(f"--name {name!r}: not a name that a token can be for")
    with changing_keys(folder):
        denied = _denied(folder)
        if id is not None:
            tokens = {**denied.tokens, id: known[id]}
            changed = _write(folder, msgspec.structs.replace(denied, tokens=tokens))
            folder.admin_log.append(AdminAction.TOKEN_REVOKED, id=id, name=known[id])
            return changed
        subjects = denied.subjects | {str(name)}
        changed = _write(folder, msgspec.structs.replace(denied, subjects=subjects))
        folder.admin_log.append(AdminAction.NAME_REVOKED, name=name)
        return changed


def rotate(folder: RunFolder, *, now: bool = False) -> str:
    """Replace the signing key and the renewal key; returns the new signing key's id. Tokens of the
    old key are valid until the last of them expires; with `now`, tokens of all old keys end."""
    run = folder.read_config().name
    with changing_keys(folder):
        old = keys.read_key(folder.keys, keys.SIGNING).key_id
        old_renewal = keys.read_key(folder.keys, keys.RENEWAL).key_id
        denied = _denied(folder)
        # Before they are replaced: an old key that stands nowhere could never be refused.
        retiring = dict.fromkeys((old, old_renewal), RETIRING)
        _write(folder, msgspec.structs.replace(denied, keys={**retiring, **denied.keys}))
        new = keys.replace_key(folder.keys, run, keys.SIGNING, keys.KeyUse.TOKENS)
        keys.replace_key(folder.keys, run, keys.RENEWAL, keys.KeyUse.RENEWALS)
        rewrite_tokens(folder, run)  # before the old ones are refused
        denied, at = _denied(folder), time.time()
        refused = {
            key: min(end, at if now else _last_use(folder, key, at))
            for key, end in denied.keys.items()
        }
        _write(folder, msgspec.structs.replace(denied, keys=refused))
        folder.admin_log.append(
            AdminAction.KEY_ROTATED, key_id=new.key_id, replaced=old, is_immediate=now
        )
    return new.key_id


def _last_use(folder: RunFolder, key: str, at: float) -> float:
    """When the last token or renewal of a key that is replaced now expires."""
    ends = [token.ends_at for token in issued_tokens(folder) if token.key_id == key]
    return max([at + TOKEN_TTL_S, at + RENEWED_TTL_S, *ends])


def _denied(folder: RunFolder) -> Denied:
    return read_denied(folder.keys, keys.read_public(folder.keys))


def _write(folder: RunFolder, denied: Denied) -> Denied:
    changed = msgspec.structs.replace(denied, serial=denied.serial + 1)
    write_denied(folder.keys, changed)
    return changed
