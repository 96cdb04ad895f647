# SPDX-License-Identifier: Apache-2.0
"""Write docs/run.schema.json, the JSON schema of a run file; with `--check` it only fails when the
file is out of date."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.config.schema import schema_text

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "docs" / "run.schema.json"


def main() -> int:
    text = schema_text()
    if "--check" not in sys.argv:
        PUBLISHED.write_text(text, encoding="utf-8")
        print(f"write_schema: wrote {PUBLISHED.relative_to(ROOT)}")
        return 0
    if PUBLISHED.is_file() and PUBLISHED.read_text(encoding="utf-8") == text:
        return 0
    print("write_schema: docs/run.schema.json is out of date; run scripts/write_schema.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
