"""A real browser for tests, if one is installed."""

import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium():
    """Yield headless Chromium; skip the test if it or playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no chromium on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


def expect(what):
    """Return playwright's retrying assertions for an element."""
    from playwright.sync_api import expect as claim

    return claim(what)


class Watched:
    """A tab with its console messages, requests and errors."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(**options)
        self.tab = self.context.new_page()
        self.said, self.asked, self.thrown = [], [], []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.on("pageerror", lambda error: self.thrown.append(str(error)))
        self.tab.on("dialog", lambda dialog: (self.thrown.append("dialog"), dialog.dismiss()))

    def check_quiet(self, path):
        """Check that there are no messages or errors and no requests except the file itself."""
        assert self.said == []
        assert self.thrown == []
        files = [url.partition("#")[0] for url in self.asked if not url.startswith("data:")]
        assert set(files) <= {path.as_uri()}
