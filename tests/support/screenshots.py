"""Pictures of the page for the documentation: ``make screenshots``.

The demo is served at production pace, so what they show is what a run of the command shows, times included.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.support.browser import Browser, browser
from tests.support.deployed import serving

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH = 1120
PACE, SEED = "h200_sxm", "1"
MODE = "lr_sd"


def shoot(page: Browser, name: str) -> None:
    """The whole page, as high as it is."""
    page.run("document.activeElement.blur()")
    page.resize(WIDTH, 100)
    page.resize(WIDTH, page.run("return document.documentElement.scrollHeight"))
    page.driver.save_screenshot(str(IMAGES / name))
    print(IMAGES / name)


def main() -> None:
    """Ask in light and in dark, then race."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "--pace", PACE) as served, browser(WIDTH) as page:
        page.resize(WIDTH, 1000)
        page.prefers(prefers_color_scheme="light", prefers_reduced_motion="reduce")
        page.open(served.address)
        page.choose("#mode", MODE)
        page.fill("#temperature", "0")
        page.fill("#seed", SEED)
        page.one("#ask").click()
        page.said("Answered in")
        shoot(page, "page.png")
        page.prefers(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
        shoot(page, "page-dark.png")
        page.prefers(prefers_color_scheme="light", prefers_reduced_motion="reduce")
        page.one("#race").click()
        page.said("The race is over")
        shoot(page, "race.png")


if __name__ == "__main__":
    main()
