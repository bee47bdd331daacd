"""The page of a report, as a real browser shows it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from minato import DataLoader, StragglerPolicy
from minato.observe.report import html
from tests.datasets import Sleepy
from tests.observe.report import browsers
from tests.observe.report.browsers import Browser

pytestmark = pytest.mark.skipif(
    browsers.PATH is None, reason="no browser: apt-get install --no-install-recommends chromium"
)
TITLES = [
    "Waiting over time",
    "Workers and batches in flight over time",
    "Cost of samples (number by time, logarithmic)",
    "Share of the workers' time",
    "Slowest samples",
]
TOO_FAR_RIGHT = """
[...document.querySelectorAll('body *')]
    .filter(e => e.getBoundingClientRect().right > screen.width + 0.5 && !e.closest('.wide'))
    .map(e => e.tagName + ': ' + e.textContent.slice(0, 40))
"""
SMALLEST_TEXT = """
Math.min(...[...document.querySelectorAll('text, td, p, summary')]
    .filter(e => e.checkVisibility())
    .map(e => parseFloat(getComputedStyle(e).fontSize)
         * (e.ownerSVGElement ? e.getScreenCTM().a : 1)))
"""


def a_transform_with_a_name_that_is_much_too_long(sample: int) -> int:
    time.sleep(0.001)
    return sample


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    loader = DataLoader(
        Sleepy(200, 0.001, dict.fromkeys(range(3, 200, 20), 0.02)),
        4,
        num_workers=2,
        order="arrival",
        transforms=[a_transform_with_a_name_that_is_much_too_long],
        stragglers=StragglerPolicy(after_s=0.01),
    )
    list(loader)
    file = tmp_path_factory.mktemp("page") / "report.html"
    report = loader.report(labels=lambda index: int(index % 20 == 3))
    assert report.warnings
    file.write_text(html.page(report, html.table(("loader", "time"), [("minato", "1 s")])))
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsers.browser() as it:
        yield it


@pytest.mark.parametrize("width", [390, 1200])
def test_it_is_whole_and_readable(width: int, page: Path, browser: Browser, tmp_path: Path) -> None:
    browser.open(page, width)
    assert browser.value("innerWidth") == width
    assert (
        browser.value("[...document.querySelectorAll('figcaption')].map(e => e.textContent)")
        == TITLES
    )
    sizes = browser.value(
        "[...document.querySelectorAll('svg')].map(e => [e.clientWidth, e.clientHeight])"
    )
    assert len(sizes) == len(TITLES)
    assert min(wide for wide, _ in sizes) > 300
    assert min(tall for _, tall in sizes) > 40
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(TOO_FAR_RIGHT) == []
    assert browser.value(SMALLEST_TEXT) >= 10
    assert browser.value("document.querySelectorAll('.note').length") >= 1
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert browser.complaints == []


def test_every_table_can_be_opened(page: Path, browser: Browser) -> None:
    browser.open(page, 390)
    browser.value("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert browser.value("document.querySelectorAll('details').length") > 8
    assert browser.value("document.documentElement.scrollWidth") <= 390
    assert browser.value(TOO_FAR_RIGHT) == []
    assert browser.complaints == []


def test_the_browser_complains_where_there_is_cause(browser: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<meta name='viewport' content='width=device-width'><div style='width:600px'>wide</div>"
        "<img src='missing.png'><script>console.log('a word'); throw new Error('a fault')</script>"
    )
    browser.open(bad, 390)
    told, browser.complaints = " ".join(browser.complaints), []
    assert browser.value("document.documentElement.scrollWidth") > 390
    assert browser.value(TOO_FAR_RIGHT) == ["DIV: wide"]
    for words in ("a word", "a fault", "ERR_FILE_NOT_FOUND"):
        assert words in told
