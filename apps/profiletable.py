"""A profile for people: tables on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from ondevice.apps.benchtable import slowed_lines, spread_cell
from ondevice.apps.figures import REFERENCE, Figures
from ondevice.apps.loads import verdicts
from ondevice.apps.report import Report
from ondevice.apps.reported import Range, comparison
from ondevice.apps.terminal import figure

HEADINGS = (
    "tok/s",
    "times plain",
    "ttft\nms",
    "prefill\nms",
    "first\nright",
    "drafts\ntaken",
    "tokens a\nforward",
    "tree\nkept",
    "text\nas plain",
)
SPEED_HEADINGS = 4
"""So many of them make a table of their own where all do not fit beside each other."""
DEPTHS_SHOWN = 8
MIB = 1024 * 1024


def print_report(report: Report, console: Console) -> None:
    """Every table that has something to show, then what was left out and why."""
    _print_main(report, console)
    for title, table in (
        ("where the time went, share of decoding", _busy_table(report)),
        ("draft tokens accepted, by depth below the root", _depth_table(report)),
        (
            "draft tokens by proposer: offered, put before the verifier, accepted",
            _proposers(report),
        ),
        ("as reported by the field, and as measured here", _reported_table(report)),
        ("several sessions at once", _load_table(report)),
    ):
        if table.row_count:
            console.print()
            console.print(title)
            console.print(table)
    console.print()
    for line in closing_lines(report):
        console.print(line, soft_wrap=not console.is_terminal)


def _table(*headings: str, left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right", overflow="fold")
    return table


def _print_main(report: Report, console: Console) -> None:
    """One table, or its two halves below each other on a narrow terminal."""
    whole = _main_table(report, slice(None))
    unbound = console.options.update(max_width=sys.maxsize)
    if console.measure(whole, options=unbound).maximum <= console.width:
        console.print(whole)
        return
    console.print(_main_table(report, slice(SPEED_HEADINGS)))
    console.print()
    console.print(_main_table(report, slice(SPEED_HEADINGS, None)))


def _main_table(report: Report, shown: slice) -> Table:
    table = _table("", "", *HEADINGS[shown], left=2)
    for strategy in report.strategies:
        found = [each for each in report.figures if each.strategy == strategy]
        for each in found:
            name = strategy if each is found[0] else ""
            table.add_row(name, each.domain, *_cells(each)[shown])
    return table


def _cells(figures: Figures) -> Sequence[str]:
    ttft, prefill = figures.ttft_ms, figures.prefill_ms
    return (
        spread_cell(figures.decode_tok_s, ".1f"),
        "1" if figures.strategy == REFERENCE else spread_cell(figures.speed_up, ".2f"),
        figure(ttft.median if ttft else None, ".0f"),
        figure(prefill.median if prefill else None, ".0f"),
        figure(figures.first_choice_rate, ".0%"),
        figure(figures.acceptance_rate, ".0%"),
        figure(figures.tokens_per_verify, ".2f"),
        figure(figures.rerooting_rate, ".0%"),
        f"{figures.same_text}/{figures.compared}" if figures.compared else "n/a",
    )


def _busy_table(report: Report) -> Table:
    table = _table("", "verifier", "drafter", "both at once", "neither", "verifier waited")
    for figures in report.over_all:
        busy = figures.busy
        parts = busy.verifier_ms, busy.drafter_ms, busy.both_ms, busy.idle_ms, busy.waited_ms
        table.add_row(figures.strategy, *(figure(busy.share(part), ".0%") for part in parts))
    return table


def _depth_table(report: Report) -> Table:
    drafted = [each for each in report.over_all if each.by_depth]
    deepest = max((each.by_depth[-1].depth for each in drafted), default=0)
    depths = range(1, min(deepest, DEPTHS_SHOWN) + 1)
    table = _table("", *(str(depth) for depth in depths))
    for figures in drafted:
        rates = {count.depth: count.rate for count in figures.by_depth}
        table.add_row(figures.strategy, *(figure(rates.get(depth), ".0%") for depth in depths))
    return table


def _proposers(report: Report) -> Table:
    table = _table("", "", "offered", "verified", "accepted", "rate", left=2)
    for figures in report.over_all:
        for name, count in figures.by_proposer.items():
            rate = count.accepted / count.verified if count.verified else None
            counts = (str(n) for n in (count.offered, count.verified, count.accepted))
            table.add_row(figures.strategy, name, *counts, figure(rate, ".0%"))
    return table


def _reported_table(report: Report) -> Table:
    table = _table(
        "",
        "acceptance\nreported",
        "first choice right\nmeasured",
        "times plain\nreported",
        "times plain\nmeasured",
        "with",
    )
    for row in comparison(report.figures):
        table.add_row(
            row.domain,
            range_cell(row.reported_acceptance, percent=True),
            figure(row.first_choice_rate, ".0%"),
            range_cell(row.reported_speed_up),
            spread_cell(row.speed_up, ".2f"),
            row.strategy,
        )
    return table


def range_cell(given: Range, *, percent: bool = False) -> str:
    """A reported range."""
    low, high = given
    return f"{low * 100:.0f}-{high * 100:.0f} %" if percent else f"{low:g}-{high:g}"


def _load_table(report: Report) -> Table:
    table = _table("", "sessions", "tok/s together", "times plain", "forwards with drafts")
    for load in report.loads:
        table.add_row(
            load.strategy,
            str(load.sessions),
            spread_cell(load.tok_s, ".1f"),
            spread_cell(load.ratio, ".2f"),
            figure(load.speculating, ".0%"),
        )
    return table


def closing_lines(report: Report) -> list[str]:
    """How it was measured, memory, energy, what `auto` said, what is missing, and the loads."""
    return [*method_lines(report), *energy_lines(report), *verdicts(report.loads)]


def method_lines(report: Report) -> list[str]:
    """How it was measured, what is missing, memory, and what the strategies said of themselves."""
    each = "its answer" if report.repeats == 1 else f"the median of its {report.repeats} answers"
    lines = [
        f"{report.answers} of {report.planned} answers of up to {report.max_tokens} tokens to "
        f"{report.prompts} prompts, strategies in turn; medians over prompts (quartiles), a prompt "
        f"counts by {each}; greedy"
    ]
    if report.stopped:
        lines.append(f"not all was measured: {report.stopped}; the figures are of what was")
    lines += report.placement
    lines += [f"left out: {name}: {why}" for name, why in report.left_out.items()]
    lines += slowed_lines(report.conditions)
    lines += _memory_lines(report)
    for figures in report.over_all:
        told = [why for why in figures.reasons if not why.endswith(", as set")]
        lines += [f"{figures.strategy}: {why}" for why in told[:2]]
    return lines


def _memory_lines(report: Report) -> Iterator[str]:
    for unit in ("verifier", "drafter"):
        held = [f.memory[unit] for f in report.over_all if unit in f.memory]
        if held:
            most = max(held, key=lambda memory: memory.peak_bytes)
            parts = (most.weights_bytes, most.caches_bytes, most.scratch_bytes, most.peak_bytes)
            weights, caches, scratch, peak = (f"{part / MIB:.0f}" for part in parts)
            yield (
                f"{unit}: peak memory {peak} MiB: weights {weights}, caches {caches}, the rest "
                f"{scratch}"
            )


def energy_lines(report: Report) -> list[str]:
    """By strategy, or once why there is none."""
    lines = []
    for figures in report.over_all:
        rails = figures.energy_mj_per_token
        if rails:
            spent = ", ".join(f"{rail} {mj:.1f} mJ" for rail, mj in rails.items())
            lines.append(f"energy a token, {figures.strategy}: {spent}")
    reasons = dict.fromkeys(f.energy_reason for f in report.over_all if f.energy_reason)
    return lines + [f"energy not measured: {reason}" for reason in reasons]
