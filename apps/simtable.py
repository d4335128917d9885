"""The results of `simulate`: a table for people that fits 80 columns, one object for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from ondevice.apps.columns import NAIVE, Plan, Row
from ondevice.apps.sweep import DRAFT_ROWS, Entrant, Kind
from ondevice.modelled import CHILDREN

HEADINGS: dict[Kind, str] = {
    "sequential chain": "in turn:\nchain",
    "sequential tree": "in turn:\ntree",
    "overlapped chain": "overlap:\nnaive\nchain",
    "overlapped tree": "overlap:\ntree",
}
ROOMY_WIDTH = 90
"""Columns of a terminal; narrower ones, down to 80, get narrower gaps."""
USUAL_DRAFT_ROWS = max(DRAFT_ROWS)


def as_json(rows: Sequence[Row], plan: Plan, seed: int) -> dict[str, Any]:
    """The rows as plain values."""
    return {
        "seed": seed,
        "tokens": plan.tokens,
        "children": CHILDREN,
        "rows": [_row_json(row) for row in rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    columns = {
        kind: {
            "speed": column.best.speed,
            "sized_by": "sweep" if column.best is column.fixed else "rate",
            "fixed": _entrant_json(column.fixed),
            "rate": None if column.rate is None else column.rate.speed,
            "published": row.case.published.get(kind),
            "difference": row.difference(kind),
        }
        for kind, column in row.columns.items()
    }
    auto = row.auto
    return {
        "name": row.case.name,
        "detail": row.case.detail,
        "notes": list(row.case.notes),
        "prediction": row.case.prediction,
        "plain_tok_s": row.plain_tok_s,
        "columns": columns,
        "auto": None
        if auto is None
        else {
            "speed": auto.speed,
            "tokens": auto.tokens,
            "elapsed_ms": auto.elapsed_ms,
            "stats": auto.stats.as_json(),
        },
        "free_drafter": None if row.free is None else _entrant_json(row.free),
        "efficiency": row.efficiency,
    }


def _entrant_json(entrant: Entrant) -> dict[str, Any]:
    sizes = entrant.schedule.sizes
    return {
        "speed": entrant.speed,
        "sizes": None if sizes is None else asdict(sizes),
    }


def print_rows(rows: Sequence[Row], plan: Plan, seed: int, console: Console) -> None:
    """The table, what its rows are, and how to read it."""
    console.print(_table(rows, plan, gap=2 if console.width >= ROOMY_WIDTH else 1))
    console.print()
    for line in _lines(rows, plan, seed):
        console.print(line, soft_wrap=not console.is_terminal)


def _table(rows: Sequence[Row], plan: Plan, gap: int) -> Table:
    automatic = any(row.auto is not None for row in rows)
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    table.add_column("times plain decoding", no_wrap=True)
    headings = ["plain\ntok/s", *(HEADINGS[kind] for kind in plan.kinds)]
    for heading in [*headings, *(["auto", "of free\ndrafter"] if automatic else [])]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        _add_row(table, row, automatic)
    return table


def _add_row(table: Table, row: Row, automatic: bool) -> None:
    def line(name: str, cell: Callable[[Kind], str], plain: str, *last: str) -> None:
        cells = (cell(kind) for kind in row.columns)
        table.add_row(name, plain, *cells, *(last if automatic else ()))

    speed = "" if row.auto is None else f"{row.auto.speed:.2f}"
    share = "" if row.efficiency is None else f"{row.efficiency:.0%}"
    free = "" if row.free is None else f"{row.free.speed:.2f}"
    sizes = "" if row.free is None else _sizes(row.free)
    line(
        row.case.name,
        lambda kind: f"{row.columns[kind].best.speed:.2f}",
        f"{row.plain_tok_s:.1f}",
        speed,
        share,
    )
    line("  fixed sizes", lambda kind: f"{row.columns[kind].fixed.speed:.2f}", "", "", free)
    line("  which", lambda kind: _sizes(row.columns[kind].fixed), "", "", sizes)
    if row.case.published:
        line("  DESIGN", lambda kind: f"{row.case.published[kind]:.2f}", "")
        line("  difference", lambda kind: _percent(row.difference(kind)), "")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.1f} %"


def _sizes(entrant: Entrant) -> str:
    """Rows x depth, and x rows drafted a step where they are not the usual."""
    sizes = entrant.schedule.sizes
    if sizes is None:
        return "plain" if entrant.schedule.strategy == "plain" else "rate"
    tree, drafted = entrant.schedule.children > 1, sizes.draft_rows
    more = f"x{drafted}" if tree and drafted != USUAL_DRAFT_ROWS else ""
    return f"{sizes.verify_rows}x{sizes.depth}{more}"


def _lines(rows: Sequence[Row], plan: Plan, seed: int) -> list[str]:
    lines = [
        f"{plan.tokens} tokens a run, seed {seed}: the same text for all schedules of a row. "
        f"Trees have {CHILDREN} children a node."
    ]
    if plan.kinds:
        lines.append(
            "First line of a row: the better one of our own sizing by the rate formula and the best"
            " fixed sizes, which follow, found by sweep: rows verified x depth (x rows drafted a "
            f"step, where not {USUAL_DRAFT_ROWS})."
        )
    if NAIVE in plan.kinds:
        lines.append("The naive chain verifies whatever is there: its sizes are always fixed.")
    if any(row.free is not None for row in rows):
        lines.append(
            "of free drafter: speed of auto over that with a drafter that takes no time, which is "
            f"given below: sequential tree, {USUAL_DRAFT_ROWS} rows a step, best rows x depth "
            "or rate."
        )
    # A machine that several rows share is described once.
    details = dict.fromkeys((row.case.detail, row.case.notes) for row in rows)
    for detail, notes in details:
        names = [row.case.name for row in rows if row.case.detail == detail]
        lines.append(f"{'; '.join(names)}: {detail}")
        lines += [f"  {note}" for note in notes]
    for row in rows:
        if row.auto is not None and not row.case.published:
            lines.append(f"{row.case.name}: auto: {row.auto.stats.reason}")
    return lines
