"""What recording costs: decoding with every round's record kept, against dropping each at once.

    uv run python tests/benchmarks/recording.py [PAIR] [--prompts 6] [--max-tokens 64] [--repeats 5]
        [--strategy pipelined]

Demand of `ondevice profile`: under 1 % of the time of decoding. The coordinator makes a record of
every round in any case, since costs and policy learn from it; that time is measured apart, on the
rounds that were recorded: booking one anew, over the mean time of a round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import cast

from ondevice import blas

blas.prepare()  # before MLX is imported

from ondevice.apps.bench import Load, make_tasks  # noqa: E402
from ondevice.apps.counting import counting  # noqa: E402
from ondevice.apps.opening import open_engine  # noqa: E402
from ondevice.apps.questions import own_questions, spread  # noqa: E402
from ondevice.apps.race import Measured, Standing, race  # noqa: E402
from ondevice.apps.sides import Arrival, OurSide, Run, settle  # noqa: E402
from ondevice.costs import ASSUMED, CostModel  # noqa: E402
from ondevice.engine import Engine  # noqa: E402
from ondevice.ledger import Ledger  # noqa: E402
from ondevice.models.pairs import default_pair  # noqa: E402
from ondevice.records import NodeToken, StartVerify, StepRecord, Verdict, VerifyRow  # noqa: E402
from ondevice.schedule import Strategy  # noqa: E402
from ondevice.session import Options  # noqa: E402
from ondevice.tree import Rerooted  # noqa: E402

DEMAND = 0.01
BOOKED = 200
"""Rounds that are booked once more."""


class Forgetful:
    """The same schedule; its records are dropped as they come."""

    def __init__(self, engine: Engine, strategy: Strategy) -> None:
        self.name = "off"
        self._engine, self._strategy = engine, strategy

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """As `OurSide.answer`, but for what is kept."""
        arrivals: list[Arrival] = []
        tokens: list[int] = []
        with self._engine.session() as session:
            start_ns = time.monotonic_ns()
            options = Options(max_tokens=max_tokens, strategy=self._strategy)
            for piece in session.stream(prompt, options):
                if piece.tokens:
                    arrivals.append(Arrival(time.monotonic_ns(), len(piece.tokens)))
                    tokens += [token.token for token in piece.tokens]
        settle(self._engine)
        return Run(tuple(tokens), start_ns, tuple(arrivals))


def booking_ms(record: StepRecord, times: int = 200) -> float:
    """Time to book a round of the same size once more: record, levels, proposers."""
    rows = [VerifyRow(0, 0, -1)]
    for index, level in enumerate(record.drafted_at, start=1):
        rows.append(VerifyRow(index, index, index - 1 if level > 1 else 0))
    verdict = Verdict(
        0,
        tuple(range(1, record.accepted + 1)),
        (0,) * record.committed,
        (0.0,) * record.committed,
        record.start_ns,
        record.end_ns,
    )
    committed = (NodeToken(1, 1),) * record.committed
    rerooted = Rerooted(committed, record.committed, (), record.outcomes, record.offered_by)
    command = StartVerify(0, tuple(rows), "coupled")
    ledger = Ledger(CostModel(ASSUMED))
    by_row, taken = ("", *record.drafted_by), record.accepted_by
    began = time.perf_counter()
    for _ in range(times):
        ledger.close_round("pipelined", verdict, command, rerooted, 0, 0, taken, by_row)
    return (time.perf_counter() - began) / times * 1e3


def booking_share(measured: Sequence[Measured]) -> float:
    """Of the time of all recorded rounds."""
    records = [record for each in measured for record in each.run.records]
    took_ms = sum((record.end_ns - record.start_ns) / 1e6 for record in records)
    some = records[:BOOKED]
    booked_ms = sum(booking_ms(record) for record in some) / len(some)
    return booked_ms / (took_ms / len(records))


def main() -> int:
    """Print medians with quartiles; 1 when the demand is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", nargs="?", default=default_pair())
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--strategy", default="pipelined")
    args = parser.parse_args()
    load = Load(spread(own_questions(), args.prompts), args.max_tokens, args.repeats)
    strategy = cast(Strategy, args.strategy)
    with open_engine(args.pair) as engine:
        sides = [Forgetful(engine, strategy), OurSide(engine, strategy, name="on")]
        tasks = make_tasks(engine, load)
        with counting("recording", 2 * len(tasks) * load.repeats) as count:
            measured = race(sides, tasks, load.max_tokens, load.repeats, count)
    off, on = (
        Standing(name, tuple(each for each in measured if each.side == name), ())
        for name in ("off", "on")
    )
    ratio = on.ratio_to(off)
    assert ratio is not None
    cost = 1 - statistics.median(on.ratios_to(off).values())
    booked = booking_share(on.runs)
    print(f"rate with records over without: {ratio.median:.4f} ({ratio.low:.4f}-{ratio.high:.4f})")
    print(f"keeping them costs {cost:.2%}, booking them {booked:.2%} of a round")
    return 0 if cost < DEMAND and booked < DEMAND else 1


if __name__ == "__main__":
    sys.exit(main())
