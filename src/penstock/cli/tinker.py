# SPDX-License-Identifier: Apache-2.0
"""`penstock tinker`: serve the Tinker API, and give clients their keys."""

from __future__ import annotations

import socket
from pathlib import Path

BACKLOG = 1024
MAX_TTL_DAYS = 366.0


def serve(
    folder: Path,
    /,
    *,
    model: str | None = None,
    name: str | None = None,
    port: int = 0,
    host: str = "127.0.0.1",
    seed: int = 0,
    threads: int = 1,
    deterministic: bool = False,
    max_models: int = 8,
    max_rank: int = 1024,
    max_waiting: int = 4096,
    max_stored_gb: float = 64.0,
    snapshot_every: int = 16,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    json: bool = False,
) -> int:
    """Serve the Tinker API on this folder until SIGTERM or Ctrl-C.

    Clients use the `tinker` SDK with this address and a key of `penstock tinker token`. Killed at
    any moment and started again, the server loses no request and applies none twice.

    Args:
        folder: The server's folder; a new one is made.
        model: Base model, when the folder is new: a folder, a model of the Hugging Face Hub, or
            builtin:tiny-qwen3.
        name: How clients call the model; by default as --model does.
        port: Port to listen on; 0 chooses a free one.
        host: Address to listen on; off loopback only with TLS.
        seed: Random seed of a builtin model.
        threads: Threads of the trainer; kept for good, because others give other bits.
        deterministic: Sample one answer at a time, so that the same requests give the same bits.
        max_models: Most models in use per client.
        max_rank: Highest sum of their ranks.
        max_waiting: Most requests without a result per client.
        max_stored_gb: Most on disk per client: saved weights, models, requests and results.
        snapshot_every: Requests between two states of a model on disk; fewer make a restart
            shorter.
        tls_cert: TLS certificate file; required off loopback.
        tls_key: TLS key file.
        json: Print the address as a JSON object.
    """
    import uvloop

    from penstock.cli.output import print_json, print_note, print_text
    from penstock.cli.service_options import listen_address, make_tls
    from penstock.errors import ConfigError
    from penstock.observe import logs
    from penstock.wire.serving import require_tls_off_loopback

    try:
        from penstock.tinker.folder import ServerFile, TinkerFolder, default_name
        from penstock.tinker.limits import Limits
        from penstock.tinker.serving import serve as serve_folder
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; run: pip install 'penstock-rl[tinker]'"
        ) from None

    tls = make_tls(tls_cert, tls_key)
    require_tls_off_loopback(host, tls)
    where = TinkerFolder(path=folder.absolute())
    logs.configure("tinker")
    where.path.mkdir(parents=True, exist_ok=True)
    with where.locked():
        if model is not None:
            wanted = ServerFile(
                model=name or default_name(model),
                init=model,
                seed=seed,
                threads=threads,
                is_deterministic=deterministic,
            )
            where.prepare(wanted)
        found = where.read()
        with socket.create_server(listen_address("", host, port), backlog=BACKLOG) as listener:
            scheme = "http" if tls is None else "https"
            url = f"{scheme}://{host}:{listener.getsockname()[1]}"
            if json:
                print_json({"url": url, "model": found.model})
            else:
                print_text(url)
                print_note(
                    f"clients call the model {found.model!r}; their keys are from `penstock tinker "
                    f"token {folder}`"
                )
            limits = Limits(
                max_models=max_models,
                max_rank=max_rank,
                max_waiting=max_waiting,
                max_stored_bytes=int(max_stored_gb * (1 << 30)),
            )
            uvloop.run(
                serve_folder(where, listener, tls=tls, limits=limits, snapshot_every=snapshot_every)
            )
    return 0


def token(
    folder: Path,
    /,
    *,
    name: str,
    ttl_days: float = 30.0,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Create a client's key, for `TINKER_API_KEY`.

    Models, weights and results belong to the name: its later keys reach them, no other does.

    Args:
        folder: The server's folder.
        name: Who the key is for.
        ttl_days: Days until it expires.
        out: File to write the key to, readable only for you, instead of printing it.
        json: Print one JSON object.
    """
    from penstock.cli.output import print_json, print_note, print_text
    from penstock.errors import ConfigError
    from penstock.runs.tokens import SUBJECT
    from penstock.tinker.folder import TinkerFolder
    from penstock.wire.keys import write_secret

    if not 0 < ttl_days <= MAX_TTL_DAYS:
        raise ConfigError(f"--ttl-days {ttl_days:g}: must be more than 0, at most {MAX_TTL_DAYS:g}")
    if not SUBJECT.fullmatch(name):
        raise ConfigError(f"--name {name!r}: must be 1 to 64 letters, digits, - or _")
    key = TinkerFolder(path=folder.absolute()).issue_key(name, ttl_s=ttl_days * 86_400.0)
    if out is not None:
        write_secret(out.absolute(), key)
    if json:
        print_json({"name": name, **({"key": key} if out is None else {"file": str(out)})})
    elif out is None:
        print_text(key)
    else:
        print_note(f"key of {name} written to {out}")
    return 0


def revoke(folder: Path, /, *, name: str) -> int:
    """Refuse all keys of a name, at once and for good.

    Args:
        folder: The server's folder.
        name: Whose keys.
    """
    from penstock.cli.output import print_note
    from penstock.tinker.folder import TinkerFolder

    TinkerFolder(path=folder.absolute()).revoke(name)
    print_note(f"revoked: all keys of {name}")
    return 0
