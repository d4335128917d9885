"""The results of `simulate --regret` for people: figures, the worst cells, and a map of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from ondevice.apps.regret import LEAST_DEMANDED, MEAN_DEMANDED, VERIFY_MS, Regret, Tried

WORST_SHOWN = 8
LABEL = 8
"""Columns before the map: with 24 cells of three a line fits 80."""


def print_regret(regret: Regret, console: Console) -> None:
    """Mean and minimum, the worst cells and what beat `auto` there, the map, the verdict."""
    worst = regret.worst_first
    console.print(
        f"auto over the best fixed schedule, {len(worst)} machines and drafters: "
        f"mean {regret.mean:.3f}, minimum {worst[0].ratio:.3f}, "
        f"{sum(each.ratio >= 1 for each in worst)} times at least as fast",
        soft_wrap=not console.is_terminal,
    )
    console.print(
        f"{regret.tokens} tokens a run, seed {regret.seed}; a row takes {VERIFY_MS:g} ms; auto "
        "starts with the costs known and the drafter unknown",
        soft_wrap=not console.is_terminal,
    )
    console.print()
    console.print(_worst_table(worst[:WORST_SHOWN]))
    console.print()
    for line in _map_lines(regret.cells):
        console.print(line, soft_wrap=not console.is_terminal)
    verdict = "passed" if regret.passed else "FAILED"
    console.print(
        f"{verdict}: demanded are a mean of {MEAN_DEMANDED:.0%} and at least {LEAST_DEMANDED:.0%} "
        "in every cell",
        soft_wrap=not console.is_terminal,
    )


def _worst_table(worst: Sequence[Tried]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in (
        "draft/\nverify",
        "a",
        "row\ncost",
        "slow-\ndown",
        "auto",
        "best\nfixed",
        "ratio",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("best fixed schedule", no_wrap=True)
    for each in worst:
        cell = each.cell
        table.add_row(
            f"{cell.draft_share:g}",
            f"{cell.a:g}",
            f"{cell.row_cost:.0%}",
            f"{cell.slowdown:g}",
            f"{each.auto:.2f}",
            f"{each.best.speed:.2f}",
            f"{each.ratio:.3f}",
            each.best_name,
        )
    return table


def _map_lines(cells: Sequence[Tried]) -> Iterator[str]:
    """Percent by which auto is ahead: a line a verifier, a column a drafter."""
    shares = sorted({each.cell.draft_share for each in cells})
    acceptances = sorted({each.cell.a for each in cells})
    found = {
        (c.cell.row_cost, c.cell.slowdown, c.cell.draft_share, c.cell.a): c.ratio for c in cells
    }
    yield "Percent that auto is ahead (+) or behind (-) by; ++ is 10 or more."
    yield "Lines: cost of a row x slow-down. Columns: draft/verify time, then a."
    wide = 3 * len(acceptances)
    yield " " * LABEL + "".join(f" {share:<{wide - 1}g}" for share in shares).rstrip()
    acceptance = "".join(f"{a:3.1f}".replace("0.", " .") for a in acceptances)
    yield "a".rjust(LABEL) + acceptance * len(shares)
    for row_cost, slowdown in sorted({key[:2] for key in found}):
        marks = (
            _mark(found.get((row_cost, slowdown, share, a)))
            for share in shares
            for a in acceptances
        )
        yield f"{row_cost:.0%}x{slowdown:g}".ljust(LABEL) + "".join(marks)


def _mark(ratio: float | None) -> str:
    """Three characters."""
    if ratio is None:
        return "   "
    percent = round(100 * (ratio - 1))
    if abs(percent) > 9:
        return " ++" if percent > 0 else " --"
    return f"{percent:+3d}" if percent else "  0"
