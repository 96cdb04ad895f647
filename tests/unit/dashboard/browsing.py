# SPDX-License-Identifier: Apache-2.0
"""Debian's Chromium, a dashboard as a process of its own, and pages that remember every problem.
With `PENSTOCK_PICTURES=FOLDER`, every view that is visited is photographed there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
TIMEOUT_MS = 60_000
PICTURES = os.environ.get("PENSTOCK_PICTURES", "")
DASHBOARD = (sys.executable, "-m", "penstock.cli.main", "dashboard")


@contextmanager
def open_browser() -> Generator[Browser]:
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield opened
        opened.close()


@contextmanager
def dashboard_of(*folders: Path) -> Generator[tuple[str, subprocess.Popen[str]]]:
    """Its address and its process."""
    command = [*DASHBOARD, *map(str, folders), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"], process
        finally:
            process.send_signal(signal.SIGCONT)  # a test may have stopped it
            process.terminate()
            process.wait(timeout=60)


def open_page(browser: Browser, url: str, problems: list[str], **options: Any) -> Page:
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.on("console", lambda line: problems.append(f"{line.type}: {line.text}"))
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.goto(url)
    page.wait_for_selector("nav.side")
    return page


def go(page: Page, url: str, view: str, text: str) -> None:
    """To a view of the run, once it shows this text and nothing wider than the window."""
    page.goto(f"{url.partition('#')[0]}#/{view}")
    expect(page.locator("main")).to_contain_text(text, timeout=TIMEOUT_MS)
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, f"{view} is {wide} pixels too wide"
    if PICTURES:
        _photograph(page, view)


def _photograph(page: Page, view: str) -> None:
    light = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'")
    width = page.evaluate("innerWidth")
    name = view.partition("?")[0].replace("/", "-")
    page.screenshot(path=Path(PICTURES) / f"{name}-{width}-{light}.png")
