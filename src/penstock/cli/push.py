# SPDX-License-Identifier: Apache-2.0
"""`penstock push`: upload an exported folder to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path


def push(
    folder: Path,
    repository: str,
    /,
    *,
    dataset: bool = False,
    public: bool = False,
    branch: str | None = None,
    message: str = "",
    json: bool = False,
) -> int:
    """Upload an exported folder to the Hugging Face Hub, or to the hub that HF_ENDPOINT names.

    Creates the repository if it does not exist: private, unless you add --public. Your access token
    is the one of `hf auth login`, or HF_TOKEN.

    Args:
        folder: A folder that `penstock export` wrote.
        repository: OWNER/NAME.
        dataset: A repository of data, for trajectories.
        public: Let everybody read a repository that this command creates.
        branch: Branch to commit to; by default main.
        message: Commit message.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_note
    from penstock.runs.export.push import push as push_folder

    done = push_folder(
        folder, repository, dataset=dataset, public=public, branch=branch, message=message
    )
    print_note(f"pushed {folder} to {done.url}, commit {done.commit[:12]}")
    if json:
        print_json({"url": done.url, "commit": done.commit, "repository": repository})
    return 0
