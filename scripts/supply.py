# SPDX-License-Identifier: Apache-2.0
"""Hashes and a bill of materials for the pinned versions.

supply.py             write constraints/hashes.txt from the package index, then sbom.cdx.json
supply.py --check     fail if either does not fit constraints/dev.txt

Neither file records an address. torch has no hash: each platform and accelerator has its own build.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

CONSTRAINTS = Path(__file__).parent.parent / "constraints"
PINS, HASHES, SBOM = (CONSTRAINTS / name for name in ("dev.txt", "hashes.txt", "sbom.cdx.json"))
WITHOUT_HASH = {"torch"}
HEADER = """\
# SHA-256 of the files for CPython 3.11 on x86-64 Linux; `make constraints` writes this.
# Install with them: pip install --require-hashes --no-deps -r constraints/hashes.txt
"""
_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)(?: --hash=sha256:(?P<hash>\w+))?")


def read(path: Path) -> dict[str, tuple[str, str]]:
    """Version and hash by name."""
    found = map(_LINE.fullmatch, path.read_text().splitlines())
    return {m["name"].lower(): (m["version"], m["hash"] or "") for m in found if m}


def fetch_hashes(pins: dict[str, tuple[str, str]]) -> str:
    """What the package index gives for the pinned versions."""
    wanted = [f"{name}=={version}" for name, (version, _) in pins.items()]
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-"]
    report = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *wanted],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    hashes: dict[str, str] = {}
    for item in json.loads(report)["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        hashes[name] = item["download_info"]["archive_info"]["hashes"]["sha256"]
    lines = [
        f"{name}=={version} --hash=sha256:{hashes[re.sub(r'[-_.]+', '-', name)]}\n"
        for name, (version, _) in pins.items()
    ]
    return HEADER + "".join(lines)


def bill_of_materials() -> str:
    """CycloneDX 1.6 of everything that `make setup` installs."""
    hashes = read(HASHES)
    components = [
        {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
            **(
                {"hashes": [{"alg": "SHA-256", "content": hashes[name][1]}]}
                if name in hashes
                else {}
            ),
            **({"licenses": [{"license": {"name": text}}]} if (text := _licence(name)) else {}),
        }
        for name, (version, _) in read(PINS).items()
    ]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "penstock-rl"}},
        "components": components,
    }
    return json.dumps(document, indent=1) + "\n"


def _licence(name: str) -> str:
    try:
        found = metadata(name)
    except PackageNotFoundError:
        return ""
    for key in ("License-Expression", "License"):
        if key in found and found[key].strip():
            return found[key].splitlines()[0][:80]
    return ""


def problems() -> list[str]:
    pins, hashes = read(PINS), read(HASHES)
    found = [
        f"{name}=={version}: no hash in {HASHES.name}"
        for name, (version, _) in pins.items()
        if name not in WITHOUT_HASH and hashes.get(name, ("", ""))[0] != version
    ]
    listed = json.loads(SBOM.read_text())["components"]
    if {(part["name"], part["version"]) for part in listed} != {
        (name, version) for name, (version, _) in pins.items()
    }:
        found.append(f"{SBOM.name} does not list the versions of {PINS.name}")
    return found


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        for problem in (found := problems()):
            print(f"{problem}; run `make constraints`", file=sys.stderr)
        return 1 if found else 0
    pins = {name: pin for name, pin in read(PINS).items() if name not in WITHOUT_HASH}
    HASHES.write_text(fetch_hashes(pins))
    SBOM.write_text(bill_of_materials())
    return 0


if __name__ == "__main__":
    sys.exit(main())
