"""Debian's Chromium without a display, and what a reader of a page sees and does there."""

import base64
import contextlib
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
HEIGHT = 900


class Browser:
    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self._driver: Any = webdriver.Chrome(options, Service(DRIVER))

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.quit()

    def open(self, url: str) -> None:
        self._driver.get(url)

    def look(self, width: int, scheme: str) -> None:
        """Set the window's width in pixels, and its color scheme: "light" or "dark"."""
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def text(self, selector: str) -> str:
        """The text of all elements that fit a CSS selector, in lines; "" if none fits, or one is being replaced."""
        with contextlib.suppress(StaleElementReferenceException):
            return "\n".join(found.text for found in self._all(selector))
        return ""

    def click(self, selector: str) -> None:
        self._all(selector)[0].click()

    def write(self, selector: str, text: str) -> None:
        field = self._all(selector)[0]
        field.clear()
        field.send_keys(text)

    def ask(self, script: str) -> Any:
        return self._driver.execute_script(script)

    def complaints(self) -> list[str]:
        """Warnings and errors of the console since the last call."""
        said = self._driver.get_log("browser")
        return [entry["message"] for entry in said if entry["level"] in ("WARNING", "SEVERE")]

    def picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        taken = self._driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(taken["data"]))

    def _all(self, selector: str) -> list[WebElement]:
        found: list[WebElement] = self._driver.find_elements(By.CSS_SELECTOR, selector)
        return found
