"""A headless Chromium, spoken to over its debugging pipe: no driver and no package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0


def browser_program() -> str | None:
    """Return a Chromium or Chrome of this machine, the one that MAULSTICK_BROWSER names first."""
    named = os.environ.get("MAULSTICK_BROWSER")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class HeadlessBrowser:
    """One page in a browser of its own. ``troubles`` collects console errors and uncaught exceptions, ``requests`` the
    addresses that the page asked for."""

    def __init__(self, program: str, profile: Path) -> None:
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._buffer = b""
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self._process = subprocess.Popen(
            [
                program,
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
                *("--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
            ],
            preexec_fn=lambda: _as_three_and_four(to_browser, from_browser),
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        (target,) = [each for each in self._call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", session=True)

    def open(
        self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False
    ) -> None:
        """Show a file and wait until it is loaded and drawn."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            session=True,
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", session=True, features=[scheme])
        self._call("Page.navigate", session=True, url=page.resolve().as_uri())
        self._until(
            lambda: self.run("document.readyState") == "complete" and self.run("location.href") != "about:blank"
        )
        self.settle()

    def run(self, code: str) -> Any:
        """Evaluate JavaScript in the page and return its value."""
        answer = self._call("Runtime.evaluate", session=True, expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{code}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def mouse(self, kind: str, x: float, y: float, *, buttons: int = 0, clicks: int = 0) -> None:
        """Move, press or release ("mouseMoved", "mousePressed", "mouseReleased") at a point of the window."""
        button = "left" if kind != "mouseMoved" or buttons else "none"
        self._call(
            "Input.dispatchMouseEvent",
            session=True,
            type=kind,
            x=x,
            y=y,
            button=button,
            buttons=buttons,
            clickCount=clicks,
        )

    def key(self, key: str) -> None:
        """Press a key in what has the focus."""
        text = {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", session=True, type="keyDown", key=key, **text)
        self._call("Input.dispatchKeyEvent", session=True, type="keyUp", key=key)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write what is to be seen as PNG; ``whole``: of the page from top to bottom."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self._call("Page.getLayoutMetrics", session=True)["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", session=True, **options)["data"]))

    def close(self) -> None:
        """End the browser."""
        try:
            self._send("Browser.close", {}, session=False)
            self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    # --- the pipe ----------------------------------------------------------------------------------------------------

    def _send(self, method: str, parameters: dict[str, Any], *, session: bool) -> int:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._number

    def _call(self, method: str, session: bool = False, **parameters: Any) -> dict[str, Any]:
        number = self._send(method, parameters, session=session)
        while True:
            message = self._receive()
            if message.get("id") == number:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message.get("method", ""), message.get("params", {}))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], PATIENCE)
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise AssertionError("the browser does not answer")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.troubles.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled":
            self.troubles.append(f"{parameters['type']}: {json.dumps(parameters['args'])[:500]}")
        elif method == "Log.entryAdded":
            self.troubles.append(json.dumps(parameters["entry"])[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"][:200])

    def _until(self, condition: Any) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end:
                raise AssertionError("the page did not load")
            time.sleep(0.02)


def _as_three_and_four(to_browser: int, from_browser: int) -> None:
    """Put the pipe where Chromium looks for it; by way of high numbers, since either may be 3 or 4 already."""
    high = [os.dup2(to_browser, 90), os.dup2(from_browser, 91)]
    for number, source in zip((3, 4), high, strict=True):
        os.dup2(source, number)
        os.close(source)
