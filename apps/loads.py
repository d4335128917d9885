"""Several sessions at once: where speculation stops paying, and what `auto` does about it.

With n sessions both units are shared. The verifier's forwards of one session run in the gaps that
another leaves, so waiting for a drafter costs less; but a forward over draft rows takes time from
the others, and so does a drafter that disturbs the verifier. Measured is the rate of all sessions
together, against plain decoding with as many.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ondevice.apps.figures import REFERENCE
from ondevice.apps.race import Spread, Task, rotated
from ondevice.apps.sides import OurSide, Run
from ondevice.errors import BadRequest

MOST_SESSIONS = 32


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One strategy with `sessions` at once, over the rounds of prompts.

    tok_s: of all sessions together, prefill included. ratio: that over plain's of the same round.
    speculating: share of the forwards that had draft rows. reasons: what the answers said.
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


def measure_loads(
    sides: Sequence[OurSide],
    tasks: Sequence[Task],
    sessions: Sequence[int],
    max_tokens: int,
    repeats: int,
    on_round: Callable[[], None] = lambda: None,
) -> list[LoadFigures]:
    """Every side at every load, `repeats` rounds, sides in turn. Raises what a side raises."""
    found = []
    for count in sessions:
        prompts = [tasks[index % len(tasks)] for index in range(count)]
        rounds: dict[str, list[tuple[float, list[Run]]]] = {side.name: [] for side in sides}
        for turn in range(repeats):
            for side in rotated(sides, turn):
                rounds[side.name].append(at_once(side, prompts, max_tokens))
                on_round()
        plain = [rate for rate, _ in rounds.get(REFERENCE, [])]
        found += [_figures(count, side.name, rounds[side.name], plain) for side in sides]
    return found


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
    reasons = dict.fromkeys(run.answer.stats.reason for run in runs if run.answer is not None)
    return LoadFigures(
        sessions=sessions,
        strategy=strategy,
        rounds=len(rounds),
        tok_s=Spread.of(rates),
        ratio=Spread.of([rate / base for rate, base in zip(rates, plain, strict=False)]),
        speculating=drafted / len(records) if records else None,
        reasons=list(reasons),
    )


def verdicts(loads: Sequence[LoadFigures]) -> list[str]:
    """For each way of speculating: up to which load it paid here; and what `auto` did there."""
    lines = []
    for strategy in dict.fromkeys(load.strategy for load in loads):
        ours = [load for load in loads if load.strategy == strategy and load.ratio is not None]
        if strategy == REFERENCE or not ours:
            continue
        pays = [load.sessions for load in ours if load.ratio is not None and load.ratio.median > 1]
        fails = [load.sessions for load in ours if load.sessions not in pays]
        if strategy == "auto":
            shares = ", ".join(
                f"{load.speculating:.0%} at {load.sessions}"
                for load in ours
                if load.speculating is not None
            )
            lines.append(f"auto speculated in {shares} sessions")
        elif not fails:
            lines.append(f"{strategy} paid at every load up to {pays[-1]} sessions")
        elif not pays:
            lines.append(f"{strategy} paid at no load")
        else:
            stops = min((n for n in fails if n > min(pays)), default=fails[0])
            lines.append(f"{strategy} stopped paying at {stops} sessions")
    return lines
