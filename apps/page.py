"""A profile as one page of HTML: nothing is fetched, everything that it shows is in it.

It is readable in light and dark and on paper. The charts are drawn here; the only script zooms the
timeline, with buttons and keys. Under each chart are its figures as a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment

from ondevice.apps.benchtable import spread_cell
from ondevice.apps.charts import (
    BUSY_PARTS,
    FEWEST_ROUNDS,
    busy_chart,
    busy_shares,
    cost_chart,
    depth_chart,
    energy_chart,
    speed_chart,
)
from ondevice.apps.figures import REFERENCE
from ondevice.apps.loads import verdicts
from ondevice.apps.profiletable import energy_lines, method_lines, range_cell
from ondevice.apps.race import Measured
from ondevice.apps.report import Report
from ondevice.apps.reported import comparison
from ondevice.apps.terminal import figure
from ondevice.apps.timeline import ROUNDS_TOLD, chosen, rounds_told, timeline, timeline_legend

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of the page. folded: shown when asked for."""

    caption: str
    headings: Sequence[str]
    rows: Rows
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page. name: its anchor. chart: markup, "" for none."""

    name: str
    title: str
    lines: Sequence[str] = ()
    chart: str = ""
    tables: Sequence[Sheet] = ()
    zoomable: bool = False


def page(report: Report, measured: Sequence[Measured], drift: Sequence[str] = ()) -> str:
    """The page. drift: lines about a comparison with a saved profile."""
    sections = [section for section in _sections(report, measured, drift) if section is not None]
    template = Environment(autoescape=True).from_string(_asset("page.html"))
    identity = report.identity
    return template.render(
        title=f"Profile of {identity.pair}",
        subtitle=(
            f"{report.measured_at:%Y-%m-%d %H:%M %Z}, {identity.cpu}, {identity.system}, "
            f"ondevice {identity.ondevice}"
        ),
        sections=sections,
        style=_asset("page.css"),
        script=_asset("page.js"),
        footer=(
            f"verifier {identity.verifier_sha256[:12]}, "
            f"drafter {(identity.drafter_sha256 or 'none')[:12]}"
        ),
    )


def _asset(name: str) -> str:
    return files("ondevice.apps").joinpath(name).read_text(encoding="utf-8")


def _sections(
    report: Report, measured: Sequence[Measured], drift: Sequence[str]
) -> Iterator[Section | None]:
    yield Section("figures", "Figures", method_lines(report), tables=[_figures(report)])
    yield Section(
        "speed",
        "Speed by kind of text",
        ["Medians over prompts; the whiskers are quartiles, of ratios in the same turn."],
        speed_chart(report),
        [_reported(report)],
    )
    yield _depths(report)
    yield _busy(report)
    yield _energy(report)
    yield _costs(report)
    yield _loads(report)
    yield _timeline(measured)
    if drift:
        yield Section("drift", "Against a saved profile", [line for line in drift if line])


def _figures(report: Report) -> Sheet:
    headings = [
        *("strategy", "text", "answers", "tok/s", "times plain", "ttft, ms", "prefill, ms"),
        *("first choice right", "draft tokens accepted", "tokens a forward", "tree kept"),
    ]
    rows = [
        [
            *(each.strategy, each.domain, str(each.answers), spread_cell(each.decode_tok_s, ".1f")),
            "1" if each.strategy == REFERENCE else spread_cell(each.speed_up, ".2f"),
            spread_cell(each.ttft_ms, ".0f"),
            figure(each.prefill_ms.median if each.prefill_ms else None, ".0f"),
            figure(each.first_choice_rate, ".0%"),
            figure(each.acceptance_rate, ".0%"),
            figure(each.tokens_per_verify, ".2f"),
            figure(each.rerooting_rate, ".0%"),
        ]
        for each in report.figures
    ]
    return Sheet("All figures; in brackets lower and upper quartile", headings, rows)


def _reported(report: Report) -> Sheet:
    headings = [
        *("text", "acceptance, reported", "first choice right, measured"),
        *("times plain, reported", "times plain, measured", "measured with"),
    ]
    rows = [
        [
            row.domain,
            range_cell(row.reported_acceptance, percent=True),
            figure(row.first_choice_rate, ".0%"),
            range_cell(row.reported_speed_up),
            spread_cell(row.speed_up, ".2f"),
            row.strategy,
        ]
        for row in comparison(report.figures)
    ]
    return Sheet("As reported by the field, and as measured here", headings, rows)


def _depths(report: Report) -> Section | None:
    drafted = [each for each in report.over_all if each.by_depth]
    if not drafted:
        return None
    rows = [
        [f.strategy, *(str(n) for n in (c.depth, c.rows, c.rounds, c.accepted)), f"{c.rate:.0%}"]
        for f in drafted
        for c in f.by_depth
    ]
    proposers = [
        [f.strategy, name, *(str(n) for n in (count.offered, count.verified, count.accepted))]
        for f in drafted
        for name, count in f.by_proposer.items()
    ]
    return Section(
        "acceptance",
        "Acceptance by depth",
        [
            "Of the rounds that put a draft token at that depth before the verifier; depths with "
            f"fewer than {FEWEST_ROUNDS} such rounds are in the table alone."
        ],
        depth_chart(report),
        [
            Sheet(
                "Acceptance by depth",
                ["strategy", "depth", "draft tokens", "rounds", "accepted", "share"],
                rows,
                folded=True,
            ),
            Sheet(
                "Draft tokens by proposer",
                ["strategy", "proposer", "offered", "before the verifier", "accepted"],
                proposers,
            ),
        ],
    )


def _busy(report: Report) -> Section:
    rows = [
        [
            each.strategy,
            *(f"{share:.1%}" for share in busy_shares(each)),
            f"{each.busy.waited_ms / each.rounds:.2f} ms" if each.rounds else "n/a",
            f"{each.busy.wall_ms / 1e3:.2f} s",
        ]
        for each in report.over_all
    ]
    headings = ["strategy", *(n for n, _ in BUSY_PARTS), "verifier waited a forward", "whole"]
    table = Sheet("Busy time, share of decoding", headings, rows)
    return Section("busy", "Busy time of both units", [], busy_chart(report), [table])


def _energy(report: Report) -> Section:
    rows = [
        [each.strategy, rail, f"{spent_mj:.2f}"]
        for each in report.over_all
        for rail, spent_mj in (each.energy_mj_per_token or {}).items()
    ]
    tables = [Sheet("Energy a token", ["strategy", "rail", "mJ"], rows)] if rows else []
    lines = [line for line in energy_lines(report) if "not measured" in line]
    return Section("energy", "Energy", lines, energy_chart(report), tables)


def _costs(report: Report) -> Section:
    costs = report.costs
    if costs is None:
        return Section("costs", "What a forward costs", ["Not measured for this pair."])
    rows = [
        [str(p.rows), str(p.context), f"{p.alone_ms:.2f}", f"{p.beside_ms:.2f}"]
        for p in costs.verifier
    ]
    headings = ["rows", "context", "alone, ms", "beside the drafter, ms"]
    table = Sheet("Forwards of the verifier", headings, rows, folded=True)
    lines = ["Solid: alone. Dashed: beside the drafter."]
    return Section("costs", "What a forward costs", lines, cost_chart(costs), [table])


def _loads(report: Report) -> Section | None:
    if not report.loads:
        return None
    rows = [
        [
            each.strategy,
            str(each.sessions),
            spread_cell(each.tok_s, ".1f"),
            spread_cell(each.ratio, ".2f"),
            figure(each.speculating, ".0%"),
        ]
        for each in report.loads
    ]
    headings = ["strategy", "sessions", "tok/s together", "times plain", "forwards with drafts"]
    table = Sheet("Several sessions at once", headings, rows)
    return Section("loads", "Several sessions at once", verdicts(report.loads), "", [table])


def _timeline(measured: Sequence[Measured]) -> Section | None:
    answers = chosen(measured)
    if not answers:
        return None
    question = answers[0].task.question
    where = f"{question.category or 'unnamed'} {question.id}"
    table = Sheet(
        f"The first {ROUNDS_TOLD} forwards of each strategy",
        ["strategy", "start, ms", "took, ms", "drafts accepted", "tokens"],
        rounds_told(answers),
        folded=True,
    )
    return Section(
        "timeline",
        "The first seconds",
        [f"The answers to prompt {where}, from the prompt's arrival on."],
        timeline(answers) + timeline_legend(),
        [table],
        zoomable=True,
    )
