# SPDX-License-Identifier: Apache-2.0
"""`penstock weights`: inspect, verify, serve and delete a run's weights.

Only `serve` is a service. The other commands read the run folder, during a run or after it.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.weights.catalog import Catalog
    from penstock.weights.store import DirectoryStore


def serve(
    *,
    run_dir: Path,
    host: str | None = None,
    port: int | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> int:
    """Serve a run's weights over HTTP until SIGTERM, and update its mirror if it has one.

    Args:
        run_dir: Run folder.
        host: Address to listen on; off loopback only with TLS.
        port: Port to listen on; by default the run's own.
        tls_cert: TLS certificate file; required off loopback.
        tls_key: TLS key file.
    """
    import uvloop

    from penstock.cli.service_options import listen_address, make_tls, run_tls
    from penstock.runs.service_process import enter_run
    from penstock.weights.serving.origin import Origin
    from penstock.weights.serving.server import build
    from penstock.weights.store import DirectoryStore
    from penstock.weights.update import SERVER_KEPT_S
    from penstock.wire.auth import Audience, Renewer, Verifier
    from penstock.wire.serving import serve as serve_app

    tls = make_tls(tls_cert, tls_key)  # before `enter_run` changes the working directory
    folder, config, endpoints = enter_run(run_dir, "weights")
    verifier = Verifier.read(folder.keys, run=config.name, audience=Audience.WEIGHTS)
    verifier.renewer = Renewer(folder.keys)
    store = DirectoryStore(folder.weights)
    app = build(Origin(store), verifier)
    listen_host, listen_port = listen_address(endpoints.weights, host, port, config.network.host)
    tls = tls or run_tls(config.network)
    with _mirroring(store, config.weights.mirror):
        uvloop.run(serve_app(app, listen_host, listen_port, tls, idle_s=SERVER_KEPT_S))
    return 0


def _mirroring(store: DirectoryStore, url: str) -> AbstractContextManager[None]:
    if not url:
        return nullcontext()
    from penstock.weights.serving.mirror import ObjectMirror
    from penstock.weights.serving.mirror_sync import MirrorSync

    return MirrorSync(store, ObjectMirror(url)).running()


def ls(run: Path, /, *, json: bool = False) -> int:
    """List the versions in a run's weight store.

    Args:
        run: Run folder, or its config file; running or finished.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_note, print_text
    from penstock.cli.weights_format import catalog_json, list_lines

    _, store, catalog = _open(run)
    blobs = [num_bytes for _, num_bytes in store.blobs()]
    if json:
        print_json({**catalog_json(catalog), "num_blobs": len(blobs), "store_bytes": sum(blobs)})
    else:
        print_text("\n".join(list_lines(catalog, blobs)))
    if catalog.damaged:
        print_note(
            f"{len(catalog.damaged)} manifests are damaged; `penstock weights verify {run}` "
            "lists them"
        )
    return 0


def show(run: Path, version: str, /, *, json: bool = False) -> int:
    """Show one version: files, tensors and deltas.

    Args:
        run: Run folder, or its config file.
        version: POLICY@NUMBER, just NUMBER if the run has one policy, or the start of a manifest
            digest.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_text
    from penstock.cli.weights_format import show_lines, version_json
    from penstock.weights.catalog import find_version

    _, store, catalog = _open(run)
    resolved = find_version(catalog, version)
    if json:
        print_json(version_json(resolved))
    else:
        print_text("\n".join(show_lines(store, catalog, resolved)))
    return 0


def verify(run: Path, version: str | None = None, /, *, json: bool = False) -> int:
    """Verify the checksums of every file, tensor and delta; exits with 1 if any is damaged.

    Args:
        run: Run folder, or its config file.
        version: POLICY@NUMBER, NUMBER or the start of a manifest digest; by default all versions.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import format_bytes, pluralise, print_json, print_note, print_text
    from penstock.cli.weights_format import damage_lines
    from penstock.weights.catalog import find_version
    from penstock.weights.verify import Verifier, damaged_manifest

    root, store, catalog = _open(run)
    versions = catalog.versions if version is None else (find_version(catalog, version),)
    found = [] if version else [damaged_manifest(root, store, each) for each in catalog.damaged]
    with _scratch(root) as scratch:

        def on_file(name: str, file: str, num_bytes: int) -> None:
            print_note(f"{name}  {file}  {format_bytes(num_bytes)}")

        verifier = Verifier(store, Path(scratch), on_file)
        for each in versions:
            found += verifier.verify(each)
    if json:
        print_json(
            {
                "ok": not found,
                "num_versions": len(versions),
                "bytes": verifier.num_bytes,
                "damage": found,
            }
        )
    for line in damage_lines(found):
        print_note(line)
    if found:
        print_note(f"error: {pluralise(len(found), 'damaged item')} in {root}")
    elif not json:
        print_text(
            f"{pluralise(len(versions), 'version')} intact, {format_bytes(verifier.num_bytes)} "
            "checked"
        )
    return 1 if found else 0


