"""The dashboard in a real Chromium, with engines that replay behind it: its figures are those of /metrics, and it can be read anywhere.

It needs Debian's package `chromium`, and skips without.
"""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from prometheus_client.parser import text_string_to_metric_families

from draftd.server.security.tokens import hash_of, new_token
from tests.server.harness import DRAFTD, Process, RunningService, clean_environment, short_directory, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed (Debian: apt-get install chromium)")

SAMPLE = Path(__file__).parents[2] / "samples" / "gsm8k.jsonl.gz"
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
PATIENCE_MS = 20_000
NONE = "\N{EN DASH}"

CONTRAST = """() => {
  const parse = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest(".hidden, title, noscript")) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(parse(node instanceof SVGElement ? style.fill : style.color)), light(behind(node))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) poor.push(`${node.outerHTML.slice(0, 90)} ${contrast.toFixed(2)}`);
  }
  return poor;
}"""
OVERFLOW = """() => {
  const wide = [...document.querySelectorAll("body *")].filter((node) => {
    if (!node.checkVisibility() || node.closest("pre, .hidden, noscript")) return false;
    const box = node.getBoundingClientRect();
    return box.width && (box.right > innerWidth + 0.5 || box.left < -0.5);
  });
  return [document.documentElement.scrollWidth > innerWidth, ...wide.map((node) => node.outerHTML.slice(0, 80))].filter(Boolean);
}"""
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield launched
        launched.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce") as opened:
        opened.set_default_timeout(PATIENCE_MS)
        yield opened


