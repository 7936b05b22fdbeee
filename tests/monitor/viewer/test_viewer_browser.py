"""The viewer in a real browser: what a person sees of a live run, of a finished one, and of text that means harm.

Debian's Chromium with its packaged driver; `make test-slow` installs them where it may.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import RecordedRun, write_tokenizer
from system import HeadwayProcess, write_config

from headway.record.events import Warned
from headway.record.run import Run
from headway.record.shards import RECORD_NAME, Record
from headway.types import Trajectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="there is no Chromium with its driver: apt-get install chromium chromium-driver",
    ),
]

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1400,900"),
)
_OVERFLOW = "return document.documentElement.scrollWidth - innerWidth"
Browser = Any


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    errors = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    driver.quit()
    assert not errors


@contextmanager
def viewer(*runs: Path) -> Iterator[str]:
    """`headway view` on these runs; its link."""
    command = [sys.executable, "-u", "-m", "headway.cli", "view", *map(str, runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = ""
        while not (link := re.search(r"http://\S+", text + " ")) or "browser" not in text:
            text += process.stdout.readline()
            assert process.poll() is None, text
        yield link.group()
        process.terminate()


def wait(browser: Browser, what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What `what` finds, once it finds something; elements that a page replaces meanwhile are looked for again."""
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    ignored = (StaleElementReferenceException, NoSuchElementException)
    return WebDriverWait(browser, seconds, 0.1, ignored).until(lambda _: what())


def find(browser: Browser, selector: str) -> Browser:
    from selenium.webdriver.common.by import By

    return wait(browser, lambda: browser.find_element(By.CSS_SELECTOR, selector))


def find_all(browser: Browser, selector: str) -> list[Browser]:
    from selenium.webdriver.common.by import By

    return browser.find_elements(By.CSS_SELECTOR, selector)


def go(browser: Browser, page: str) -> None:
    """Open a page, and wait until it is drawn."""
    browser.execute_script("location.hash = arguments[0]", page)
    wait(browser, lambda: browser.execute_script("return document.body.dataset.shown === '#' + arguments[0]", page))


def tip_over(browser: Browser, token: int) -> dict[str, str]:
    """What hovering over a token shows."""
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).move_to_element(find(browser, f".token[data-index='{token}']")).perform()
    rows = wait(browser, lambda: find_all(browser, "#tip tr"))
    cells = [[cell.text for cell in row.find_elements("css selector", "td")] for row in rows]
    return dict(cells)


def status(browser: Browser) -> str:
    return find(browser, "#status").text


def test_a_live_run_is_followed_to_its_end_and_a_token_shows_what_the_record_holds(
    browser: Browser, tmp_path: Path, tiny_model: str
) -> None:
    config = write_config(tmp_path, tiny_model, run={"runtime": "inline", "steps": 40, "dir": str(tmp_path / "run")})
    directory = tmp_path / "run"
    with HeadwayProcess("train", config, run=directory) as run:
        run.wait_until(lambda events: any(event.kind == "trained" for event in events), "a training step")
        with viewer(directory) as link:
            browser.get(link)
            assert "token=" not in browser.current_url
            wait(browser, lambda: status(browser) == "live")
            steps = wait(browser, lambda: re.search(r"(\d+) of 40", find(browser, ".cards").text))
            wait(browser, lambda: f"{steps.group(1)} of 40" not in find(browser, ".cards").text)
            assert len(find_all(browser, "figure.chart canvas")) >= 10
            assert run.wait() == 0, run.output
            wait(browser, lambda: status(browser) == "finished")
            check_a_token(browser, directory)


def check_a_token(browser: Browser, directory: Path) -> None:
    """Filter to the last step, open a row, hover over the first and the last token of the completion."""
    step = Run.read(directory).num_trained
    go(browser, "groups")
    field = find(browser, "input[name='step_min']")
    field.send_keys(f"{step}\n")
    wait(browser, lambda: find(browser, "input[name='step_min']").get_attribute("value") == str(step))
    wait(browser, lambda: {row.text for row in find_all(browser, "tbody tr td:first-child")} == {str(step)})
    find(browser, "tbody tr").click()
    find(browser, ".tokens")
    address = dict(part.split("=") for part in browser.current_url.partition("?")[2].split("&"))
    group, trajectory = int(address["group"]), int(address["trajectory"])
    state, record = Run.read(directory), Record(directory / RECORD_NAME)
    (one,) = (each for each in record.load(state.ref(group)).trajectories if each.index == trajectory)
    place = state.steps[step - 1].event.tokens_at
    assert place is not None
    tokens = record.load_tokens(place)
    where = tokens.place(group, trajectory, 0)
    assert where is not None
    check_tips(browser, one, {"proximal log-prob": tokens.proximal[where], "current log-prob": tokens.proximal[where],
               "importance weight": tokens.weights[where], "advantage": tokens.advantages[where]})  # fmt: skip


def check_tips(browser: Browser, one: Trajectory, figures: dict[str, np.ndarray]) -> None:
    (sequence,) = one.sequences
    trained = np.flatnonzero(sequence.loss_mask)
    for number in (0, len(trained) - 1):
        token = int(trained[number])
        shown = tip_over(browser, token)
        assert int(shown["version"]) == sequence.versions[token]
        assert float(shown["behaviour log-prob"]) == pytest.approx(sequence.logprobs[token], abs=1e-6)
        for name, values in figures.items():
            assert float(shown[name]) == pytest.approx(values[number], abs=1e-6), name


