"""Several sessions at once: where speculation stops paying, and what `auto` does about it.

With n sessions both units are shared. The verifier's forwards of one session run in the gaps that
another leaves, so waiting for a drafter costs less; but a forward over draft rows takes time from
the others, and so does a drafter that disturbs the verifier. Measured is the rate of all sessions
together, against plain decoding with as many.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil

from ondevice.apps.figures import REFERENCE
from ondevice.apps.race import Spread, Task, rotated
from ondevice.apps.sides import OurSide, Run
from ondevice.errors import BadRequest

MOST_SESSIONS = 32


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One strategy with `sessions` at once, over rounds of as many prompts.

    tok_s: of all sessions together, prefill included. ratio: that over plain's of the same round.
    speculating: share of the forwards that had draft rows. reasons: what the answers said, most
    often first.
    """

    sessions: int
    strategy: str
    rounds: int
    tok_s: Spread | None
    ratio: Spread | None
    speculating: float | None
    reasons: list[str]


def read_sessions(text: str) -> tuple[int, ...]:
    """Numbers of sessions as typed, such as "1,2,4"; raises BadRequest for anything else."""
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = ()
    if not counts or not all(1 <= count <= MOST_SESSIONS for count in counts):
        raise BadRequest(
            f"--concurrency takes numbers of sessions from 1 to {MOST_SESSIONS}, such as 1,2,4,8, "
            f"got {text!r}"
        )
    return counts


LEAST_PROMPTS = 6
"""Answered at every load at least: where fewer sessions run at once, they take more rounds."""


def rounds_at(sessions: int, loads: Sequence[int]) -> int:
    """Rounds of `sessions` prompts that are measured, once: at least LEAST_PROMPTS prompts."""
    return ceil(max(LEAST_PROMPTS, *loads) / sessions)


def answers_at(sessions: int, loads: Sequence[int], repeats: int) -> int:
    """Answers of one side at this load."""
    return rounds_at(sessions, loads) * sessions * repeats


def measure_loads(
    sides: Sequence[OurSide],
    tasks: Sequence[Task],
    loads: Sequence[int],
    max_tokens: int,
    repeats: int,
    on_answer: Callable[[], None] = lambda: None,
    deadline: float | None = None,
) -> Iterator[list[LoadFigures]]:
    """The figures of every side, for one number of sessions after the other; sides in turn.

    deadline: on `time.monotonic`; no round of all sides begins that would not be over by then, were
    it as slow as the slowest so far, and a load whose rounds are not all done has no figures.
    Raises what a side raises.
    """
    slowest = 0.0
    for count in loads:
        rounds: dict[str, list[tuple[float, list[Run]]]] = {side.name: [] for side in sides}
        for turn in range(rounds_at(count, loads) * repeats):
            began = time.monotonic()
            if deadline is not None and began + slowest > deadline:
                return
            prompts = [tasks[(turn * count + place) % len(tasks)] for place in range(count)]
            for side in rotated(sides, turn):
                rounds[side.name].append(at_once(side, prompts, max_tokens))
                for _ in prompts:
                    on_answer()
            slowest = max(slowest, time.monotonic() - began)
        plain = [rate for rate, _ in rounds.get(REFERENCE, [])]
        yield [_figures(count, side.name, rounds[side.name], plain) for side in sides]


def at_once(side: OurSide, tasks: Sequence[Task], max_tokens: int) -> tuple[float, list[Run]]:
    """Tokens a second of all `tasks` together, answered at the same time, and the answers."""
    ready = threading.Barrier(len(tasks) + 1)

    def answer(task: Task) -> Run:
        ready.wait()
        return side.answer(task.prompt, max_tokens)

    with ThreadPoolExecutor(len(tasks)) as threads:
        answers = [threads.submit(answer, task) for task in tasks]
        ready.wait()
        began = time.monotonic()
        runs = [each.result() for each in answers]
    # A session's end (its units settle) is not decoding.
    last_ns = max(run.arrivals[-1].at_ns for run in runs if run.arrivals)
    tokens = sum(len(run.tokens) for run in runs)
    return tokens / max(1e-9, last_ns / 1e9 - began), runs


def _figures(
    sessions: int,
    strategy: str,
    rounds: Sequence[tuple[float, Sequence[Run]]],
    plain: Sequence[float],
) -> LoadFigures:
    rates = [rate for rate, _ in rounds]
    runs = [run for _, answers in rounds for run in answers]
    records = [record for run in runs for record in run.records]
    drafted = sum(record.drafted > 0 for record in records)
    reasons = Counter(run.answer.stats.reason for run in runs if run.answer is not None)
    return LoadFigures(
        sessions=sessions,
        strategy=strategy,
        rounds=len(rounds),
        tok_s=Spread.of(rates),
        ratio=Spread.of([rate / base for rate, base in zip(rates, plain, strict=False)]),
        speculating=drafted / len(records) if records else None,
        reasons=[reason for reason, _ in reasons.most_common()],
    )


def verdicts(loads: Sequence[LoadFigures]) -> list[str]:
    """For each way of speculating: up to which load it paid here; and what `auto` did there."""
    lines = []
    for strategy in dict.fromkeys(load.strategy for load in loads):
        ours = [load for load in loads if load.strategy == strategy and load.ratio is not None]
        if strategy == REFERENCE or not ours:
            continue
        lines.append(f"{strategy} {_until_when(ours)}: {', '.join(map(_at, ours))}")
        if strategy == "auto":
            lines += [
                f"auto with {_sessions(load.sessions)}, by its own measure: {load.reasons[0]}"
                for load in ours
                if load.reasons
            ]
    return lines


def _until_when(ours: Sequence[LoadFigures]) -> str:
    pays = {load.sessions for load in ours if load.ratio is not None and load.ratio.median > 1}
    measured = sorted(load.sessions for load in ours)
    beyond = [count for count in measured if pays and count > max(pays)]
    if len(pays) == len(measured):
        return "pays at every load that was measured"
    if not pays:
        return "pays at no load that was measured"
    if beyond:
        return f"stops paying at {beyond[0]} sessions"
    fails = ", ".join(str(count) for count in measured if count not in pays)
    return f"pays with {', '.join(map(str, sorted(pays)))} sessions, not with {fails}"


def _at(load: LoadFigures) -> str:
    assert load.ratio is not None
    told = f"{load.ratio.median:.2f} times plain with {_sessions(load.sessions)}"
    if load.strategy != "auto" or load.speculating is None:
        return told
    return f"{told} (drafts in {load.speculating:.0%} of its forwards)"


def _sessions(count: int) -> str:
    return f"{count} session{'s' if count != 1 else ''}"
