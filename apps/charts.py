"""The charts of a profile's page. Each has a table beside it with the same figures."""

from __future__ import annotations

from ondevice.apps.figures import REFERENCE, Figures
from ondevice.apps.report import Report
from ondevice.apps.reported import REPORTED
from ondevice.apps.svg import Drawing, legend, ticks
from ondevice.costs import CostPoint, CostTable

WIDTH, LEFT, RIGHT = 760.0, 150.0, 90.0
ROW, BAR = 22.0, 14.0
HEIGHT, TOP, BOTTOM = 300.0, 16.0, 44.0
SPAN = WIDTH - LEFT - RIGHT
BUSY_PARTS = (
    ("verifier alone", "verifier"),
    ("both at once", "both"),
    ("drafter alone", "drafter"),
    ("neither", "idle"),
)


def colour(report: Report, strategy: str) -> str:
    """The class of a strategy's marks, the same in every chart."""
    return f"c{report.strategies.index(strategy) % 8}"


def speed_chart(report: Report) -> str:
    """Speed-up by domain and strategy, quartiles as whiskers, and what the field reports."""
    rows = _speed_rows(report)
    reported = [REPORTED[domain].speed_up[1] for domain in report.domains if domain in REPORTED]
    highest = [f.speed_up.high for _, f in rows if f is not None and f.speed_up is not None]
    marks = ticks(max([1.2, *reported, *highest]))
    scale = SPAN / marks[-1]
    lines = len(rows) + len(reported) + 0.5 * (len(report.domains) + 1)
    height = TOP + ROW * lines + BOTTOM
    draw = Drawing(WIDTH, height, "Decoding speed over plain decoding, by kind of text", "speed")
    for mark in marks:
        x = LEFT + mark * scale
        draw.line(x, TOP, x, height - BOTTOM, "grid")
        draw.text(x, height - BOTTOM + 18, f"{mark:g}", "tick", "middle")
    draw.line(LEFT + scale, TOP, LEFT + scale, height - BOTTOM, "reference")
    y, domain = TOP, ""
    for name, figures in rows:
        if name != domain:
            domain, y = name, y + ROW * 0.5
            draw.text(LEFT - 8, y + BAR, domain, "label", "end")
            if domain in REPORTED:
                low, high = REPORTED[domain].speed_up
                width, tip = (high - low) * scale, f"reported by the field: {low:g} to {high:g}"
                draw.rect(LEFT + low * scale, y, width, BAR, "reported", tip=tip)
                draw.text(LEFT + high * scale + 6, y + BAR - 2, "reported", "note")
                y += ROW
        if figures is not None:
            _speed_bar(draw, figures, colour(report, figures.strategy), y, scale)
            y += ROW
    draw.text(
        LEFT + SPAN / 2, height - 6, "times plain decoding; the line is plain", "tick", "middle"
    )
    names = [(n, colour(report, n)) for n in report.strategies if n != REFERENCE]
    return str(draw) + legend([*names, ("reported by the field, not measured here", "reported")])


def _speed_rows(report: Report) -> list[tuple[str, Figures | None]]:
    rows: list[tuple[str, Figures | None]] = []
    for domain in report.domains:
        ours = [f for f in report.figures if f.domain == domain and f.strategy != REFERENCE]
        rows += [(domain, figures) for figures in ours] or [(domain, None)]
    return rows


def _speed_bar(draw: Drawing, figures: Figures, kind: str, y: float, scale: float) -> None:
    spread = figures.speed_up
    if spread is None:
        draw.text(LEFT + 4, y + BAR - 2, f"{figures.strategy}: not measured", "note")
        return
    tip = f"{figures.strategy}: {spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"
    draw.rect(LEFT, y, spread.median * scale, BAR, kind, tip=tip)
    low, high, middle = LEFT + spread.low * scale, LEFT + spread.high * scale, y + BAR / 2
    draw.line(low, middle, high, middle, "whisker")
    for end in (low, high):
        draw.line(end, middle - 4, end, middle + 4, "whisker")
    draw.text(
        max(high, LEFT + spread.median * scale) + 6, y + BAR - 2, f"{spread.median:.2f}", "note"
    )


FEWEST_ROUNDS = 5
"""With fewer, a share is an accident; the table beside the chart has them all."""


def depth_chart(report: Report) -> str:
    """Share of rounds whose text got to each depth, of those with a draft token there.

    "" where no depth has FEWEST_ROUNDS.
    """
    told = {
        each.strategy: [count for count in each.by_depth if count.rounds >= FEWEST_ROUNDS]
        for each in report.over_all
    }
    drafted = [each for each in report.over_all if told[each.strategy]]
    if not drafted:
        return ""
    deepest = max(counts[-1].depth for counts in told.values() if counts)
    draw = Drawing(WIDTH, HEIGHT, "Draft tokens accepted, by depth below the root", "depth")
    step = SPAN / max(1, deepest - 1)

    def at(depth: int, rate: float) -> tuple[float, float]:
        return LEFT + (depth - 1) * step, HEIGHT - BOTTOM - rate * (HEIGHT - TOP - BOTTOM)

    _shares_axis(draw)
    for depth in range(1, deepest + 1):
        draw.text(at(depth, 0)[0], HEIGHT - BOTTOM + 18, str(depth), "tick", "middle")
    draw.text(LEFT + SPAN / 2, HEIGHT - 6, "depth below the root", "tick", "middle")
    for figures in drafted:
        kind = colour(report, figures.strategy)
        counts = told[figures.strategy]
        draw.path([at(count.depth, count.rate) for count in counts], f"curve {kind}")
        for count in counts:
            tip = f"{figures.strategy}, depth {count.depth}: {count.accepted} of {count.rounds}"
            draw.dot(*at(count.depth, count.rate), kind, tip)
    return str(draw) + legend([(f.strategy, colour(report, f.strategy)) for f in drafted])


