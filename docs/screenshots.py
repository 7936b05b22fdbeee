"""The documents' pictures of the viewer, taken of a finished quickstart.

python docs/screenshots.py runs/quickstart          needs Chromium with its driver, and selenium
"""

import asyncio
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.monitor.reader import RunReader
from headway.monitor.viewer.queries import Queries
from headway.monitor.viewer.server import Viewer

DOCS = Path(__file__).resolve().parent
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
WIDTH = 1100
Browser = Any


@contextmanager
def browser() -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def take(driver: Browser, page: str, name: str, height: int, scheme: str = "light", press: str = "") -> None:
    """One page at one height; `press` is the text of a button to press first."""
    from selenium.common.exceptions import NoSuchElementException
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    wait = WebDriverWait(driver, 60, ignored_exceptions=(NoSuchElementException,))
    metrics = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
    drawn = "return document.body.dataset.shown === '#' + arguments[0]"
    for place in ("config", page):  # away first: a change of scheme draws a page again
        driver.execute_script("location.hash = arguments[0]", place)
        wait.until(lambda _, place=place: driver.execute_script(drawn, place))
    if press:
        button = f"//button[normalize-space()='{press}']"
        driver.execute_script("arguments[0].click()", wait.until(lambda _: driver.find_element("xpath", button)))
        wait.until(lambda _: driver.find_elements("xpath", f"{button}[contains(@class, 'on')]"))
    if wanted := driver.find_elements("css selector", ".token.wanted"):
        driver.execute_script("scrollTo(0, 0)")
        ActionChains(driver).move_to_element_with_offset(wanted[0], 0, 0).perform()
        wait.until(lambda _: driver.find_elements("css selector", "#tip tr"))
    driver.save_screenshot(str(DOCS / f"{name}.png"))


def asked(run: RunReader, question: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = Queries([run.directory]).handlers["questions"]({"run": "0", "ask": question})["rows"]
    return rows


def address(row: dict[str, Any], *more: str) -> str:
    return "group?run=0&" + "&".join(f"{name}={row[name]}" for name in ("group", "trajectory", *more))


def a_swap(run: RunReader) -> str:
    """The address of a token: the first of new weights, in the middle of a completion, and the least certain such."""
    found = []
    for row in asked(run, "swaps"):
        sampled = run.group(row["group"]).trajectories[row["trajectory"]].length
        columns = run.token_columns(row["group"], row["trajectory"])
        place = sum(columns["sampled"][: row["token"]])
        if 35 <= sampled <= 80 and 1 / 4 <= place / sampled <= 3 / 4 and columns["advantage"][row["token"]]:
            found.append((columns["behaviour"][row["token"]], address(row, "token")))
    if not found:
        raise SystemExit(f"{run.directory} has no completion with a swap in its middle")
    return min(found)[1]


def main(directory: Path) -> None:
    loop, viewer = asyncio.new_event_loop(), Viewer(Queries([directory]).handlers)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(viewer.open(), loop).result(60)
    with browser() as driver:
        driver.get(viewer.url)
        run = RunReader(directory)
        take(driver, "run", "viewer-run", 660)
        take(driver, "timeline", "viewer-timeline", 340)
        take(driver, "questions?run=0&ask=wrong_to_right", "viewer-questions", 400)
        take(driver, a_swap(run), "viewer", 560)
        take(driver, address(asked(run, "down_weighted")[0]), "viewer-weights", 430, "dark", press="importance weight")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
