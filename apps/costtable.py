"""Measured costs for people: tables in which a cliff is seen, and what speculation must bring."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ondevice.costs import CostModel, CostPoint, CostTable, StepCosts

ROUNDS = (4, 8, 16)
"""Rows of the forwards whose worth is told."""
DRAFT_ROWS = 8
BAR_CELLS = 16
"""Columns of the longest bar."""


def cost_tables(costs: CostTable, console: Console) -> list[Table]:
    """The verifier's forwards by rows and context, and the drafter's steps if there are any.

    Contexts stand side by side where `console` is wide enough; a narrow one has no bars.
    """
    contexts = sorted({point.context for point in costs.plain})
    bar = "#" if console.options.ascii_only else "▄"
    apart = [[context] for context in contexts]
    for columns, sign in (([contexts], bar), (apart, bar), (apart, "")):
        tables = [_verifier_table(costs, each, sign) for each in columns]
        if all(_width(table, console) <= console.width for table in tables):
            break
    if costs.drafter:
        tables.append(_drafter_table(costs.drafter))
    return tables


def _width(table: Table, console: Console) -> int:
    """Columns that nothing is cut off at."""
    return Measurement.get(console, console.options.update(width=1000), table).maximum


def _verifier_table(costs: CostTable, contexts: Sequence[int], bar: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("verifier", no_wrap=True)
    for context in contexts:
        for heading in (f"at {context}", "beside", "of 1 row"):
            table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    forwards = [point for point in costs.verifier if costs.verifier != costs.plain]
    counts = sorted({point.rows for point in forwards})
    ones = [point for point in costs.verifier if point.rows == min(counts, default=1)]
    table.add_row("plain, a token", *_cells(costs.plain, ones, contexts))
    known = StepCosts(forwards or costs.verifier)
    for rows in counts:
        row = [point for point in forwards if point.rows == rows]
        table.add_row(
            f"{rows} row{'s' if rows > 1 else ''}",
            *_cells(row, ones, contexts),
            _bar(row, forwards, contexts[0], bar) + _cliff(known, rows, contexts[0]),
        )
    return table


def _cells(
    row: Sequence[CostPoint], ones: Sequence[CostPoint], contexts: Sequence[int]
) -> list[str]:
    cells = []
    for context in contexts:
        here = next((point for point in row if point.context == context), None)
        one = next((point for point in ones if point.context == context), None)
        if here is None:
            cells += ["", "", ""]
            continue
        ratio = f"{here.alone_ms / one.alone_ms:.2f}" if one is not None else ""
        cells += [_ms(here.alone_ms), _ms(here.beside_ms), ratio]
    return cells


def _bar(row: Sequence[CostPoint], forwards: Sequence[CostPoint], context: int, bar: str) -> str:
    longest_ms = max((each.alone_ms for each in forwards if each.context == context), default=0)
    here = [each.alone_ms for each in row if each.context == context]
    return bar * max(1, round(BAR_CELLS * here[0] / longest_ms)) if here else ""


def _cliff(known: StepCosts, rows: int, context: int) -> str:
    count = known.filled(rows, context)
    return f" more than {count}" if count > rows else ""


def _drafter_table(points: Sequence[CostPoint]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("drafter", no_wrap=True)
    for heading in ("alone", "beside", "of the first"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        table.add_row(
            f"{point.rows} row{'s' if point.rows > 1 else ''}",
            _ms(point.alone_ms),
            _ms(point.beside_ms),
            f"{point.alone_ms / points[0].alone_ms:.2f}",
        )
    return table


def _ms(ms: float) -> str:
    return f"{ms:.2f} ms" if ms < 10 else f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms"


def speculation_lines(costs: CostTable) -> list[str]:
    """What follows from the costs alone, whatever the drafter guesses right."""
    if not costs.drafter:
        return ["There is no speculation with this pair, so only plain decoding was measured."]
    model = CostModel(costs)
    contexts = sorted({point.context for point in costs.plain})
    slower = median(point.beside_ms / point.alone_ms for point in costs.verifier)
    step = min(model.drafter.row_counts, key=lambda count: abs(count - DRAFT_ROWS))
    drafts_slower = median(point.beside_ms / point.alone_ms for point in costs.drafter)
    lines = [
        "While the other model works (beside) a forward takes typically "
        f"{slower:.2f} times as long, a drafter step {drafts_slower:.2f} times."
    ]
    costly = {n: model.verifier.filled(n, contexts[0]) for n in model.verifier.row_counts}
    cliffs = [f"{rows} to {count}" for rows, count in costly.items() if count > rows]
    if cliffs:
        lines.append(f"Forwards are filled up from {', '.join(cliffs)} rows, since more cost less.")
    lines += [_break_even(model, context, step) for context in contexts]
    return lines


def _break_even(model: CostModel, context: int, step: int) -> str:
    plain_ms = model.plain.ms(1, context)
    rounds = [count for count in ROUNDS if count in model.verifier.row_counts]
    overlapped = [model.verifier.ms(rows, context, 1.0) / plain_ms for rows in rounds]
    step_ms = model.drafter.ms(step)
    in_turn = [(model.verifier.ms(rows, context) + step_ms) / plain_ms for rows in rounds]
    return (
        f"At {context} tokens of context a round of {_listed(rounds, 'd')} rows must commit more "
        f"than {_listed(overlapped, '.2f')} tokens to beat plain decoding when the drafter works "
        f"beside it, and more than {_listed(in_turn, '.2f')} when it comes after a drafter step of "
        f"{step} row{'s' if step > 1 else ''}."
    )


def _listed(numbers: Sequence[float], form: str) -> str:
    *first, last = [format(number, form) for number in numbers]
    return f"{', '.join(first)} and {last}" if first else last
