"""A headless browser, for tests of pages. Nothing is installed: without a browser, these tests are skipped.

`python tests/browser.py OUT/report.html docs/report.png` draws the top of a page, such as the one in the documentation.
"""

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)
OFFLINE = ("--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND")

MEASURE = """
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const inside = frame.contentDocument, root = inside.documentElement, style = frame.contentWindow.getComputedStyle;
  const wide = [...inside.querySelectorAll("body *")].filter(e => {
    const scrolls = e.closest(".scroll, pre, svg") && !e.matches(".scroll, pre, svg");
    return !scrolls && e.getBoundingClientRect().right > root.clientWidth + 1;
  });
  const found = {
    width: root.clientWidth,
    scroll: root.scrollWidth,
    wide: wide.slice(0, 5).map(e => e.tagName + "." + e.className),
    requests: frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name),
    background: style(inside.body).backgroundColor,
    text: inside.body.innerText.length,
    tables: inside.querySelectorAll("table").length,
    figures: inside.querySelectorAll("figure svg").length,
  };
  document.querySelector("#found").textContent = JSON.stringify(found);
};
frame.srcdoc = JSON.parse(document.querySelector("#page").textContent);
</script>
"""


def measure(page: Path, folder: Path, width: int, dark: bool = False) -> dict:
    """Open a page in a frame of this width. Returns its measurements, and `console`: what the browser complained about.

    A frame can be as narrow as a phone, and a headless window cannot."""
    assert PROGRAM is not None
    content = json.dumps(page.read_text(encoding="utf-8")).replace("<", "\\u003c")
    harness = folder / "harness.html"
    harness.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><iframe style="width:{width}px;height:800px;border:0"></iframe>'
        f'<pre id="found"></pre><script id="page" type="application/json">{content}</script>{MEASURE}',
        encoding="utf-8",
    )
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [PROGRAM, *FLAGS, *OFFLINE, scheme, profile, "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=5000", harness.as_uri()], capture_output=True, text=True, timeout=120
    )
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text is not None, done.stderr[-2000:]
    assert text[1], done.stderr[-2000:]
    return json.loads(html.unescape(text[1])) | {"console": re.findall(r".*CONSOLE.*", done.stderr)}


def screenshot(page: Path, image: Path, width: int = 1000, height: int = 1330, dark: bool = False) -> None:
    """Draw the top of a page as a PNG file."""
    assert PROGRAM is not None, "no Chromium or Chrome is installed"
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    with tempfile.TemporaryDirectory() as profile:
        where = [f"--user-data-dir={profile}", f"--window-size={width},{height}", f"--screenshot={image.resolve()}"]
        command = [PROGRAM, *FLAGS, *OFFLINE, scheme, *where, page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    screenshot(*map(Path, sys.argv[1:3]))
