"""The real dashboard in a real browser: it draws, it fits, and it talks to nobody but this machine."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from coordinator.records import JobRecord, JobSite, Outcome, Share, SitePresence, StepRecord
from coordinator.store import Store, url_in
from federation.blobs import BlobRef
from federation.messages import MembershipStatement, Metric, Role, StepKind

pytestmark = pytest.mark.browser

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
SITES = ("cleveland", "hungary", "long-beach", "switzerland")
JOB = "heart-5e09c1"


def fill(url: str) -> None:
    """Two rounds of four hospitals."""
    roster = tuple(
        MembershipStatement("heart", f"{n:032x}", site, site, Role.SITE, b"t" * 32, b"p" * 32, 1, 2, b"s" * 64)
        for n, site in enumerate(SITES)
    )
    text = resources.files("parley").joinpath("heart/heart.toml").read_text()
    accepted = tuple(JobSite(site, "accepted") for site in SITES)
    now = time.time()
    with Store(url) as store:
        store.add_job(JobRecord(JOB, "heart", text, now - 100, roster, BlobRef.of(b"initial"), sites=accepted))
        for step in range(1, 5):
            trains, number = step % 2 == 1, (step + 1) // 2
            shares = tuple(Share(site, Outcome.COUNTED, "", 2.0, 4096) for site in SITES)
            kind = StepKind.TRAIN if trains else StepKind.EVALUATE
            metrics = () if trains else (Metric("accuracy", 0.6 + number / 10), Metric("auc", 0.7 + number / 10))
            model = BlobRef.of(bytes([number])) if trains else None
            at = now - 90 + step
            record = StepRecord(
                JOB, step, 0, kind, number, at, at + 1, shares, model, metrics=metrics, best_round=step // 2
            )
            store.commit_step(record)


def wait_for_switzerland(url: str) -> None:
    """What the coordinator tells while a site still uploads and the others are done."""
    now = time.time()
    presence = [SitePresence(site, True, now, "ready") for site in SITES[:3]]  # noqa: FBT003 - attends
    slow = SitePresence(SITES[3], True, now, "uploading", "waiting for its upload")  # noqa: FBT003 - attends
    with Store(url) as store:
        store.set_presence((*presence, slow))


@pytest.fixture
def browser() -> Path:
    """Debian's Chromium and Playwright, or the reason why there is no browser test."""
    missing = ""
    if not CHROMIUM.exists():
        missing = f"there is no {CHROMIUM}: apt-get install chromium"
    else:
        try:
            import playwright.sync_api
        except ImportError:
            missing = "playwright is not installed: pip install playwright"
        else:
            assert playwright.sync_api
    if missing and os.environ.get("PARLEY_REQUIRE_BROWSER") == "1":
        pytest.fail(f"PARLEY_REQUIRE_BROWSER=1, but {missing}")
    if missing:
        pytest.skip(missing)
    return CHROMIUM


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a running dashboard over a filled store."""
    url = url_in(tmp_path)
    fill(url)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "parley", "dashboard", "--store", url, "--port", str(port)]
    log = (tmp_path / "dashboard.log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield wait_until_healthy(f"http://127.0.0.1:{port}", process, tmp_path / "dashboard.log")
    finally:
        process.terminate()
        process.wait(20)
        log.close()


def wait_until_healthy(address: str, process: "subprocess.Popen[bytes]", log: Path) -> str:
    """The address, as soon as the dashboard answers there."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        try:
            with urlopen(f"{address}/_stcore/health", timeout=1):  # noqa: S310 - our own process on loopback
                return address
        except OSError:
            time.sleep(0.1)  # another process starts: there is no event to wait for
    raise AssertionError(log.read_text())


@pytest.mark.slow
def test_the_page_shows_which_site_holds_the_round_back(browser: Path, address: str, tmp_path: Path) -> None:
    """The charts are drawn, news appears by itself, nothing runs out of the page, and no other machine is asked."""
    from playwright.sync_api import sync_playwright

    told = "Round 3 is held back by switzerland: waiting for its upload"
    hosts: set[str | None] = set()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=ARGUMENTS)
        page = chromium.new_page(viewport={"width": 1280, "height": 1000})
        page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
        page.goto(address)
        for number in range(2):
            page.locator(".js-plotly-plot .main-svg").nth(number).wait_for(timeout=90_000)
        assert told not in page.locator("body").inner_text()
        wait_for_switzerland(url_in(tmp_path))
        page.get_by_text(told).wait_for(timeout=50_000)
        text = page.locator("body").inner_text()
        overflow = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        page.screenshot(path=tmp_path / "dashboard.png")
        chromium.close()
    for words in ("2 of 15", "0.800", "0.900", "4 of 4", "uploading", "best round 2"):
        assert words in text
    assert not overflow
    assert (tmp_path / "dashboard.png").read_bytes().startswith(b"\x89PNG")
    assert {host for host in hosts if host} == {"127.0.0.1"}
