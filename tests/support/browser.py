"""A headless Chromium, as Debian packages it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

Found = TypeVar("Found")
WAIT_S = 120.0
"""Bound of every wait; reached only by a bug."""
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


def missing() -> str:
    """Debian's packages that lack; empty where a browser is there."""
    packages = {"chromium": "chromium", "chromedriver": "chromium-driver"}
    return ", ".join(package for command, package in packages.items() if shutil.which(command) is None)


class Browser:
    """One window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """The page of a front end at ``host:port``, once it can be used."""
        self.driver.get(f"http://{address}/")
        self.wait(lambda: self.all("html[data-ready]"))

    def wait(self, found: Callable[[], Found]) -> Found:
        """What ``found`` returns once that is anything."""
        result: Found = WebDriverWait(self.driver, WAIT_S, poll_frequency=0.02).until(lambda _: found())
        return result

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        (found,) = self.all(selector)
        return found

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.all(selector)]

    def fill(self, selector: str, text: str) -> None:
        self.one(selector).clear()
        self.one(selector).send_keys(text)

    def choose(self, selector: str, value: str) -> None:
        Select(self.one(selector)).select_by_visible_text(value)

    def said(self, word: str) -> str:
        """The status, once it has that word in it."""
        return self.wait(lambda: self.text("#status") if word in self.text("#status") else "")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def prefers(self, **features: str) -> None:
        """Emulate the system's preferences, such as ``prefers_color_scheme="dark"``. Nothing moves: what fades in has no text."""
        features.setdefault("prefers_reduced_motion", "reduce")
        told = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": told})

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """The viewport, in CSS pixels; also narrower than a window can be."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def errors(self) -> list[str]:
        """What the console has said since the last call, of any level above information."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@contextmanager
def browser(width: int = 1280, height: int = 1000) -> Iterator[Browser]:
    """A window of that size. The driver is the one that is installed: nothing is downloaded."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for option in (*OPTIONS, f"--window-size={width},{height}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
