# SPDX-License-Identifier: Apache-2.0
"""The dashboard in a real browser, on a finished run folder: every view draws, in both lights and
at two widths, without an error in the console and without running what models wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.unit.dashboard.recorded_run import NUM_STEPS, record_run

from penstock.audit import audit

CHROMIUM = Path("/usr/bin/chromium")
TIMEOUT_MS = 60_000
VIEWS = {
    "overview": "mean reward",
    "trajectories": "p0-",
    "flow": "Trainers",
    "lineage?id=policy.2": "batch policy.2",
    "fleet": "node-1",
    "rules": "sealed",
    "weights": "policy@1.5",
    "spend": "lost: failed",
    "stalls": "Recorded stalls",
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("run"), name="first")


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """A dashboard of two runs, as a process of its own."""
    other = record_run(tmp_path_factory.mktemp("other"), name="second", rising=0.15)
    command = [sys.executable, "-m", "penstock.cli.main", "dashboard", str(folder), str(other)]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.wait(timeout=60)


@pytest.fixture(scope="module")
def browser(url: str) -> Generator[Browser]:
    """After `url`: playwright keeps an event loop in this thread; recording a run needs one."""
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield opened
        opened.close()


@pytest.fixture
def problems() -> list[str]:
    return []


def open_page(browser: Browser, url: str, problems: list[str], **options: Any) -> Page:
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.on("console", lambda line: problems.append(f"{line.type}: {line.text}"))
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.goto(url)
    page.wait_for_selector("nav.side")
    return page


@pytest.mark.parametrize(("width", "light"), [(1280, "light"), (390, "dark")])
def test_every_view_draws_without_an_error(
    browser: Browser, url: str, problems: list[str], width: int, light: Any
) -> None:
    size: Any = {"width": width, "height": 800}
    page = open_page(browser, url, problems, viewport=size, color_scheme=light)
    assert "token" not in page.url, "the token does not stay in the address"
    for view, text in VIEWS.items():
        page.goto(f"{url.partition('#')[0]}#/first/{view}")
        expect(page.locator("main")).to_contain_text(text, timeout=TIMEOUT_MS)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{view} is {wide} pixels wide"
    page.context.close()
    assert problems == []


def test_what_is_shown_is_what_the_audit_counts(
    browser: Browser, url: str, problems: list[str], folder: Path
) -> None:
    page = open_page(browser, url, problems)
    page.get_by_role("button", name="This run").click()
    shown = page.locator("[data-count=trajectories]").inner_text()
    counted = audit(folder).summary
    assert int(shown.replace(",", "")) == counted.trajectories
    expect(page.locator("main")).to_contain_text(f"{NUM_STEPS} of 8")
    page.goto(f"{url.partition('#')[0]}#/first/spend")
    sequences = page.locator("[data-count=sequences]").inner_text()
    assert int(sequences.replace(",", "")) == counted.trajectories
    page.context.close()
    assert problems == []


def test_hostile_text_stays_text(browser: Browser, url: str, problems: list[str]) -> None:
    page = open_page(browser, url, problems)
    page.goto(f"{url.partition('#')[0]}#/first/trajectories?outcome=failed")
    page.locator("tbody tr a").first.click()
    expect(page.locator(".error")).to_contain_text("<img src=x onerror=")
    page.get_by_role("button", name="tokens").click()
    token = page.locator(".tokens .sampled", has_text="onmouseover").first
    token.hover()
    expect(page.locator(".tip")).to_contain_text("log-prob")
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script").count() == 0
    page.context.close()
    assert problems == []


def test_keys_search_and_colours(browser: Browser, url: str, problems: list[str]) -> None:
    page = open_page(browser, url, problems)
    page.keyboard.press("2")
    page.wait_for_selector("tbody tr.link")
    page.keyboard.press("j")
    page.keyboard.press("j")
    chosen = page.locator("tr.at a").inner_text()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(chosen)
    page.get_by_role("button", name="tokens").click()
    for name in ("advantage", "version", "mask", "log-prob"):
        page.get_by_role("button", name=name, exact=True).click()
    painted = page.locator(".tokens .sampled").first.evaluate("e => e.style.background")
    assert re.search(r"color-mix|rgb|color\(", painted)
    page.keyboard.press("2")
    page.wait_for_selector("tbody tr.link")
    page.keyboard.press("/")
    page.keyboard.type("p0-3.2.1")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.context.close()
    assert problems == []