def diff(run: Path, old: str, new: str, /, *, json: bool = False) -> int:
    """Compare two versions tensor by tensor.

    Args:
        run: Run folder, or its config file.
        old: POLICY@NUMBER, NUMBER or the start of a manifest digest.
        new: Version to compare with.
        json: Print one JSON object as the last line, with every tensor.
    """
    from penstock.cli.output import print_json, print_text
    from penstock.cli.weights_format import diff_json, diff_lines
    from penstock.weights.catalog import find_version
    from penstock.weights.compare import compare

    root, store, catalog = _open(run)
    first, second = find_version(catalog, old), find_version(catalog, new)
    with _scratch(root) as scratch:
        found = compare(store, first, second, Path(scratch))
    if json:
        print_json(diff_json(first, second, found))
    else:
        print_text("\n".join(diff_lines(first, second, found)))
    return 0


def gc(run: Path, /, *, dry_run: bool = False, json: bool = False) -> int:
    """Delete unreferenced versions, and full files that deltas can rebuild.

    A version is referenced by nodes, checkpoints and rows. A running trainer cleans up by itself.

    Args:
        run: Run folder, or its config file; running or finished.
        dry_run: Only print what would be deleted.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import format_bytes, pluralise, print_json, print_text
    from penstock.dataflow.service.trainers.messages import VersionUser
    from penstock.errors import WeightsError
    from penstock.runs.control import versions_in_use
    from penstock.runs.target import find_run_folder
    from penstock.weights.retention import execute_plan, plan_deletion
    from penstock.weights.store import DirectoryStore

    folder = find_run_folder(run)
    config = folder.read_config()
    used = versions_in_use(folder, config)
    if not used:
        raise WeightsError(f"nothing to delete: {run} has not published a version yet")
    store = DirectoryStore(folder.weights)
    with store.deleting() as has_lock:
        if not has_lock:
            raise WeightsError(f"a trainer is writing to {folder.weights}; try again in a moment")
        found = plan_deletion(
            store,
            [version.manifest_digest for version in used],
            [version.manifest_digest for version in used if version.by is VersionUser.NEWEST],
            anchor_every=config.weights.anchor_every,
        )
        if not dry_run:
            execute_plan(store, found)
    if json:
        print_json(
            {
                "dry_run": dry_run,
                "versions_deleted": list(found.manifests),
                "blobs_deleted": [digest for digest, _ in found.blobs],
                "bytes_freed": found.freed_bytes,
                "versions_kept": found.num_versions,
                "bytes_kept": found.kept_bytes,
            }
        )
    else:
        verb = "would be deleted" if dry_run else "deleted"
        print_text(
            f"{pluralise(len(found.manifests), 'version')} and "
            f"{pluralise(len(found.blobs), 'file')} "
            f"{verb}, {format_bytes(found.freed_bytes)}"
        )
        print_text(
            f"{pluralise(found.num_versions, 'version')} kept, {format_bytes(found.kept_bytes)}"
        )
    return 0


def _open(run: Path) -> tuple[Path, DirectoryStore, Catalog]:
    from penstock.errors import WeightsError
    from penstock.runs.target import find_run_folder
    from penstock.weights.catalog import read_catalog
    from penstock.weights.store import DirectoryStore

    root = find_run_folder(run).weights
    store = DirectoryStore(root)
    catalog = read_catalog(store)
    if not catalog.versions and not catalog.damaged:
        raise WeightsError(
            f"no version in {root} yet; the trainer publishes version 0 when it starts"
        )
    return root, store, catalog


def _scratch(root: Path) -> TemporaryDirectory[str]:
    """A temporary folder on the same disk as the store, where a model fits."""
    parent_dir = root.parent if os.access(root.parent, os.W_OK) else None
    return TemporaryDirectory(prefix=".weights-", dir=parent_dir)