@pytest.fixture
def finished(tmp_path: Path) -> RecordedRun:
    run = RecordedRun(tmp_path / "run")
    write_tokenizer(tmp_path / "run" / "model")
    run.evaluate([False, True])
    for _ in range(5):
        run.step()
    run.evaluate([True, True])
    return run


def test_the_prompt_that_turned_right_and_the_token_of_a_swap_are_three_clicks_away(
    browser: Browser, finished: RecordedRun
) -> None:
    finished.end()
    with viewer(finished.directory) as link:
        browser.get(link)
        find_link(browser, "Questions").click()
        find_button(browser, "Which prompts went from wrong to right?").click()
        row = wait(browser, lambda: [each for each in find_all(browser, "tbody tr") if "it is" in each.text][0:1])[0]
        row.click()
        wait(browser, lambda: "Held-out problem 0" in find(browser, "h1").text)
        assert "answer" in find(browser, ".question").text
        find_link(browser, "Questions").click()
        find_button(browser, "Where did weights swap?").click()
        wait(browser, lambda: "→" in find(browser, "tbody tr").text)
        find(browser, "tbody tr").click()
        wanted = find(browser, ".token.wanted")
        (swap,) = find_all(browser, ".swap")
        version = tip_over(browser, int(wanted.get_attribute("data-index")))["version"]
        assert swap.text == f"v{version}"


def test_several_runs_are_overlaid_and_the_chosen_one_stays_chosen_on_every_page(
    browser: Browser, finished: RecordedRun, tmp_path: Path
) -> None:
    other = RecordedRun(tmp_path / "other")
    for run in (finished, other):
        run.step()
        run.add(Warned(message=f"something about {run.directory.name}"))
        run.end()
    with viewer(finished.directory, other.directory) as link:
        browser.get(link)
        wait(browser, lambda: find_all(browser, "figure.chart canvas"))
        assert [row.text.split()[0] for row in find_all(browser, ".overview tbody tr")] == ["run", "other"]
        reward = find(browser, "figure.chart:nth-child(2)")
        assert len(reward.find_elements("css selector", ".u-legend .u-series")) == 3, "the step, and a line a run"
        find_all(browser, "#runs input")[0].click()
        wait(browser, lambda: not find_all(browser, ".overview") and find(browser, ".cards"))
        find_link(browser, "what it wrote first, and what now").click()
        for page in ("Timeline", "Groups", "Questions"):
            find_link(browser, page).click()
            chosen = wait(
                browser, lambda page=page: find(browser, "nav .here").text == page and find(browser, "#runs select")
            )
            assert chosen.get_attribute("value") == "1", page
        find(browser, "#runs option[value='0']").click()
        wait(browser, lambda: "run=0" in browser.current_url)
        find_link(browser, "Config").click()
        wait(browser, lambda: "model.path" in find(browser, "table.diff").text)


def find_link(browser: Browser, text: str) -> Browser:
    return wait(browser, lambda: browser.find_element("link text", text))


def find_button(browser: Browser, text: str) -> Browser:
    return wait(browser, lambda: [one for one in find_all(browser, "button") if one.text == text][0:1])[0]


def test_text_that_means_harm_is_shown_as_text_on_every_page(browser: Browser, tmp_path: Path) -> None:
    harm = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>\x1b[2J\u202e"
    name = "<img src=x onerror=document.title='owned'>\x1b[31m\u202e"
    run = RecordedRun(tmp_path / name)
    write_tokenizer(tmp_path / name / "model")
    run.evaluate([False, True])
    run.train([run.finish_group([harm, "a" * 1_000_000], failure=f"error in {harm}", asked=f"{harm} what is 0?")])
    run.evaluate([True, True])
    run.finish_group([harm], failure=harm * 50_000)
    run.end()
    with viewer(tmp_path / name) as link:
        browser.get(link)
        wait(browser, lambda: find_all(browser, "figure.chart canvas"))
        questions = ("then_and_now", "wrong_to_right", "swaps", "longest", "down_weighted", "why_dropped")
        pages = ["run", "timeline", "groups", "groups?search=onerror", "group?group=0&trajectory=0"]
        pages += ["group?group=0&trajectory=1", "group?group=1", "config"]
        pages += [f"questions?ask={one}" for one in questions]
        for page in pages:
            go(browser, page)
            assert browser.title == "Headway", page
            assert not find_all(browser, "#page script, #page img, header img, .problem"), page
            assert not {"\u202e", "\x1b"} & set(browser.execute_script("return document.body.textContent")), page
        go(browser, "group?group=0&trajectory=0")
        text = find(browser, ".tokens").text
        assert "<script>" in find(browser, ".question").text, "the prompt"
        assert "<script>" in text and "⟨U+202E⟩" in text and "⟨U+001B⟩" in text


def test_the_page_fits_a_small_window_and_follows_the_dark_scheme(browser: Browser, finished: RecordedRun) -> None:
    finished.end()
    with viewer(finished.directory) as link:
        browser.get(link)
        wait(browser, lambda: find_all(browser, "figure.chart canvas"))
        grounds = set()
        for scheme in ("light", "dark"):
            features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
            grounds.add(find(browser, "body").value_of_css_property("background-color"))
        assert len(grounds) == 2
        for width in (1400, 500):
            browser.set_window_size(width, 900)
            for page in ("run", "timeline", "groups", "group?group=3", "questions", "config"):
                go(browser, page)
                assert wait(browser, lambda: browser.execute_script(_OVERFLOW) <= 0), (page, width)
