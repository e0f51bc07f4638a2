"""The report in a real browser: it draws, answers to pointer and keys, runs nothing a model wrote, and fits the screen."""

import json
import shutil

import pytest

from burnish.monitor.report import write_report
from tests.make_run import make_answers_run, make_run

webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")]

FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update --disable-sync"


@pytest.fixture(scope="module")
def browser():
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(make_run(tmp_path_factory.mktemp("run"), steps=30, hostile=True))


def visit(browser, path, *, width=1280, height=900, theme="light"):
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(f"file://{path}")
    wait(browser, "return document.documentElement.dataset.ready === 'yes' && document.querySelectorAll('.plot .main-svg').length > 0")


def wait(browser, script):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 20).until(lambda b: b.execute_script(script), script)


def test_it_draws_without_an_error_or_a_request(browser, report):
    visit(browser, report)
    drawn = browser.execute_script("return [...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('.trace').length)")
    assert len(drawn) == 12 and all(drawn), drawn
    bars = browser.execute_script("return document.querySelectorAll('#ledger-plot .barlayer .trace').length")
    assert bars == 6
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert asked[0] == f"file://{report}" and all(url.startswith(("file://", "data:", "blob:")) for url in asked)
    assert len([url for url in asked if url.startswith("file://")]) == 1


@pytest.mark.parametrize("width", [1280, 400])
def test_a_run_on_written_answers_draws_what_it_has(browser, tmp_path, width):
    path = write_report(make_answers_run(tmp_path))
    visit(browser, path, width=width)
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('.chart')].map(c => [c.querySelector('h3').textContent, c.querySelectorAll('.trace').length])"
    )
    titles = dict(drawn)
    assert set(titles) == {
        "Pairs in order", "Margin of implied rewards", "Implied rewards", "Loss", "Terms of the loss", "Speed", "Gradient, learning rate",
    }
    assert all(titles.values()) and titles["Pairs in order"] == 3 and titles["Implied rewards"] == 6     # curve, mean of it, held out
    assert browser.execute_script("return document.querySelectorAll('#charts .none').length") == 0
    assert "90.0%" in browser.execute_script("return document.querySelector('.measured').textContent")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_script("document.getElementById('theme').click()")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    assert browser.get_log("browser") == []


