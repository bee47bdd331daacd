"""The page of a report, as a real browser shows it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from minato import DataLoader, Observe
from minato.observe.text import page as page_of
from tests.datasets import Sleepy
from tests.observe import browsers
from tests.observe.browsers import Browser

TOO_FAR_RIGHT = """
[...document.querySelectorAll('body *')]
    .filter(e => e.getBoundingClientRect().right > screen.width + 0.5 && !e.closest('.wide'))
    .map(e => e.tagName + ': ' + e.textContent.slice(0, 40))
"""
SMALLEST_TEXT = """
Math.min(...[...document.querySelectorAll('text, td, p, summary')]
    .map(e => parseFloat(getComputedStyle(e).fontSize)
         * (e.ownerSVGElement ? e.getScreenCTM().a : 1)))
"""
LEAST_CONTRAST = """
(() => {
    const light = colour => colour.match(/[\\d.]+/g).slice(0, 3)
        .map(each => each / 255)
        .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
        .reduce((sum, each, i) => sum + each * [0.2126, 0.7152, 0.0722][i], 0.05);
    const paper = light(getComputedStyle(document.body).backgroundColor);
    return Math.min(...[...document.querySelectorAll('p, td, th, b, figcaption, span, text, rect')]
        .map(e => getComputedStyle(e)[e.ownerSVGElement ? 'fill' : 'color'])
        .map(light)
        .map(each => Math.max(each, paper) / Math.min(each, paper)));
})()
"""
AXES = "[...document.querySelectorAll('svg')].map(e => [...e.querySelectorAll('text')].map(t => t.textContent))"


def a_transform_with_a_name_that_is_much_too_long(sample: int) -> int:
    time.sleep(0.001)
    return sample


def loader_of(name: str, size: int) -> DataLoader[int]:
    return DataLoader(
        Sleepy(size, 0.001, dict.fromkeys(range(3, size, 20), 0.02)),
        4,
        num_workers=2,
        transforms=[a_transform_with_a_name_that_is_much_too_long],
        observe=Observe(name=name),
    )


@pytest.fixture(scope="module")
def text() -> str:
    loaders = [loader_of("train <photos> of a name that is long", 200), loader_of("validation", 40)]
    for loader in loaders:
        for _ in range(2):
            list(loader)
    return page_of([loader.report() for loader in loaders])


@pytest.fixture(scope="module")
def file(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if browsers.PATH is None:
        pytest.skip("no browser: apt-get install --no-install-recommends chromium")
    with browsers.browser() as it:
        yield it


def test_it_says_whose_it_is(text: str) -> None:
    assert "<title>train &lt;photos&gt; of a name that is long, validation: minato report" in text
    for words in ("torch 2", "Python 3", "Linux", "batch_size=4, num_workers=2", "validation</h2>"):
        assert words in text
    assert text.count("<h1>") == 1
    assert text.count('class="tiles"') == 2
    assert "<script" not in text


def test_a_loader_that_has_not_run() -> None:
    text = page_of([loader_of("unused", 4).report()])
    assert "Too few batches for a verdict: 0." in text
    assert "<svg" not in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "media"), [(420, "screen"), (1200, "screen"), (800, "print")])
def test_it_is_whole_and_readable(
    width: int, media: str, scheme: str, file: Path, browser: Browser, tmp_path: Path
) -> None:
    preference = {"name": "prefers-color-scheme", "value": scheme}
    browser.call("Emulation.setEmulatedMedia", media=media, features=[preference])
    browser.open(file, width)
    if media == "screen":
        browser.value("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(TOO_FAR_RIGHT) == []
    assert browser.value(SMALLEST_TEXT) >= 10
    assert browser.value(LEAST_CONTRAST) >= 4.5
    for waiting, stages in zip(*[iter(browser.value(AXES))] * 2, strict=True):
        assert waiting[:3] == ["100 %", "0 %", "0 s"]
        assert stages[-2:] == ["0 %", "100 %"]
    assert browser.complaints == []


def test_the_browser_complains_where_there_is_cause(browser: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<meta name='viewport' content='width=device-width'><body style='background:#fff'>"
        "<div style='width:600px'>wide</div>"
        "<p style='color:#999'>pale</p><img src='missing.png'><script>throw new Error('a fault')</script>"
    )
    browser.call("Emulation.setEmulatedMedia", media="screen", features=[])
    browser.open(bad, 390)
    told, browser.complaints = " ".join(browser.complaints), []
    assert browser.value("document.documentElement.scrollWidth") > 390
    assert browser.value(TOO_FAR_RIGHT) == ["DIV: wide"]
    assert browser.value(LEAST_CONTRAST) < 4.5
    for words in ("a fault", "ERR_FILE_NOT_FOUND"):
        assert words in told
