"""The page of `hsd serve`. A server of this file answers it, with the routes and the fields that the page uses."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
from support import chat

import hsd_jax
from hsd_jax.config import TreeConfig

PAGE = Path(__file__).resolve().parents[2] / "hsd_jax/serve/page.html"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
KEY = "a key"
PASSES = [["Um", 1], [" texto", 2], [" <b>é", 3], ["", 1], ["😀</b>\n", 2], ["fim & " * 40, 9]]
LAST = "."
"""Text that comes without a token."""
TEXT = "".join(text for text, _ in PASSES) + LAST


def test_the_page_loads_nothing_and_reads_no_text_as_html():
    page = PAGE.read_text(encoding="utf-8")
    assert (
        re.findall(r"https?:|//\w|@import|url\(|\ssrc=|innerHTML|insertAdjacentHTML|document\.write|eval\(", page) == []
    )
    assert "default-src 'none'" in page and re.findall(r"href=(?!\"data:,\")", page) == []


def test_every_id_that_the_script_asks_for_is_there():
    page = PAGE.read_text(encoding="utf-8")
    asked, ids = set(re.findall(r"\bat\(\"(\w+)\"\)", page)), re.findall(r"\bid=\"(\w+)\"", page)
    assert asked == set(ids) and len(ids) == len(set(ids)) > 10


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers PASSES to any message but a few, and keeps the requests."""

    requests: list[dict]
    lost: list[str]
    """Messages whose answers were being sent when the client went away."""

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, message: str) -> None:
        self.reply(status, json.dumps({"error": {"message": message, "type": "invalid_request_error"}}).encode())

    def is_known(self) -> bool:
        if self.headers["Authorization"] == f"Bearer {KEY}":
            return True
        self.refuse(401, "give an API key")
        return False

    def do_GET(self) -> None:
        if self.path == "/":
            self.reply(200, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif self.path == "/v1/models" and self.is_known():
            self.reply(200, b'{"object": "list", "data": [{"id": "tiny", "object": "model"}]}')
        elif self.path != "/v1/models":
            self.refuse(404, "no such route")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_known():
            return
        self.requests.append(request)
        message = request["messages"][-1]["content"]
        if message == "refuse":
            self.refuse(400, "speculate: false is refused")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for event in self.events(message):
                data = json.dumps(event, ensure_ascii=False).encode()
                half = len(data) // 2  # an event may come in two pieces, which may split a character
                self.wfile.write(b"data: " + data[:half])
                self.wfile.flush()
                time.sleep(0.01)
                self.wfile.write(data[half:] + b"\r\n\r\n")
                self.wfile.flush()
                time.sleep(0.05)
            if message != "cut":
                self.wfile.write(b"data: [DONE]\n\n")
            return
        self.lost.append(message)

    def events(self, message: str):
        def chunk(content: str, passes: list, reason: str | None = None, **more) -> dict:
            choice = {"index": 0, "delta": {"content": content}, "passes": passes, "finish_reason": reason}
            return {"choices": [choice], "usage": None, **more}

        for text, num in PASSES * (100 if message == "long" else 1):
            yield chunk(text, [[text, num]])
            if message in ("break", "cut") and num == 2:
                break
        if message == "break":
            yield {"error": {"message": "the device failed", "type": "server_error"}}
        elif message != "cut":
            yield chunk(LAST, [[LAST, 0]], "stop")
            yield {"choices": [], "usage": {"completion_tokens": 18}}


@pytest.fixture
def server():
    """Address, requests and lost answers of a running server."""
    handler = type("Own", (Handler,), {"requests": [], "lost": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/", handler.requests, handler.lost
        running.shutdown()


@pytest.fixture
def browser():
    """A headless Chromium."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright, for the test of the page")
    if BROWSER is None:
        pytest.skip("no Chromium: apt-get install chromium, for the test of the page")
    with api.sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield one
        one.close()


def opened(browser, address: str, **how):
    """A page whose errors fail the test, with its key."""
    page = browser.new_context(**how).new_page()
    page.set_default_timeout(30_000)
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.goto(address)
    page.locator(".error").wait_for()  # without a key
    page.fill("#key", KEY)  # the field is in sight: the settings have opened
    page.click("#fresh")
    return page


def tell(page, message: str) -> None:
    page.fill("#message", message)
    page.keyboard.press("Enter")


def wait(page) -> None:
    """Until the answer has ended."""
    page.locator("#send", has_text="Send").wait_for()


@pytest.mark.slow
def test_a_conversation(browser, server, tmp_path):
    address, requests, _ = server
    page = opened(browser, address, viewport={"width": 1000, "height": 700})
    tell(page, "olá")
    wait(page)
    assert page.title() == page.inner_text("#model") == "tiny"
    shown = page.locator("#log .pass").evaluate_all("all => all.map(one => [one.textContent, one.title])")
    expected = [[text, f"pass {i}, tokens: {num}"] for i, (text, num) in enumerate(PASSES, 1)]
    assert shown == [*expected, [LAST, "pass 6, tokens: 0"]]
    tints = page.locator("#log .pass").evaluate_all("all => all.map(one => one.style.background)")
    assert len(set(tints)) == 5 and tints[0] == tints[3] and tints[1] == tints[4]
    line = page.inner_text("#log .figures")
    assert all(part in line for part in ("18 tokens", "6 passes", "tau 3.00"))
    assert page.inner_text("#tau") == "3.00" and float(page.inner_text("#speed")) > 20
    assert "plain" not in line and "not finished" not in line
    page.uncheck("#speculate")
    page.click("summary")
    page.fill("#system", "Seja breve.")
    page.fill("#temperature", "0.5")
    tell(page, "e agora?")
    wait(page)
    assert "plain" in page.inner_text("#log .figures >> nth=1")
    first, second = requests
    assert first["messages"] == [{"role": "user", "content": "olá"}] and "speculate" not in first
    assert first["return_passes"] is first["stream"] is True and first["temperature"] == 0
    turns = [("system", "Seja breve."), ("user", "olá"), ("assistant", TEXT), ("user", "e agora?")]
    assert [(turn["role"], turn["content"]) for turn in second["messages"]] == turns
    assert second["speculate"] is False and second["temperature"] == 0.5 and second["model"] == "tiny"
    page.click("#fresh")
    tell(page, "outra")
    wait(page)
    assert len(requests[2]["messages"]) == 2 and page.locator("#log .turn").count() == 2
    page.screenshot(path=tmp_path / "page.png")
    assert page.errors == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["button", "Escape"])
def test_an_answer_is_stopped(browser, server, how):
    """The server sees it, and the conversation goes on with what was said."""
    address, requests, lost = server
    page = opened(browser, address)
    tell(page, "long")
    page.locator("#log .pass >> nth=8").wait_for(state="attached")
    page.click("#send") if how == "button" else page.keyboard.press(how)
    wait(page)
    assert "not finished" in page.inner_text("#log .figures") and page.locator("#log .error").count() == 0
    end = time.monotonic() + 20
    while not lost and time.monotonic() < end:
        time.sleep(0.05)
    assert lost == ["long"]
    said = "".join(page.locator("#log .pass").all_text_contents())
    tell(page, "mais")
    wait(page)
    assert [turn["content"] for turn in requests[1]["messages"]] == ["long", said, "mais"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message", "error", "kept"),
    [
        ("refuse", "speculate: false is refused", None),
        ("break", "the device failed", "Um texto"),
        ("cut", "the connection was lost", "Um texto"),
    ],
)
def test_an_error_is_shown(browser, server, message, error, kept):
    """A message without an answer stands in the field again."""
    address, requests, _ = server
    page = opened(browser, address)
    tell(page, message)
    wait(page)
    assert page.inner_text("#log .error") == error
    assert page.input_value("#message") == (message if kept is None else "")
    tell(page, "mais")
    wait(page)
    said = [] if kept is None else [message, kept]
    assert [turn["content"] for turn in requests[1]["messages"]] == [*said, "mais"] and page.errors == []


@pytest.fixture
def real(tmp_path):
    """Address and models of the real server, with a model of random weights."""
    app = pytest.importorskip("hsd_jax.serve.app", reason="pip install 'hsd_jax[serve]'")
    import uvicorn

    from hsd_jax.serve.engine import Engine

    params = hsd_jax.load(chat.write_target(tmp_path / "target", chat.CHATML), drafter="lookup")
    engine = Engine(params, 2, tree=TreeConfig.chain(3))
    engine.start()
    assert engine.wait_ready(300), engine.error
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app.make_app(engine, "tiny", KEY), lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/", params, engine
        server.should_exit = True
        thread.join(30)
    engine.close()


@pytest.mark.slow
def test_with_the_server(browser, real):
    """The text of `decode`, with drafts and without, and a slot that is free again after a stop."""
    address, params, engine = real
    page = opened(browser, address)
    page.click("summary") if page.locator("#most").is_hidden() else None
    page.fill("#most", "40")
    wanted = hsd_jax.decode(params, [{"role": "user", "content": "the dog"}], 40, speculate=False).text[0]
    for is_drafted in (True, False):
        page.set_checked("#speculate", is_drafted)
        page.click("#fresh")
        tell(page, "the dog")
        wait(page)
        assert "".join(page.locator("#log .pass").all_text_contents()) == wanted
        line = page.locator("#log .figures span").all_text_contents()
        assert line[0] == "40 tokens" and ("40 passes" in line) is ("plain" in line) is (not is_drafted)
    page.click("summary")
    page.fill("#most", "400")
    page.click("#fresh")
    tell(page, "the dog")
    page.locator("#log .pass >> nth=3").wait_for(state="attached")
    page.click("#send")
    wait(page)
    end = time.monotonic() + 20
    while engine.num_running and time.monotonic() < end:
        time.sleep(0.05)
    assert engine.num_running == 0 and page.errors == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1400])
def test_narrow_wide_light_dark(browser, server, tmp_path, width, scheme):
    """Nothing is wider than the window, the field stays in sight, and text has contrast."""
    page = opened(browser, server[0], viewport={"width": width, "height": 640}, color_scheme=scheme)
    for _ in range(3):
        tell(page, "uma mensagem " * 12 + "x" * 200)
        wait(page)
    page.screenshot(path=tmp_path / f"{width}-{scheme}.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.getElementById('log').scrollWidth <= document.getElementById('log').clientWidth")
    box = page.locator("#form").bounding_box()
    assert box["y"] + box["height"] <= 640 and page.locator("#log").bounding_box()["height"] > 200
    for place in ("#log .pass >> nth=5", "#log .figures >> nth=0", "#send", ".user >> nth=0"):
        assert page.locator(place).evaluate(CONTRAST) >= 4.5, place


CONTRAST = """one => {
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], under) => [r, g, b].map((x, i) => a * x + (1 - a) * under[i]);
  let ground = [255, 255, 255];
  const outer = [];
  for (let x = one; x; x = x.parentElement) outer.unshift(getComputedStyle(x).backgroundColor);
  for (const colour of outer) ground = over(numbers(colour), ground);
  const light = rgb => rgb.map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const [a, b] = [light(numbers(getComputedStyle(one).color)), light(ground)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""
