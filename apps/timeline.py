"""The first seconds of an answer under every strategy, as lanes that can be zoomed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ondevice.apps.race import Measured
from ondevice.apps.svg import Drawing, legend, ticks

SECONDS = 3.0
WIDTH, LEFT, RIGHT, TOP = 960.0, 150.0, 36.0, 8.0
LANE, BAR, GAP, AXIS = 20.0, 15.0, 10.0, 26.0
ROUNDS_TOLD = 40
"""Of each strategy in the table beside the drawing."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of a lane, in ms from the prompt on. lane: 0 the verifier's, 1 the drafter's."""

    lane: int
    kind: str
    start_ms: float
    end_ms: float
    tip: str


def chosen(measured: Sequence[Measured]) -> list[Measured]:
    """One answer of each strategy, to the first prompt that most of them answered."""
    by_prompt: dict[tuple[str, int], list[Measured]] = {}
    for each in measured:
        if each.run.records:
            by_prompt.setdefault((each.task.question.id, each.repeat), []).append(each)
    together = max(by_prompt.values(), key=len, default=[])
    order = {name: place for place, name in enumerate(dict.fromkeys(e.side for e in measured))}
    return sorted(together, key=lambda each: order[each.side])


def bars(measured: Measured) -> Iterator[Bar]:
    """Prefill, forwards and drafter steps that begin within the first seconds."""
    records, origin_ns = measured.run.records, measured.run.start_ns

    def ms(at_ns: int) -> float:
        return (at_ns - origin_ns) / 1e6

    yield Bar(0, "prefill", 0.0, ms(records[0].start_ns), "prefill of the prompt")
    for record in records:
        if ms(record.start_ns) < SECONDS * 1e3:
            tip = (
                f"forward of {record.rows} rows: {record.accepted} of {record.drafted} draft "
                f"tokens accepted, {record.committed} tokens"
            )
            kind = "verifier" if record.drafted else "plainrun"
            yield Bar(0, kind, ms(record.start_ns), ms(record.end_ns), tip)
        for step in record.drafts:
            if 0 <= ms(step.start_ns) < SECONDS * 1e3:
                tip = f"drafter step of {step.rows} rows, {step.kept} nodes kept"
                yield Bar(1, "drafter", ms(step.start_ns), ms(step.end_ns), tip)


def timeline(answers: Sequence[Measured]) -> str:
    """The drawing. Bars carry their times, from which the page's script zooms."""
    found = [(each.side, list(bars(each))) for each in answers]
    last_ms = max((bar.end_ms for _, lanes in found for bar in lanes), default=1.0)
    until_ms = min(SECONDS * 1e3, last_ms)
    height = TOP + len(found) * (2 * LANE + GAP) + AXIS
    span = WIDTH - LEFT - RIGHT
    draw = Drawing(WIDTH, height, "Timeline: what verifier and drafter did when", "timeline")
    floor = height - AXIS
    draw.raw(
        f'<defs><clipPath id="lanes"><rect x="{LEFT}" y="0" width="{span}" height="{height}"/>'
        f'</clipPath></defs><g class="ticks" data-floor="{floor}">'
    )
    for mark in ticks(until_ms):
        if mark <= until_ms:
            x = LEFT + span * mark / until_ms
            draw.line(x, TOP, x, floor, "grid")
            draw.text(x, floor + 16, f"{mark:g} ms", "tick", "middle")
    draw.raw("</g>")
    for index, (side, _) in enumerate(found):
        y = TOP + index * (2 * LANE + GAP)
        draw.text(LEFT - 8, y + BAR - 3, f"{side}, verifier", "label", "end")
        draw.text(LEFT - 8, y + LANE + BAR - 3, "drafter", "label", "end")
    draw.raw(
        f'<g clip-path="url(#lanes)" class="bars" data-left="{LEFT}" data-span="{span}" '
        f'data-until="{until_ms:.3f}">'
    )
    for index, (_, lanes) in enumerate(found):
        for bar in lanes:
            y = TOP + index * (2 * LANE + GAP) + bar.lane * LANE
            x, width = LEFT + span * bar.start_ms / until_ms, bar.end_ms - bar.start_ms
            times = {"data-s": f"{bar.start_ms:.3f}", "data-e": f"{bar.end_ms:.3f}"}
            draw.rect(x, y, span * width / until_ms, BAR, bar.kind, tip=bar.tip, **times)
    draw.raw("</g>")
    return str(draw)


def timeline_legend() -> str:
    """What the colours of the bars mean."""
    return legend(
        [
            ("prefill", "prefill"),
            ("forward over draft tokens", "verifier"),
            ("forward of one row", "plainrun"),
            ("drafter step", "drafter"),
        ]
    )


def rounds_told(answers: Sequence[Measured]) -> list[list[str]]:
    """Strategy, start, length and result of the first rounds: the drawing in words."""
    rows = []
    for each in answers:
        for record in each.run.records[:ROUNDS_TOLD]:
            start_ms = (record.start_ns - each.run.start_ns) / 1e6
            took_ms = (record.end_ns - record.start_ns) / 1e6
            taken = f"{record.accepted} of {record.drafted}"
            rows.append(
                [each.side, f"{start_ms:.1f}", f"{took_ms:.1f}", taken, str(record.committed)]
            )
    return rows
