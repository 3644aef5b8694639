"""A page in a headless browser that is used as people use it: opened, clicked, typed into, and looked at.

The browser is asked over a pipe, by the protocol of its developer tools. Nothing is installed for it.

`python tests/devtools.py URL docs/serve.png MESSAGE...` draws the page of a server after some messages.
"""

import base64
import fcntl
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from browser import FLAGS, PROGRAM

LOCAL = ("--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
SECONDS = 60.0
"""How long is waited for anything."""
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}

PLACE = """selector => {
  const found = [...document.querySelectorAll(selector)].find(element => element.checkVisibility());
  if (!found) return null;
  found.scrollIntoView({block: "center"});
  const box = found.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}"""
"""A function that returns the middle of an element, in the window."""


class Page:
    """A page. `problems` is what the browser complained about, `requests` are the addresses it has asked for."""

    def __init__(self, program: subprocess.Popen, out: int, into: int) -> None:
        self.program, self.out, self.into = program, out, into
        self.number, self.rest, self.session = 0, b"", None
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    # --- The protocol ---------------------------------------------------------------------------------------

    def ask(self, method: str, **params: Any) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {} if self.session is None else {"sessionId": self.session}
        os.write(self.into, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            answer = self.next(until)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.note(answer.get("method"), answer.get("params", {}))

    def next(self, until: float) -> dict:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.out], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self.out, 1 << 16)
            assert part, "the browser has ended"
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def note(self, method: str | None, params: dict) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    # --- What people do -------------------------------------------------------------------------------------

    def show(self, width: int, height: int, dark: bool = False, scale: float = 1) -> None:
        """Set the size of the window and the scheme of colors."""
        mobile = width < 600
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def open(self, address: str) -> None:
        went = self.ask("Page.navigate", url=address)
        assert "errorText" not in went, went["errorText"]
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> Any:
        """Wait until an expression is true, and return its value."""
        until = time.monotonic() + SECONDS
        while (found := self.run(script)) in (None, False, 0, ""):
            assert time.monotonic() < until, f"it did not become true: {script}"
            time.sleep(0.05)
        return found

    def click(self, selector: str) -> None:
        """Click the middle of the first element that is visible."""
        place = self.wait(f"({PLACE})({json.dumps(selector)})")
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.ask("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code, text = KEYS[key]
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **about)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **about)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def opened() -> Iterator[Page]:
    """Start a browser with one page."""
    assert PROGRAM is not None
    (reads, into), (out, writes) = os.pipe(), os.pipe()
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (reads, writes)]

    def connect() -> None:  # in the child: the browser reads from 3 and writes to 4
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [PROGRAM, *FLAGS, *LOCAL, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        program = subprocess.Popen(command, close_fds=False, preexec_fn=connect, stderr=subprocess.DEVNULL)
        for end in (reads, writes, *ends):
            os.close(end)
        try:
            yield Page(program, out, into)
        finally:
            for end in (into, out):
                os.close(end)
            try:
                program.wait(10)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()


def draw(address: str, image: Path, *messages: str) -> None:
    """Draw the page of a server after these messages, such as the one in the documentation."""
    with opened() as page:
        page.show(1180, 760)
        page.open(address)
        page.wait("document.querySelector('.welcome')")
        for name, value in (("max_output_tokens", 48), ("temperature", 0.7), ("seed", 3)):
            page.run(f"document.querySelector('[name={name}]').value = {value}")
        for number, message in enumerate(messages, 1):
            page.click("#message")
            page.type(message)
            page.press("Enter")
            page.wait(f"document.querySelectorAll('.turn > .actions > button').length === {number}")
        page.run("document.activeElement.blur()")
        page.picture(image)


if __name__ == "__main__":
    draw(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
