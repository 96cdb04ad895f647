# SPDX-License-Identifier: Apache-2.0
"""Fail on TOML or YAML that does not parse, links to missing files, and files that are too large.

check_files.py [FILE…]     these files; by default every file that git tracks
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml

MAX_BYTES = 600_000
"""Larger files belong in a release or a cache, not in git."""
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)(?:#[^)]*)?\)")
_EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:|/")


def check_file(path: Path) -> Iterator[str]:
    if path.stat().st_size > MAX_BYTES:
        yield f"{path}: {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} belong in git"
        return
    try:
        if path.suffix == ".toml":
            tomllib.loads(path.read_text(encoding="utf-8"))
        elif path.suffix in (".yaml", ".yml"):
            list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        yield f"{path}: does not parse: {error}"
    if path.suffix == ".md":
        yield from check_links(path)


def check_links(page: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in _LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
        if not _EXTERNAL.match(target) and not (page.parent / target).exists():
            yield f"{page}: link to a missing file: {target}"


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True).stdout
    return [Path(name.decode()) for name in listed.split(b"\0") if name]


def main() -> int:
    paths = [Path(name) for name in sys.argv[1:]] or tracked()
    findings = [found for path in paths if path.is_file() for found in check_file(path)]
    for finding in findings:
        print(finding, file=sys.stderr)
    print(f"check_files: {len(paths)} files, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
