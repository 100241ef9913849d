"""The report in a real headless browser: it draws, zooms and finds steps, on a desk and on a phone, and asks nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maulstick.tools.report.command import write_report
from maulstick.tools.report.read import read_run
from tests.tools.report.headless_browser import NAMES, HeadlessBrowser, browser_program
from tests.tools.report.made_logs import CLOSING_TAG, add_samples, long_run

PROGRAM = browser_program()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROGRAM is None, reason=f"no browser: install one of {', '.join(NAMES)}, or name one in MAULSTICK_BROWSER"
    ),
]
AT = "document.getElementById('at').textContent"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadlessBrowser]:
    assert PROGRAM is not None
    made = HeadlessBrowser(PROGRAM, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of 2,000 steps with a spike at 812, NaN at 1500, a rescue and samples."""
    folder = tmp_path_factory.mktemp("run")
    log = long_run(folder, 2000, spikes={812: 41.3}, nans=[1500])
    rows = log.read_text().splitlines()
    rows.insert(
        -1, '{"event": "rescue", "step": 1501, "cause": "bad_windows", "text": "back to the state of step 1475"}'
    )
    log.write_text("\n".join(rows) + "\n")
    add_samples(log, [0, 1000, 2000], [f"a cat {CLOSING_TAG}", "a dog"])
    write_report([read_run(log)], folder / "report.html")
    return folder / "report.html"


@pytest.fixture(autouse=True)
def _no_trouble(browser: HeadlessBrowser, page: Path) -> Iterator[None]:
    browser.troubles.clear()
    browser.requests.clear()
    browser.open(page)
    yield
    assert browser.troubles == []
    assert {address.split(":")[0] for address in browser.requests} <= {"file", "data"}


def box(browser: HeadlessBrowser, chart: str) -> dict[str, float]:
    """Return where a chart's plot lies in the window, after scrolling to it."""
    plot = f"document.querySelector('[data-chart={chart}] .plot')"
    browser.run(f"{plot}.scrollIntoView({{block: 'center'}})")
    browser.settle()
    found: dict[str, float] = browser.run(
        f"(({{left, top, width, height}}) => ({{left, top, width, height}}))({plot}.getBoundingClientRect())"
    )
    return found


def legend(browser: HeadlessBrowser, chart: str) -> str:
    text: str = browser.run(f"document.querySelector('[data-chart={chart}] .legend').innerText")
    return " ".join(text.split())


def share_drawn(browser: HeadlessBrowser, selector: str) -> float:
    """Return the share of a canvas that something was painted on."""
    # Read from a copy: the browser warns of a canvas that is painted on and read again and again.
    count = (
        f"(() => {{ const c = document.querySelector('{selector} canvas'), o = new OffscreenCanvas(c.width, c.height);"
        "const g = o.getContext('2d', {willReadFrequently: true}); g.drawImage(c, 0, 0);"
        "const d = g.getImageData(0, 0, c.width, c.height).data; let n = 0;"
        "for (let i = 3; i < d.length; i += 4) if (d[i]) n++; return n / (c.width * c.height); })()"
    )
    return float(browser.run(count))


