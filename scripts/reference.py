# SPDX-License-Identifier: Apache-2.0
"""Write the reference pages and llms.txt from the code; with `--check`, fail if one is out of date.

docs/reference/config.md    every key of run.yaml: type, default, unit and meaning
docs/reference/cli.md       every command and flag
docs/reference/python.md    the public names of `penstock`
docs/reference/http.md      every route of every service
docs/reference/metrics.md   every metric
docs/reference/names-elsewhere.md   names of other frameworks
docs/llms.txt               a list of all pages with one line each

Text comes from docstrings. To change a page, change the docstring and run this script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.reference_pages import cli, config, http, llms, metrics, names_elsewhere, python

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES: Mapping[str, Callable[[], str]] = {
    "reference/config.md": config.page,
    "reference/cli.md": cli.page,
    "reference/python.md": python.page,
    "reference/http.md": http.page,
    "reference/metrics.md": metrics.page,
    "reference/names-elsewhere.md": names_elsewhere.page,
    "llms.txt": llms.page,
}


def main() -> int:
    stale: list[str] = []
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if "--check" in sys.argv:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"reference: out of date: {', '.join(stale)}; run scripts/reference.py")
    else:
        print(f"reference: {len(PAGES)} pages")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
