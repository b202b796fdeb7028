"""Pages in a real browser: what is seen, pointed at, pressed and printed, and that no request leaves.

They need Chromium and its driver: apt-get install chromium chromium-driver, or on other systems a Chromium and a
ChromeDriver of one version on the PATH; without them the tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from report_pages import every_page

pytestmark = pytest.mark.slow
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-sync", "window-size=1200,900"),
)
KINDS = pytest.mark.parametrize("kind", ["comparison", "run"])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return every_page(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no Chromium with its driver: apt-get install chromium chromium-driver")
    from selenium import webdriver

    os.environ |= {"SE_OFFLINE": "true", "SE_AVOID_STATS": "true"}
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.get("about:blank")
    yield driver
    driver.quit()


@pytest.fixture
def browser(started: Any) -> Any:
    """A window of 1200 × 900 in light colours, for the screen; what was logged before is forgotten."""
    started.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    look(started, "light")
    for log in ("browser", "performance"):
        started.get_log(log)
    return started


def look(browser: Any, scheme: str, media: str = "") -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def opened(browser: Any, page: Path) -> Any:
    browser.get(page.as_uri())
    return browser


def all_of(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements("css selector", selector)


def shown(browser: Any, number: int) -> set[bool]:
    """Whether the parts of a curve can be seen."""
    return {one.is_displayed() for one in all_of(browser, f'.curve[data-curve="{number}"]')}


@KINDS
def test_a_page_opens_without_a_word_and_asks_for_nothing(browser: Any, written: dict[str, Path], kind: str) -> None:
    opened(browser, written[kind])
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"}
    assert asked - {"data:,"} == {written[kind].as_uri()}


@pytest.mark.parametrize("kind", ["comparison"])
def test_a_button_switches_its_curve_in_all_panels(browser: Any, written: dict[str, Path], kind: str) -> None:
    opened(browser, written[kind])
    first, second = all_of(browser, ".legend button")
    assert (shown(browser, 0), shown(browser, 1)) == ({True}, {True})
    first.click()
    assert (first.get_attribute("aria-pressed"), second.get_attribute("aria-pressed")) == ("false", "true")
    assert (shown(browser, 0), shown(browser, 1)) == ({False}, {True})
    first.send_keys(" ")
    assert first.get_attribute("aria-pressed") == "true"
    assert shown(browser, 0) == {True}


@KINDS
def test_every_control_has_a_name_and_is_reached_by_tab(browser: Any, written: dict[str, Path], kind: str) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(browser, written[kind])
    tree = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {"button", "link", "application", "region", "table", "figure", "list", "DisclosureTriangle"}
    nodes = [node for node in tree if not node["ignored"] and node["role"]["value"] in roles - {"list"}]
    assert nodes
    assert [node for node in nodes if not node["name"]["value"].strip()] == []
    wanted = all_of(browser, "a[href], button, summary, [tabindex='0']")
    wanted = [one for one in wanted if one.is_displayed() or one.get_attribute("class") == "skip"]
    reached = []
    for _ in wanted:
        browser.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(browser.switch_to.active_element)
    assert reached == wanted


CONTRASTS = """
const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
const luminance = (colour) => {
  const linear = (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = parts(colour).slice(0, 3).map((one) => linear(one / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const background = (one) => {
  for (let at = one; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (parts(colour)[3] !== 0) return colour;
  }
};
const poor = [];
for (const one of document.body.querySelectorAll("*")) {
  const own = [...one.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  if (!own || !one.checkVisibility() || ["SCRIPT", "STYLE"].includes(one.tagName)) continue;
  const style = getComputedStyle(one), svg = one.closest("svg");
  const pair = [luminance(svg ? style.fill : style.color), luminance(background(one))].sort();
  const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  if (ratio < 4.5) poor.push(`${one.tagName}.${one.className}: ${ratio.toFixed(2)}`);
}
return [poor, getComputedStyle(document.body).backgroundColor];
"""


@KINDS
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_texts_stand_out_in_both_schemes(browser: Any, written: dict[str, Path], kind: str, scheme: str) -> None:
    look(browser, scheme)
    opened(browser, written[kind])
    for button in all_of(browser, ".legend button")[:1]:
        button.click()
    poor, background = browser.execute_script(CONTRASTS)
    assert poor == []
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 23, 27)"}[scheme]


@KINDS
def test_a_phone_scrolls_tables_not_the_page(browser: Any, written: dict[str, Path], kind: str) -> None:
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    opened(browser, written[kind])
    assert browser.execute_script("return [innerWidth, document.documentElement.scrollWidth]") == [390, 390]
    if kind == "comparison":
        wide = "return [...document.querySelectorAll('.scroll')].some((one) => one.scrollWidth > one.clientWidth)"
        assert browser.execute_script(wide)
        assert {one.rect["height"] >= 44 for one in all_of(browser, ".legend button")} == {True}  # for a finger


def test_print_has_all_curves_and_no_controls(browser: Any, written: dict[str, Path]) -> None:
    look(browser, "dark")
    opened(browser, written["comparison"])
    all_of(browser, ".legend button")[0].click()
    look(browser, "dark", "print")
    assert shown(browser, 0) == {True}
    assert {one.is_displayed() for one in all_of(browser, "nav, figure details, .readout, details:not([open])")} == {
        False
    }
    assert {one.is_displayed() for one in all_of(browser, ".legend button")} == {True}  # the key of the picture
    assert all_of(browser, ".legend button")[0].value_of_css_property("border-top-style") == "none"
    assert all_of(browser, "body")[0].value_of_css_property("background-color") == "rgba(255, 255, 255, 1)"  # as by day
    assert len(browser.print_page()) > 1000


def test_no_other_script_runs(browser: Any, written: dict[str, Path], tmp_path: Path) -> None:
    """Even one that came into the page unescaped."""
    changed = written["comparison"].read_text().replace("</h1>", "<script>document.title = 'run'</script></h1>")
    changed = changed.replace("<h1>", "<h1 onclick='document.title = \"run\"'>")
    page = tmp_path / "changed.html"
    page.write_text(changed)
    opened(browser, page)
    all_of(browser, "h1")[0].click()
    assert browser.title == "quadratic: relative error"
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]
