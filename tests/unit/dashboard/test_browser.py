# SPDX-License-Identifier: Apache-2.0
"""The dashboard in a real browser, on a finished run folder: every view draws, in both lights and
at two widths, without an error in the console and without running what models wrote."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from tests.unit.dashboard.browsing import CHROMIUM, dashboard_of, go, open_browser, open_page
from tests.unit.dashboard.recorded_run import NUM_STEPS, record_run

from penstock.audit import audit

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
    with dashboard_of(folder, other) as (address, _):
        yield address


@pytest.fixture(scope="module")
def browser(url: str) -> Generator[Browser]:
    """After `url`: playwright keeps an event loop in this thread; recording a run needs one."""
    with open_browser() as opened:
        yield opened


@pytest.fixture
def problems() -> list[str]:
    return []


@pytest.mark.parametrize(("width", "light"), [(1280, "light"), (390, "dark")])
def test_every_view_draws_without_an_error(
    browser: Browser, url: str, problems: list[str], width: int, light: Any
) -> None:
    size: Any = {"width": width, "height": 800}
    page = open_page(browser, url, problems, viewport=size, color_scheme=light)
    assert "token" not in page.url, "the token does not stay in the address"
    for view, text in VIEWS.items():
        go(page, url, f"first/{view}", text)
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
    expect(page.locator("tbody tr.link").nth(1)).to_have_class(re.compile(r"\bat\b"))
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


AXE = Path(os.environ.get("PENSTOCK_CACHE", Path.home() / ".cache" / "penstock")) / "axe"
AXE_SCRIPT = AXE / "axe_playwright_python" / "axe.min.js"


@pytest.mark.skipif(not AXE_SCRIPT.exists(), reason="needs axe-core: make setup-axe")
@pytest.mark.parametrize("light", ["light", "dark"])
def test_no_serious_fault_for_people_who_see_or_hear_otherwise(
    browser: Browser, url: str, problems: list[str], light: Any
) -> None:
    page = open_page(browser, url, problems, color_scheme=light)
    found: list[str] = []
    row = "trajectory/p0-3.2.1"
    for view, text in {**VIEWS, row: "against its group", "group/p0-3": "attempts"}.items():
        go(page, url, f"first/{view}", text)
        page.evaluate(AXE_SCRIPT.read_text())
        answer = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        for fault in answer["violations"]:
            where = [node["target"] for node in fault["nodes"]][:3]
            print(f"{view}: {fault['impact']}: {fault['id']}: {where}")
            if fault["impact"] in ("serious", "critical"):
                found.append(f"{view}: {fault['id']}: {fault['help']}: {where}")
    page.context.close()
    assert found == []


class _OneLine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"<!doctype html><title>one</title><p>one line"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


def test_the_first_paint_takes_no_longer_than_two_of_one_line(browser: Browser, url: str) -> None:
    """Median of ten, each with an empty cache, in turns."""
    served = ThreadingHTTPServer(("127.0.0.1", 0), _OneLine)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    took: dict[str, list[float]] = {f"http://127.0.0.1:{served.server_address[1]}/": [], url: []}
    for _ in range(10):
        for address, times in took.items():
            page = browser.new_context().new_page()
            page.goto(address)
            paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            page.wait_for_function(paint)
            times.append(page.evaluate(paint))
            page.context.close()
    served.shutdown()
    served.server_close()
    line_ms, ours_ms = (median(times) for times in took.values())
    print(f"first paint: one line {line_ms:.0f} ms, dashboard {ours_ms:.0f} ms")
    assert ours_ms <= 2 * line_ms
