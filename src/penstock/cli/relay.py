# SPDX-License-Identifier: Apache-2.0
"""`penstock relay`: serve a run's weights from a cache close to its nodes, or from its mirror."""

from __future__ import annotations

from pathlib import Path


def relay(
    url: str,
    /,
    *,
    public_key: str,
    port: int,
    cache: Path | None = None,
    host: str = "127.0.0.1",
    upstream: list[str] | None = None,
    max_gb: float = 100.0,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    ca: Path | None = None,
) -> int:
    """Serve a run's weights until SIGTERM; each file is fetched once, for any number of nodes.

    Args:
        url: URL of the run's weight server; `penstock token RUN --role relay` prints it. Or the
            run's `weights.mirror`, such as s3://bucket/run, with credentials in the environment.
        public_key: The run's public key, or a file that contains it; the same command prints it.
        port: Port to listen on.
        cache: Cache folder; reused after a restart. Not allowed with a mirror.
        host: Address to listen on; off loopback only with TLS.
        upstream: URL of another relay to fetch from first; may be repeated.
        max_gb: Maximum cache size in GB; the least recently used files are deleted first.
        token_file: File with a relay token, from `penstock token RUN --role relay --out
            FILE`; by default the one that PENSTOCK_TOKEN_FILE names. Renewed tokens are written
            back to it. /dev/stdin works too.
        tls_cert: TLS certificate file; required off loopback.
        tls_key: TLS key file.
        ca: File of the private authority that signed the certificates of the run's services.
    """
    import uvloop

    from penstock.cli.output import print_note
    from penstock.cli.relay_options import (
        RELAY_EXAMPLE,
        parse_gigabytes,
        print_relay_hint,
        read_public_key,
    )
    from penstock.cli.service_options import check_url, listen_address, make_tls, require_token
    from penstock.config.base import OBJECT_STORES, is_url
    from penstock.errors import ConfigError
    from penstock.observe import logs
    from penstock.runs.credential_upkeep import with_upkeep
    from penstock.runs.relay import open_cache, open_mirror
    from penstock.wire.auth import Audience, Verifier
    from penstock.wire.serving import require_tls_off_loopback
    from penstock.wire.trust import refuse_clear_text, trust

    own_token = require_token(token_file, role="relay")
    tls = make_tls(tls_cert, tls_key)
    trust(ca, tls_cert, tls_key)
    require_tls_off_loopback(host, tls)
    is_mirror = is_url(url, *OBJECT_STORES, "file")
    urls = [] if is_mirror else [*(upstream or ()), url]
    for each in urls:
        refuse_clear_text(check_url(each, example=RELAY_EXAMPLE))
    verifier = Verifier.from_token(
        own_token.value(),
        read_public_key(public_key),
        audience=Audience.RELAY,
        denied_file=None if cache is None else cache / "denied",
    )
    where = listen_address("", host, port)
    if is_mirror:
        if cache or upstream:
            raise ConfigError(
                f"{url} is a mirror and is read directly; remove --cache and --upstream"
            )
        source = open_mirror(url, warn=print_note)
    else:
        if cache is None:
            raise ConfigError("--cache is required: a folder for the weights that this relay keeps")
        max_bytes = parse_gigabytes(max_gb, cache, "--max-gb")
        source = open_cache(urls, own_token, cache, max_bytes=max_bytes, warn=print_note)
    logs.configure("relay")
    print_relay_hint(*where, tls)

    async def serve() -> None:
        from penstock.weights.serving.server import build
        from penstock.weights.update import SERVER_KEPT_S
        from penstock.wire.serving import serve as serve_app

        async with source as opened:
            work = serve_app(build(opened, verifier), *where, tls, idle_s=SERVER_KEPT_S)
            await with_upkeep(work, own_token, urls=urls, denied=verifier.denied)

    uvloop.run(serve())
    return 0
