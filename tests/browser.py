"""A real browser for tests, where there is one."""

import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium():
    """Lend Chromium without a window; skip where it, or what drives it, is missing."""
    driving = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no chromium on this machine")
    with driving.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


def expect(what):
    """Return claims about an element that are tried again until they hold, or for some seconds."""
    from playwright.sync_api import expect as claim

    return claim(what)


class Watched:
    """A tab, and what it said, asked for and threw."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(**options)
        self.tab = self.context.new_page()
        self.said, self.asked, self.thrown = [], [], []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.on("pageerror", lambda error: self.thrown.append(str(error)))
        self.tab.on("dialog", lambda dialog: (self.thrown.append("dialog"), dialog.dismiss()))

    def check_quiet(self, path):
        """Nothing was said or thrown, and nothing but the file itself was asked for."""
        assert self.said == []
        assert self.thrown == []
        files = [url.partition("#")[0] for url in self.asked if not url.startswith("data:")]
        assert set(files) <= {path.as_uri()}
