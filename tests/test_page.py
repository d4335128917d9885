"""The page of a profile: whole in itself, and in a browser without an error, by keyboard too."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from profiling import STRATEGIES, virtual_answers, virtual_report

from ondevice.apps.charts import busy_shares
from ondevice.apps.figures import EVERY
from ondevice.apps.page import page
from ondevice.apps.svg import nice_step, ticks
from ondevice.apps.timeline import SECONDS, bars, chosen

CHARTS = ["speed", "depth", "busy", "energy", "costs", "timeline"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def text() -> str:
    measured = virtual_answers()
    return page(virtual_report(measured), measured, ["", "against the saved profile:", "x"])


def test_every_chart_is_there_and_is_drawn_inside_its_frame(text: str) -> None:
    drawings = re.findall(r"<svg id=.*?</svg>", text, flags=re.DOTALL)
    trees = [ElementTree.fromstring(drawing) for drawing in drawings]
    assert [tree.get("id") for tree in trees] == CHARTS
    for tree in trees:
        *_, width, height = (float(part) for part in tree.get("viewBox", "").split())
        for box in tree.iter("rect"):
            x, y = float(box.get("x", 0)), float(box.get("y", 0))
            assert 0 <= y <= y + float(box.get("height", 0)) <= height
            assert x >= 0
            if "data-s" not in box.attrib:
                assert x + float(box.get("width", 0)) <= width + 1e-6
        for label in tree.iter("text"):
            assert 0 < float(label.get("y", 0)) <= height, label.text


def test_every_figure_of_the_charts_is_in_a_table_too(text: str) -> None:
    measured = virtual_answers()
    report = virtual_report(measured)
    for figures in report.figures:
        assert figures.speed_up is not None
        assert f"{figures.speed_up.median:.2f}" in text
        if figures.domain == EVERY:
            assert all(f"{share:.1%}" in text for share in busy_shares(figures))


def test_nothing_is_fetched(text: str) -> None:
    assert not re.findall(r"(?:src|href|action)\s*=\s*[\"'](?!#|data:,)", text)
    assert set(re.findall(r"url\([^)]*\)", text)) == {"url(#lanes)"}
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert set(re.findall(r"https?://[^\"'\s]*", text)) == {"http://www.w3.org/2000/svg"}


def test_what_others_wrote_is_shown_and_not_run() -> None:
    measured = virtual_answers(("<script>alert(1)</script>",))
    report = virtual_report(measured)
    identity = report.identity.model_copy(update={"pair": "a<b>&\"'"})
    shown = page(report.model_copy(update={"identity": identity}), measured)
    assert "<script>alert" not in shown
    assert "a<b>" not in shown
    assert shown.count("<script>") == 1


def test_a_profile_without_energy_costs_or_drafts_says_so() -> None:
    measured = [each for each in virtual_answers() if each.side == "plain"]
    for index, each in enumerate(measured):
        answer = each.run.answer
        assert answer is not None
        stats = replace(answer.stats, energy_mj=None, energy_reason="no counter here")
        measured[index] = replace(each, run=replace(each.run, answer=replace(answer, stats=stats)))
    report = virtual_report(measured).model_copy(update={"costs": None, "loads": ()})
    shown = page(report, measured)
    assert "energy not measured: no counter here" in shown
    assert "Not measured for this pair." in shown
    assert re.findall(r'<svg id="(\w+)"', shown) == ["speed", "busy", "timeline"]
    assert "<svg" in page(report, [])


def test_the_timeline_has_one_answer_a_strategy_to_the_same_prompt() -> None:
    measured = virtual_answers()
    answers = chosen(measured[1:])  # the first prompt lacks its plain answer
    assert sorted(each.side for each in answers) == sorted(STRATEGIES)
    assert len({each.task.question.id for each in answers}) == 1
    for bar in bars(answers[-1]):
        assert bar.start_ms < SECONDS * 1e3
        assert bar.start_ms <= bar.end_ms


def test_ticks_are_round_and_reach_the_largest_value() -> None:
    for most in (0.3, 1.0, 1.9, 7.0, 99.0, 100.0, 12345.0):
        marks = ticks(most)
        assert marks[0] == 0
        assert marks[-1] >= most
        assert 3 <= len(marks) <= 11
    assert [nice_step(x) for x in (0.9, 1.1, 3, 7, 20)] == [1, 2, 5, 10, 20]
    assert ticks(0) == [0, 1]


# In a browser


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    return found


def browse(browser: str, folder: Path, text: str, script: str, *options: str) -> tuple[Any, str]:
    """What `script` leaves in `result`, and what the browser's console said."""
    ending = (
        f"<script>{script}\n(async () => {{ const result = await run();"
        "document.documentElement.dataset.result = JSON.stringify(result); })();</script></body>"
    )
    file = folder / "page.html"
    file.write_text(text.replace("</body>", ending), encoding="utf-8")
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            *(f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000", "--dump-dom"),
            *options,
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    found = re.search(r'data-result="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(html.unescape(found[1])), console


VIEW = """
const chart = document.querySelector(".timeline");
const at = () => [+chart.dataset.from, +chart.dataset.until];
const press = (key) => {
  chart.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  return at();
};
const click = (act) => {
  document.querySelector(`[data-do=${act}]`).click();
  return at();
};
"""


def test_in_a_browser_it_loads_alone_and_works_without_a_mouse(
    browser: str, text: str, tmp_path: Path
) -> None:
    script = (
        VIEW
        + """
    const run = () => ({
      start: at(), zoomed: press("+"), later: press("ArrowRight"), earlier: press("ArrowLeft"),
      wider: press("-"), again: press("="), all: press("0"), other: press("x"),
      clicked: click("in"), back: click("all"),
      focusable: [...document.querySelectorAll("a, button, summary, [tabindex]")].every(
        (e) => e.tabIndex >= 0),
      requests: performance.getEntriesByType("resource").map((e) => e.name),
      bars: [...document.querySelectorAll(".bars rect")].filter(
        (e) => !(+e.getAttribute("width") >= 0)).length,
      said: document.querySelector("[role=status]").textContent,
    });"""
    )
    found, console = browse(browser, tmp_path, text, script)
    assert console == ""
    assert found["requests"] == []
    first, last = found["start"]
    assert (first, found["all"], found["back"]) == (0, found["start"], found["start"])
    assert found["zoomed"] == pytest.approx([last / 4, 3 * last / 4])
    assert found["later"][0] == pytest.approx(last / 4 + last / 8)
    assert found["earlier"] == pytest.approx(found["zoomed"])
    assert found["wider"] == pytest.approx(found["start"])
    assert found["again"] == found["clicked"] == found["zoomed"]
    assert found["other"] == found["all"]
    assert found["focusable"]
    assert found["bars"] == 0
    assert found["said"].startswith("0.0 ms to ")


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core's script, from npm's registry."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
    if npm is None:
        pytest.skip("no npm on this machine to fetch axe-core with")
    command = [npm, "pack", "--silent", "axe-core@4"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        pytest.skip(f"axe-core could not be fetched: {done.stderr.strip()[-200:]}")
    with tarfile.open(folder / done.stdout.split()[-1]) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode("utf-8")


JUDGE = """
for (const folded of document.querySelectorAll("details")) folded.open = true;
const run = async () => {
  const found = await axe.run();
  return {
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    passes: found.passes.length,
    violations: found.violations.map((v) => [v.id, v.nodes.map((n) => n.html)]),
  };
};
"""


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_core_finds_nothing_to_mend(
    browser: str, axe: str, text: str, tmp_path: Path, dark: bool
) -> None:
    script = axe.replace("</script", "<\\/script") + JUDGE
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    found, console = browse(browser, tmp_path, text, script, scheme)
    assert found["dark"] == dark
    assert found["violations"] == []
    assert found["passes"] > 15
    assert console == ""


@pytest.mark.slow
def test_axe_core_finds_what_was_planted(browser: str, axe: str, text: str, tmp_path: Path) -> None:
    worse = text.replace('lang="en"', "").replace("--quiet: #57606a", "--quiet: #b0b7bf")
    script = axe.replace("</script", "<\\/script") + JUDGE
    found, _ = browse(browser, tmp_path, worse, script)
    assert {name for name, _ in found["violations"]} == {"html-has-lang", "color-contrast"}
