"""The report in a real browser: it opens without a complaint, zooms, answers keys, and can be used without eyes."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from long_run import LongRun

from recorded_run import eventful_run
from rollback.report.page import make_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
WITHOUT = (
    "chromium is not installed" if BROWSER is None else "chromedriver is not installed" if DRIVER is None
    else "selenium is not installed" if importlib.util.find_spec("selenium") is None else None
)  # fmt: skip
pytestmark = pytest.mark.skipif(WITHOUT is not None, reason=WITHOUT or "")

# Nothing is asked of the network, by the browser itself either.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--window-size=1280,1000",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def short_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    with pytest.MonkeyPatch.context() as monkeypatch:
        eventful_run(folder / "run", monkeypatch)
    (folder / "report.html").write_text(make_page(folder / "run"))
    return folder / "report.html"


def open_page(browser: Any, page: Path) -> Any:
    """The chart of a page."""
    browser.get(page.as_uri())
    return browser.find_element("id", "chart")


def view(browser: Any) -> list[str]:
    """The labels of the chart's axis of steps."""
    script = "return [...document.querySelectorAll('#chart text[text-anchor=middle]')].map((each) => each.textContent)"
    return list(browser.execute_script(script))


def curves(browser: Any) -> list[str]:
    script = "return [...document.querySelectorAll('#chart path.line')].map((each) => each.getAttribute('d'))"
    return list(browser.execute_script(script))


def test_it_opens_without_a_complaint_and_asks_the_network_for_nothing(browser: Any, short_page: Path) -> None:
    open_page(browser, short_page)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert len([path for path in curves(browser) if path]) >= 4
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")


def test_it_zooms_by_button_by_dragging_and_by_keys(browser: Any, short_page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    chart = open_page(browser, short_page)
    whole = view(browser)
    browser.find_element("css selector", "[data-do=in]").click()
    nearer = view(browser)
    assert nearer != whole
    browser.find_element("css selector", "[data-do=reset]").click()
    assert view(browser) == whole
    svg = browser.find_element("css selector", "#chart svg")
    drag = ActionChains(browser).move_to_element_with_offset(svg, -100, 0).click_and_hold()
    drag.move_by_offset(200, 0).release().perform()
    assert view(browser) != whole
    chart.send_keys("0")
    assert view(browser) == whole
    chart.send_keys("n")
    assert "incident 1: loss (repeated)" in browser.find_element("id", "readout").text
    assert view(browser) != whole
    chart.send_keys("0")
    chart.send_keys(Keys.HOME)
    chart.send_keys(Keys.ARROW_RIGHT)
    assert browser.find_element("id", "readout").text.startswith("step 1, loss 2.5, gradient norm 1")


def test_pointing_shows_the_values_of_a_step(browser: Any, short_page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    open_page(browser, short_page)
    svg = browser.find_element("css selector", "#chart svg")
    ActionChains(browser).move_to_element(svg).perform()
    tip = browser.find_element("id", "tip")
    assert tip.is_displayed()
    assert "loss 2.5" in tip.text
    assert "step " in tip.text


def test_a_click_on_the_number_of_an_incident_leads_to_what_is_said_of_it(browser: Any, short_page: Path) -> None:
    open_page(browser, short_page)
    flag = browser.find_element("css selector", "#chart .flag + text")
    number = flag.text
    flag.click()
    assert browser.execute_script("return location.hash") == f"#incident-{number}"


def test_undone_steps_can_be_hidden_and_an_incident_leads_to_its_place(browser: Any, short_page: Path) -> None:
    open_page(browser, short_page)
    before, whole = len(curves(browser)), view(browser)
    browser.find_element("css selector", "[data-do=undone]").click()
    assert len(curves(browser)) < before
    button = browser.find_element("css selector", "#incident-2 [data-onset]")
    browser.execute_script("arguments[0].click()", button)
    assert view(browser) != whole
    assert browser.execute_script("return document.activeElement.id") == "chart"


@pytest.mark.covering
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_has_no_serious_accessibility_fault(browser: Any, short_page: Path, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
    source = next(Path(axe.__file__).parent.rglob("axe.min.js")).read_text()
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})  # the page's policy would not let axe in
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        open_page(browser, short_page)
        for details in browser.find_elements("css selector", "details"):
            browser.execute_script("arguments[0].open = true", details)
        paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        browser.execute_script(source)
        found = browser.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})
    assert found["passes"]
    faults = [(v["impact"], v["id"], [node["html"] for node in v["nodes"]]) for v in found["violations"]]
    assert faults == []


@pytest.mark.parametrize(
    "steps", [pytest.param(30_000), pytest.param(1_000_000, marks=pytest.mark.soak)], ids="{:_}".format
)
def test_a_long_run_opens_and_zooms_to_single_steps(browser: Any, tmp_path: Path, steps: int) -> None:
    LongRun(tmp_path / "run", steps, 50)
    page = tmp_path / "report.html"
    page.write_text(make_page(tmp_path / "run"))
    assert page.stat().st_size < 5_000_000
    chart = open_page(browser, page)
    assert browser.get_log("browser") == []
    assert len(browser.find_elements("css selector", "#chart .flag")) == 50
    chart.send_keys("n")
    chart.send_keys("n")
    assert "incident 1: loss" in browser.find_element("id", "readout").text
    assert 60 < max(path.count("L") for path in curves(browser)) < 200  # one point a step
    assert browser.get_log("browser") == []