class Server:
    """`draftd serve` on ports that stay the same when it is started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        (self.directory / "log").unlink(missing_ok=True)
        shm = f"/dev/shm/{self.directory.name}"
        flags = ("--http", f"127.0.0.1:{self.port}", "--shm-root", shm, "--data-dir", str(self.directory / "store"))
        self.process = Process(self.directory, *flags).wait_ready()

    def replay(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [*DRAFTD, "replay", str(SAMPLE), "--endpoint", self.process.target, "--concurrency", "8", *arguments]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=clean_environment())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with short_directory() as directory:
        started = Server(directory)
        yield started
        started.process.stop()
        shutil.rmtree(f"/dev/shm/{directory.name}", ignore_errors=True)


def opened(context: BrowserContext, url: str) -> tuple[Page, list[str]]:
    """A page, and what went wrong in it."""
    page, faults = context.new_page(), []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else faults.append(request.url))
    page.goto(url)
    return page, faults


def metrics(page: Page, url: str) -> dict[str, float]:
    """The sums over all labels of what /metrics exposes, by sample name."""
    sums: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(page.request.get(f"{url}/metrics").text()):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return sums


def number(page: Page, selector: str) -> float:
    """The number that an element shows."""
    return float(re.sub(r"[^\d.]", "", page.locator(selector).inner_text()) or "nan")


def test_figures_are_those_of_metrics_while_engines_replay_and_after(server: Server, context: BrowserContext) -> None:
    page, faults = opened(context, server.url)
    expect(page.locator("#engines")).to_contain_text("No engine is attached yet")
    expect(page.locator("#corpus")).to_contain_text("The corpus is empty")
    assert page.locator("#figure-length b").inner_text() == NONE
    replay = server.replay("--engines", "2", "--step-ms", "30", "--limit-sessions", "120")
    try:
        expect(page.locator("#engines tbody tr")).to_have_count(2, timeout=60_000)
        expect(page.locator("#figure-length b")).not_to_have_text(NONE)
        expect(page.locator('section[aria-label="Acceptance length"] path.line')).to_have_count(2)
        page.get_by_label("Namespace", exact=True).check()
        expect(page.locator('section[aria-label="Acceptance length"] .legend')).to_contain_text("replay")
        page.get_by_label("Source", exact=True).check()
        expect(page.locator('section[aria-label="Acceptance length"] .legend')).to_contain_text("corpus")
        expect(page.locator("#engines tbody")).to_contain_text("mapped")
    finally:
        assert replay.wait(120) == 0
    expect(page.locator("#events")).to_contain_text("detached")
    expect(page.locator("#events")).to_contain_text("attached over mapped")
    wanted = {
        "proposals": "draftd_proposals_total",
        "rows": "draftd_proposed_rows_total",
        "drafts": "draftd_acceptance_length_count",
        "draft_tokens": "draftd_num_draft_tokens_total",
        "accepted_tokens": "draftd_num_accepted_tokens_total",
        "committed_tokens": "draftd_engine_committed_tokens_total",
        "fail_opens": "draftd_fail_opens_total",
    }
    said = metrics(page, server.url)
    assert said["draftd_num_accepted_tokens_total"] > 1000
    for name, metric in wanted.items():
        wait_until(lambda name=name, metric=metric: number(page, f"#total-{name}") == said[metric])
    # All of it lies within the longest time shown.
    page.get_by_label("15 min", exact=True).check()
    length = said["draftd_acceptance_length_sum"] / said["draftd_acceptance_length_count"]
    expect(page.locator("#figure-length b")).to_have_text(f"{length:.2f}")
    share = said["draftd_num_accepted_tokens_total"] / said["draftd_num_draft_tokens_total"]
    expect(page.locator("#figure-rate b")).to_have_text(f"{100 * share:.0f}%")
    assert number(page, '#corpus tbody td[data-key="tokens"]') == said["draftd_corpus_tokens"]
    assert number(page, '#corpus tbody td[data-key="documents"]') == said["draftd_corpus_documents"]
    assert not faults


@pytest.fixture(scope="module")
def replaying(server: Server) -> Iterator[None]:
    """Two engines at work for longer than the tests take."""
    replay = server.replay("--engines", "2", "--step-ms", "200", "--namespace", "a/rather/long-namespace-" + "x" * 60)
    yield
    replay.send_signal(signal.SIGINT)
    replay.wait(30)


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1600, 1000), (1280, 900), (800, 900), (360, 740)])
def test_it_can_be_read_on_every_screen(server: Server, browser: Browser, width: int, height: int, scheme: Any, tmp_path: Path) -> None:
    with browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme) as context:
        context.set_default_timeout(PATIENCE_MS)
        page, faults = opened(context, server.url)
        expect(page.locator("#engines tbody tr")).to_have_count(2, timeout=60_000)
        assert page.evaluate(OVERFLOW) == []
        assert page.evaluate(CONTRAST) == []
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        assert not faults


@pytest.mark.usefixtures("replaying")
def test_keyboard_moves_through_charts_and_sorts(server: Server, context: BrowserContext) -> None:
    page, _ = opened(context, server.url)
    expect(page.locator("#engines tbody tr")).to_have_count(2, timeout=60_000)
    slider = page.get_by_role("slider", name="Tokens, moment")
    slider.focus()
    assert (slider.get_attribute("aria-valuetext") or "").startswith("time shown: committed ")
    page.keyboard.press("ArrowLeft")
    assert re.match(r"\d\d:\d\d:\d\d: committed ", slider.get_attribute("aria-valuetext") or "")
    page.keyboard.press("Escape")
    assert (slider.get_attribute("aria-valuetext") or "").startswith("time shown")
    first = page.locator("#engines tbody th").first.inner_text()
    page.get_by_role("button", name="Engine").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#engines thead th").first).to_have_attribute("aria-sort", "descending")
    expect(page.locator("#engines tbody th").first).not_to_have_text(first)
    # The table is made anew each second, and the key pressed next must still be for the same button.
    page.wait_for_timeout(1500)
    assert page.evaluate("document.activeElement.dataset.sort") == "engine"


def test_a_service_that_is_gone_is_plain_to_see_and_comes_back(server: Server, context: BrowserContext) -> None:
    page, _ = opened(context, server.url)
    expect(page.locator("#state")).to_have_text("Ready")
    run = page.locator("#about").inner_text()
    before = number(page, "#total-drafts")
    server.process.process.kill()
    server.process.process.wait()
    expect(page.locator("#stale")).to_be_visible()
    expect(page.locator("#state")).to_have_text("No answer")
    expect(page).to_have_title(f"draftd {NONE} no answer")
    assert page.evaluate(CONTRAST) == []
    assert number(page, "#total-drafts") >= before > 0
    server.start()
    expect(page.locator("#state")).to_have_text("Ready")
    expect(page.locator("#stale")).to_be_hidden()
    assert page.locator("#about").inner_text() != run
    expect(page.locator("#events")).to_contain_text("restored")
    assert number(page, "#total-drafts") < before


def test_a_service_that_hangs_is_plain_to_see(server: Server, context: BrowserContext) -> None:
    page, _ = opened(context, server.url)
    expect(page.locator("#state")).to_have_text("Ready")
    server.process.process.send_signal(signal.SIGSTOP)
    try:
        expect(page.locator("#stale")).to_be_visible(timeout=6000)
    finally:
        server.process.process.send_signal(signal.SIGCONT)
    expect(page.locator("#state")).to_have_text("Ready")


def test_nothing_is_asked_while_nobody_looks(server: Server, context: BrowserContext) -> None:
    page, _ = opened(context, server.url)
    expect(page.locator("#state")).to_have_text("Ready")
    asked: list[str] = []
    page.evaluate(HIDE, True)
    page.wait_for_timeout(500)
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(3000)
    assert not asked
    page.evaluate(HIDE, False)
    page.wait_for_timeout(1000)
    assert asked


def test_with_tokens_it_asks_for_one_and_keeps_it_in_its_tab(context: BrowserContext, tmp_path: Path) -> None:
    token, narrow = new_token(), new_token()
    file = tmp_path / "tokens.toml"
    entries = (("everything", token, "*"), ("narrow", narrow, "mine"))
    file.write_text("".join(f'[tokens.{n}]\nsha256 = "{hash_of(t)}"\nrights = ["read"]\nnamespaces = ["{p}"]\n' for n, t, p in entries))
    file.chmod(0o600)
    running = RunningService(token_file=file)
    try:
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{running.service.http_port}")
        expect(page.locator("#sign-in")).to_be_visible()
        expect(page.locator("#main")).to_be_hidden()
        assert page.evaluate(CONTRAST) == []
        for wrong, said in ((new_token(), "not valid"), (narrow, "may not read every namespace")):
            page.get_by_label("Token", exact=True).fill(wrong)
            page.get_by_role("button", name="Show the dashboard").click()
            expect(page.locator("#sign-in-why")).to_contain_text(said)
        page.get_by_label("Token", exact=True).fill(token)
        page.keyboard.press("Enter")
        expect(page.locator("#main")).to_be_visible()
        expect(page.locator("#state")).to_have_text("Ready")
        assert page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]") == [[token], [], ""]
        page.reload()
        expect(page.locator("#main")).to_be_visible()
        page.get_by_role("button", name="Forget token").click()
        expect(page.locator("#sign-in")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0
    finally:
        running.close()
