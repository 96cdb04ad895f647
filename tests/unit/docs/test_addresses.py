# SPDX-License-Identifier: Apache-2.0
"""Addresses in what we ship: of this machine, reserved for examples, or a page of others that is
listed here. None pretends to be a site of ours: we own none."""

from __future__ import annotations

import ipaddress
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
ADDRESS = re.compile(r"https?://([^\s\"'`<>()\[\]|\\,]+)")
OTHERS = {
    "github.com": "source of other projects",
    "www.w3.org": "name of the SVG format",
    "json-schema.org": "name of the schema format",
    "www.apache.org": "the licence",
    "semver.org": "how versions are numbered",
    "keepachangelog.com": "the form of the changelog",
    "www.contributor-covenant.org": "the code of conduct",
    "www.harborframework.com": "Harbor",
    "modelcontextprotocol.io": "MCP",
    "huggingface.co": "the Hub",
    "api.openai.com": "an API that agents call",
}
PLACEHOLDERS = {"HOST", "host", "…", "engine", "penstock", "proxy"}
"""Names that a reader replaces, and of containers in a private network."""
SKIPPED = ("tests/", "recipes/", "benchmarks/", "src/penstock/dashboard/static/vendor/")


def shipped() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return [
        ROOT / name for name in listed.stdout.split("\n") if name and not name.startswith(SKIPPED)
    ]


def is_ours_or_reserved(host: str) -> bool:
    if re.search(r"[{}$]", host) or host in PLACEHOLDERS or not host:
        return True
    if host == "example.com" or host.endswith((".example", ".example.com", "localhost")):
        return True
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return False


def test_every_address_is_known() -> None:
    unknown: list[str] = []
    for path in shipped():
        if path.suffix in (".png", ".woff2") or not path.is_file():
            continue
        for found in ADDRESS.findall(path.read_text(errors="replace")):
            host, _, rest = found.partition("/")
            host = host.rpartition("@")[2].partition(":")[0]
            if is_ours_or_reserved(host):
                continue
            if host not in OTHERS or "penstock" in rest.lower():
                unknown.append(f"{path.relative_to(ROOT)}: {found}")
    assert unknown == [], "list the page of others in OTHERS; we have no site of our own"