def test_what_a_model_wrote_stays_inert(browser, report):
    visit(browser, report)
    title = browser.title
    count = browser.execute_script("return document.querySelectorAll('#list .item').length")
    for _ in range(count):
        browser.execute_script("document.getElementById('next').click()")
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    assert browser.title == title == "arithmetic-grpo - burnish report"
    assert browser.execute_script("return document.querySelectorAll('img, iframe, main script').length") == 0
    assert "<img src=x onerror=" in browser.execute_script("return document.querySelector('#answers').textContent")
    assert browser.get_log("browser") == []
    # And were a text ever inserted as HTML: the page's policy still refuses to run it.
    browser.execute_script("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
    browser.execute_script("const s = document.createElement('script'); s.textContent = 'document.title = 2'; document.body.append(s)")
    assert browser.title == title
    refused = [entry["message"] for entry in browser.get_log("browser")]
    assert any("Content Security Policy" in message for message in refused)


def test_browsing_rollouts(browser, report):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    visit(browser, report)
    find = lambda css: browser.find_element(By.CSS_SELECTOR, css)  # noqa: E731
    data = json.loads(browser.execute_script("return document.getElementById('data').textContent"))

    failed = [r for r in data["rollouts"] if r["reward"] is None or r["errors"]]
    assert failed
    find("[data-filter=failed]").click()
    items = browser.find_elements(By.CSS_SELECTOR, "#list .item")
    assert len(items) == len(failed)
    assert "ValueError: no number in the answer" in find("#detail").text and "not scored" in find("#detail").text

    find("[data-filter=training]").click()
    training = [r for r in data["rollouts"] if r["where"] == "training"]
    talk = next(i for i, r in enumerate(training) if "tool" in r["task"])
    item = find(f"#item-{talk}")
    item.click()
    assert item.get_attribute("aria-selected") == "true" and training[talk]["task"] in find("#detail h3").text
    authors = [p.text for p in browser.find_elements(By.CSS_SELECTOR, ".block > p")]
    assert authors == ["prompt", "the policy wrote", "environment", "the policy wrote"]
    written = browser.execute_script("return [...document.querySelectorAll('.tokens .t')].map(t => t.textContent).join('')")
    written = written.replace("\u21b5", "")      # the mark of a line break
    assert written == "".join(training[talk]["texts"])

    for who, name in (("s", "the policy"), ("p", "the prompt"), ("e", "the environment")):
        token = find(f".tokens .t.{who}")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", token)
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")   # scrolling is over
        ActionChains(browser).move_to_element(token).perform()
        at = int(token.get_attribute("data-i"))
        tip = find("#tip")
        wait(browser, "return !document.getElementById('tip').hidden")
        assert f"token id {training[talk]['ids'][at]}" in tip.text and f"written by {name}" in tip.text
        assert ("log-prob" in tip.text) == (who == "s")
        if who == "s":
            assert f"log-prob {training[talk]['logp'][at]:.3f} nats" in tip.text
            assert "rgba" in token.get_attribute("style")

    find("#list").send_keys(Keys.ARROW_DOWN)
    assert find(f"#item-{talk + 1}").get_attribute("aria-selected") == "true"
    browser.execute_script("document.getElementById('rollouts').scrollIntoView()")
    find("#prev").click()
    assert find(f"#item-{talk}").get_attribute("aria-selected") == "true"
    assert browser.get_log("browser") == []


def test_hovering_over_a_curve_shows_its_values(browser, report):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    visit(browser, report)
    plot = browser.find_elements(By.CSS_SELECTOR, ".plot")[1]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(browser).move_to_element(plot).perform()
    wait(browser, "return document.querySelectorAll('.plot')[1].querySelector('.hoverlayer').textContent.includes('200 items')")


def test_dark_and_light(browser, report):
    ground = "return getComputedStyle(document.body).backgroundColor"
    visit(browser, report, theme="dark")
    dark = browser.execute_script(ground)
    browser.execute_script("document.getElementById('theme').click()")
    light = browser.execute_script(ground)
    visit(browser, report, theme="light")
    assert browser.execute_script(ground) == light != dark
    assert sum(map(int, dark[4:-1].split(","))) < 200 < 600 < sum(map(int, light[4:-1].split(",")))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 400, 768, 1280])
def test_nothing_sticks_out(browser, report, width, theme):
    visit(browser, report, width=width, theme=theme)
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    page, screen = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert page <= screen == width
    boxes = "[...document.querySelectorAll('.scroll, .card, .plot')]"
    hidden = browser.execute_script(f"return {boxes}.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.className)")
    assert hidden == []


def test_every_text_has_contrast(browser, report):
    """WCAG AA: 4.5 to 1 between the words and the ground, in both themes."""
    script = """
      const parse = c => c.match(/[\\d.]+/g).map(Number);
      const linear = v => v <= 10 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
      const lum = c => .2126 * linear(c[0]) + .7152 * linear(c[1]) + .0722 * linear(c[2]);
      const ground = e => {
        for (; e; e = e.parentElement) {
          const c = parse(getComputedStyle(e).backgroundColor);
          if (c.length < 4 || c[3] === 1) return c;
        }
        return [255, 255, 255];
      };
      const hasWords = e => e.checkVisibility() && !e.closest('svg') && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
      const contrast = e => {
        const a = lum(parse(getComputedStyle(e).color)), b = lum(ground(e));
        return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.tagName + '.' + e.className + ': ' + e.textContent.slice(0, 40)];
      };
      return [...document.querySelectorAll('main *, header *')].filter(hasWords).map(contrast).filter(([ratio]) => ratio < 4.5);
    """
    for theme in ("light", "dark"):
        visit(browser, report, theme=theme)
        assert browser.execute_script(script) == [], theme


def test_an_empty_run_has_a_page_too(browser, tmp_path):
    path = write_report(tmp_path)
    browser.get_log("browser")
    browser.get(f"file://{path}")
    wait(browser, "return document.documentElement.dataset.ready === 'yes'")
    assert browser.get_log("browser") == []
    assert "No rollout of this kind" in browser.execute_script("return document.getElementById('detail').textContent")
