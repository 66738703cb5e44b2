"""Run Chromium without a window, for the tests in a browser (Debian: chromium, chromium-driver)."""

from __future__ import annotations

import shutil

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
from selenium.common.exceptions import WebDriverException  # noqa: E402

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDS_CHROMIUM = pytest.mark.skipif(
    not (BROWSER and DRIVER),
    reason="no chromium with a chromedriver: apt-get install chromium chromium-driver",
)


@pytest.fixture(scope="module", name="browser")
def chromium():
    """Return one browser for all tests of a file, with its console; skip the tests if it does not start."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "window-size=1300,900",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    try:
        started = webdriver.Chrome(service=webdriver.ChromeService(DRIVER), options=options)
    except WebDriverException as problem:
        pytest.skip(f"Chromium does not start here: {problem.msg}")
    yield started
    started.quit()
