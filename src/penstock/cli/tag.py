# SPDX-License-Identifier: Apache-2.0
"""`penstock tag`: what a node may do."""

from __future__ import annotations

from pathlib import Path


def tag(
    node: str,
    /,
    *,
    add: str = "",
    remove: str = "",
    run: Path = Path("outputs"),
    why: str = "",
    json: bool = False,
) -> int:
    """Add or remove tags of a node while its run goes on.

    With `train`, a node makes room whenever the trainer has enough data: it pauses, keeps what it
    was generating, and goes on when the batch is trained. Without `rollout`, it pauses until it
    gets the tag back. Tags last until the node's process ends.

    Args:
        node: Name of the node, as in `penstock status`.
        add: Tags to add, separated by commas, such as train.
        remove: Tags to remove, separated by commas, such as rollout.
        run: Run folder, or its config file; or a folder with one running run in it.
        why: Reason, for the log of operators' actions.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_text
    from penstock.runs.control import tag_node
    from penstock.runs.target import find_running_run

    folder = find_running_run(run)
    added, removed = (tuple(filter(None, text.split(","))) for text in (add, remove))
    answer = tag_node(folder, node, add=added, remove=removed, why=why)
    if json:
        print_json({"run": str(folder.path), "node": answer.node_id, "tags": answer.tags})
    else:
        print_text(f"{answer.node_id}: {', '.join(answer.tags) or 'no tags'}")
    return 0