def _shares_axis(draw: Drawing) -> None:
    for percent in range(0, 101, 25):
        y = HEIGHT - BOTTOM - percent / 100 * (HEIGHT - TOP - BOTTOM)
        draw.line(LEFT, y, LEFT + SPAN, y, "grid")
        draw.text(LEFT - 8, y + 4, f"{percent} %", "tick", "end")


def busy_shares(figures: Figures) -> list[float]:
    """Of the time of decoding, in the order of BUSY_PARTS; none where no time passed."""
    busy = figures.busy
    parts = (
        busy.verifier_ms - busy.both_ms,
        busy.both_ms,
        busy.drafter_ms - busy.both_ms,
        busy.idle_ms,
    )
    return [part / busy.wall_ms for part in parts] if busy.wall_ms > 0 else []


def busy_chart(report: Report) -> str:
    """Where the time of decoding went, by strategy."""
    rows = report.over_all
    height = TOP + ROW * len(rows) + BOTTOM
    draw = Drawing(WIDTH, height, "Busy time of both units, by strategy", "busy")
    for percent in range(0, 101, 25):
        x = LEFT + SPAN * percent / 100
        draw.line(x, TOP, x, height - BOTTOM, "grid")
        draw.text(x, height - BOTTOM + 18, f"{percent} %", "tick", "middle")
    for index, figures in enumerate(rows):
        y, x = TOP + ROW * index, LEFT
        draw.text(LEFT - 8, y + BAR - 2, figures.strategy, "label", "end")
        for (name, kind), share in zip(BUSY_PARTS, busy_shares(figures), strict=False):
            tip = f"{figures.strategy}, {name}: {share:.1%}"
            draw.rect(x, y, SPAN * share, BAR, kind, tip=tip)
            x += SPAN * share
    draw.text(LEFT + SPAN / 2, height - 6, "share of the time of decoding", "tick", "middle")
    return str(draw) + legend(BUSY_PARTS)


def energy_chart(report: Report) -> str:
    """Millijoules a token by rail and strategy; "" where no rail is known."""
    known = [each for each in report.over_all if each.energy_mj_per_token]
    bars = [
        (f.strategy, rail, spent_mj)
        for f in known
        for rail, spent_mj in (f.energy_mj_per_token or {}).items()
    ]
    if not bars:
        return ""
    marks = ticks(max(spent_mj for *_, spent_mj in bars))
    height = TOP + ROW * len(bars) + BOTTOM
    draw = Drawing(WIDTH, height, "Energy a token, by strategy and rail", "energy")
    for mark in marks:
        x = LEFT + SPAN * mark / marks[-1]
        draw.line(x, TOP, x, height - BOTTOM, "grid")
        draw.text(x, height - BOTTOM + 18, f"{mark:g}", "tick", "middle")
    for index, (strategy, rail, spent_mj) in enumerate(bars):
        y, width = TOP + ROW * index, SPAN * spent_mj / marks[-1]
        draw.text(LEFT - 8, y + BAR - 2, f"{strategy}, {rail}", "label", "end")
        draw.rect(LEFT, y, width, BAR, colour(report, strategy))
        draw.text(LEFT + width + 6, y + BAR - 2, f"{spent_mj:.1f}", "note")
    draw.text(LEFT + SPAN / 2, height - 6, "mJ a token", "tick", "middle")
    return str(draw)


def cost_chart(costs: CostTable) -> str:
    """What a forward of n rows takes, alone and beside the drafter, at each measured context."""
    contexts = sorted({point.context for point in costs.verifier})
    widest = max(point.rows for point in costs.verifier)
    marks = ticks(max(max(point.alone_ms, point.beside_ms) for point in costs.verifier))
    draw = Drawing(WIDTH, HEIGHT, "What a forward of the verifier takes, by its rows", "costs")
    depth = HEIGHT - TOP - BOTTOM

    def at(rows: int, took_ms: float) -> tuple[float, float]:
        x = LEFT + SPAN * (rows - 1) / max(1, widest - 1)
        return x, HEIGHT - BOTTOM - depth * took_ms / marks[-1]

    for mark in marks:
        y = at(1, mark)[1]
        draw.line(LEFT, y, LEFT + SPAN, y, "grid")
        draw.text(LEFT - 8, y + 4, f"{mark:g} ms", "tick", "end")
    for rows in sorted({point.rows for point in costs.verifier}):
        draw.text(at(rows, 0)[0], HEIGHT - BOTTOM + 18, str(rows), "tick", "middle")
    draw.text(LEFT + SPAN / 2, HEIGHT - 6, "rows of a forward", "tick", "middle")
    shown = []
    for index, context in enumerate(contexts):
        points = sorted(
            (point for point in costs.verifier if point.context == context),
            key=lambda point: point.rows,
        )
        kind = f"c{index % 8}"
        for point in points:
            draw.dot(*at(point.rows, point.alone_ms), kind, _cost_tip(point))
        draw.path([at(point.rows, point.alone_ms) for point in points], f"curve {kind}")
        draw.path([at(point.rows, point.beside_ms) for point in points], f"curve dashed {kind}")
        shown.append((f"{context} tokens of context", kind))
    return str(draw) + legend(shown)


def _cost_tip(point: CostPoint) -> str:
    return (
        f"{point.rows} rows at {point.context} tokens: {point.alone_ms:.1f} ms alone, "
        f"{point.beside_ms:.1f} beside the drafter"
    )