@pytest.mark.parametrize("width, height, phone", [(1280, 900, False), (360, 740, True)])
@pytest.mark.parametrize("dark", [False, True])
def test_everything_is_there_and_nothing_sticks_out(
    browser: HeadlessBrowser, page: Path, tmp_path: Path, width: int, height: int, phone: bool, dark: bool
) -> None:
    browser.open(page, width=width, height=height, dark=dark, phone=phone)
    assert browser.run("document.documentElement.scrollWidth") == width
    headings: list[str] = browser.run("[...document.querySelectorAll('h2')].map(h => h.innerText)")
    assert headings[1:] == ["What happened", "Charts", "Samples", "Data", "Options", "Environment"]
    for chart in ("loss", "norm", "rates", "seconds", "profile"):
        assert share_drawn(browser, f"[data-chart={chart}]") > 0.005
    for number in range(3):
        assert share_drawn(browser, f"[data-heat=heat-{number}]") > 0.5
    assert browser.run("[...document.images].filter(i => i.complete && i.naturalWidth > 0).length") >= 6
    browser.screenshot(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as shot:
        corner = np.asarray(shot.convert("RGB"))[5, 5]
    assert corner.tolist() == ([20, 23, 26] if dark else [255, 255, 255])


def test_the_pointer_reads_values_at_the_same_step_in_all_charts(browser: HeadlessBrowser) -> None:
    at = box(browser, "norm")
    left = 16 + 6.3 * len("950–999")  # the widest name of a row of the heat maps
    inside = at["width"] - left - 10
    browser.mouse("mouseMoved", at["left"] + left + inside * 811 / 1999, at["top"] + 60)
    browser.settle()
    assert "norm 41.3" in legend(browser, "norm")
    assert "each step 41.3" in legend(browser, "loss")
    assert browser.run(AT).startswith("step 812 · step 812, skipped: norm 9 is 45x the recent median")


def test_a_step_is_found_and_marks_are_walked_through_by_keys(browser: HeadlessBrowser) -> None:
    browser.run("document.getElementById('step').value = '1,500'; document.querySelector('#search button').click()")
    browser.settle()
    said = browser.run(AT)
    assert said.startswith("step 1,500 · ")
    assert "norm NaN" in said
    assert "skipped: the gradient is NaN in 3 of 384 tensors" in said
    browser.run("document.querySelector('[data-chart=loss] .plot').focus()")
    browser.key("n")
    assert browser.run(AT).startswith("step 1,501 · ")
    assert "rescue: back to the state of step 1475" in browser.run(AT)
    browser.key("p")
    browser.key("p")
    assert browser.run(AT).startswith("step 812 · ")
    browser.key("ArrowRight")
    assert browser.run(AT).startswith("step 813 · ")
    browser.run("document.getElementById('step').value = '5000'; document.querySelector('#search button').click()")
    assert browser.run(AT) == "Steps go from 1 to 2,000."


def test_dragging_zooms_all_charts_and_a_double_click_shows_all_again(browser: HeadlessBrowser) -> None:
    whole = share_drawn(browser, "[data-chart=loss]")
    at = box(browser, "norm")
    y = at["top"] + 60
    for kind, share in (("mousePressed", 0.3), ("mouseMoved", 0.35), ("mouseMoved", 0.4), ("mouseReleased", 0.4)):
        browser.mouse(kind, at["left"] + at["width"] * share, y, buttons=1, clicks=1)
    browser.settle()
    zoomed = share_drawn(browser, "[data-chart=loss]")
    assert zoomed < 0.7 * whole
    for clicks in (1, 2):
        browser.mouse("mousePressed", at["left"] + 300, y, buttons=1, clicks=clicks)
        browser.mouse("mouseReleased", at["left"] + 300, y, clicks=clicks)
    browser.settle()
    assert share_drawn(browser, "[data-chart=loss]") == pytest.approx(whole, rel=0.02)


def test_a_step_in_the_table_leads_to_the_charts_and_pictures_open(browser: HeadlessBrowser) -> None:
    browser.run("document.querySelector('button.step[data-step=\"812\"]').click()")
    browser.settle()
    assert browser.run(AT).startswith("step 812 · ")
    browser.run("document.querySelector('.film button').click()")
    assert browser.run("document.getElementById('viewer').open")
    assert browser.run("document.querySelector('#viewer p').textContent") == f"a cat {CLOSING_TAG}, step 0"
    browser.key("ArrowRight")
    assert browser.run("document.querySelector('#viewer p').textContent") == f"a cat {CLOSING_TAG}, step 1000"


def test_several_runs_share_their_charts(browser: HeadlessBrowser, page: Path, tmp_path: Path) -> None:
    other = read_run(long_run(tmp_path, 500, name="other", ends=False))
    write_report([read_run(page.parent), other], tmp_path / "both.html")
    browser.open(tmp_path / "both.html")
    shown = legend(browser, "loss")
    assert "made: mean of 100" in shown
    assert "other: mean of 100" in shown
    assert browser.run("document.querySelectorAll('article.verdict').length") == 2


def test_the_hover_answer_says_what_is_there(browser: HeadlessBrowser) -> None:
    plot = "document.querySelector('[data-heat=heat-0] .plot')"
    browser.run(f"{plot}.scrollIntoView({{block: 'center'}})")
    browser.settle()
    at: dict[str, Any] = browser.run(f"(({{left, top}}) => ({{left, top}}))({plot}.getBoundingClientRect())")
    browser.mouse("mouseMoved", at["left"] + 200, at["top"] + 8 + 15 * 2 + 7)
    browser.settle()
    text = browser.run("document.querySelector('[data-heat=heat-0] .legend').innerText")
    assert "IN02, step " in text
