# SPDX-License-Identifier: Apache-2.0
"""Fail when modules of src import each other in a circle, imports for type checkers included."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.import_graph import find_cycles, read_graph


def main() -> int:
    graph = read_graph()
    cycles = find_cycles(graph)
    for members in cycles:
        print(f"import cycle: {' <-> '.join(members)}", file=sys.stderr)
    print(f"check_cycles: {len(graph)} modules, {len(cycles)} cycles")
    return 1 if cycles else 0


if __name__ == "__main__":
    sys.exit(main())
