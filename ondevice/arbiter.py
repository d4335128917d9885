"""Which strategy is in force under `auto`: by measured rates, with the chance to be wrong small.

Plain decoding's rate is known from the costs, so it needs no trial. A way to speculate gives way to
the next one when even an optimistic reading of its rounds is slower than plain; when all did,
speculation is parked, and probed again after a while that doubles from one failure to the next.
Drafting beside the verifier is tried against drafting in turn, and against none, only where the two
units slow each other down: else overlapping cannot lose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Active = Literal["plain", "sequential", "pipelined", "weightless", "lookup", "lookahead", "jacobi"]

LEAST_ROUNDS = 4
"""A trial is not judged before: one round says nothing about the next."""
ENOUGH_ROUNDS = 48
"""From here on speculation must be better than plain, not only perhaps better: it costs energy."""
WINDOW_ROUNDS = 64.0
"""Rounds until an old one weighs 1/e: costs and acceptance change within an answer."""
SPREAD = 1.0
"""Standard errors of leeway in judging a trial."""
LEAST_DEVIATION = 0.3
"""Tokens. A few rounds that happen to be alike prove nothing."""
FIRST_PAUSE_TOKENS, LONGEST_PAUSE_TOKENS = 64, 1024
"""Plain tokens between two probes. A probe of a useless drafter loses about 2 tokens' time."""
FIRST_CHALLENGE_ROUNDS, CHALLENGE_ROUNDS = 96, 12
"""Rounds before the other way to speculate is tried, and of the trial; the wait doubles."""
WORTH_CHALLENGING = 1.05
"""Slow-down of the verifier beside the drafter from which drafting in turn may win."""


@dataclass(slots=True)
class Trial:
    """Rounds of one strategy: how many tokens in how much time.

    count: rounds; rounds: the same with old ones fading, like all other figures.
    """

    count: int = 0
    rounds: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    elapsed_ms: float = 0.0

    def add(self, tokens: int, elapsed_ms: float) -> None:
        """Take in one round."""
        self.count += 1
        keep = 1 - 1 / WINDOW_ROUNDS
        self.rounds = self.rounds * keep + 1
        self.tokens = self.tokens * keep + tokens
        self.squares = self.squares * keep + tokens * tokens
        self.elapsed_ms = self.elapsed_ms * keep + elapsed_ms

    @property
    def rate(self) -> float:
        """Tokens per millisecond; 0 before the first round."""
        return self.tokens / self.elapsed_ms if self.elapsed_ms > 0 else 0.0

    @property
    def optimistic_rate(self) -> float:
        """SPREAD standard errors above `rate`; a round deviates by LEAST_DEVIATION at least."""
        mean = self.tokens / self.rounds
        deviation = math.sqrt(max(LEAST_DEVIATION**2, self.squares / self.rounds - mean * mean))
        more = SPREAD * deviation * math.sqrt(self.rounds)
        return (self.tokens + more) / self.elapsed_ms


class Arbiter:
    """Decides for one session; `strategy` is what is in force."""

    def __init__(self) -> None:
        self.strategy: Active = "pipelined"
        self.rows = 4.0
        """Of a speculative forward, the latest on average."""
        self._ways: tuple[Active, ...] = ("pipelined", "sequential")
        self._champion: Active = "pipelined"
        self._failed: set[Active] = set()
        self._rates: dict[Active, float] = {}
        self._rival_name: Active = "sequential"
        self._trial = Trial()
        self._rival = Trial()
        self._pause_tokens = FIRST_PAUSE_TOKENS
        self._pause_left = 0
        self._patience = FIRST_CHALLENGE_ROUNDS
        self._since_challenge = 0

    def begin(self, ways: Sequence[Active]) -> None:
        """An answer that can be speculated for in these `ways`, the most promising first."""
        self._ways = tuple(ways)
        if self._champion not in ways or (not self.parked and self.strategy not in ways):
            self._crown(ways[0])

    def _crown(self, way: Active) -> None:
        self.strategy = self._champion = way
        self._trial = Trial()

    @property
    def parked(self) -> bool:
        """Whether speculation does not pay at the moment."""
        return self.strategy == "plain"

    @property
    def run_tokens(self) -> int:
        """How many tokens to decode plainly before the next probe."""
        return max(1, self._pause_left)

    @property
    def rate(self) -> float:
        """Tokens per millisecond of the latest speculation."""
        return self._trial.rate

    def learn(self, tokens: int, elapsed_ms: float, plain_ms: float, slowdown: float) -> None:
        """A round is over. plain_ms: of a token; slowdown: of a forward beside the drafter."""
        if self.parked:
            self._pause_left -= tokens
            if self._pause_left <= 0:
                self._failed.clear()
                best = max(self._ways, key=lambda way: self._rates.get(way, 0.0))
                self._crown(best)
        elif self.strategy == self._champion:
            self._trial.add(tokens, elapsed_ms)
            self._defend(1 / plain_ms, slowdown)
        else:
            self._rival.add(tokens, elapsed_ms)
            self._judge_rival()

    def _defend(self, plain_rate: float, slowdown: float) -> None:
        trial = self._trial
        self._since_challenge += 1
        if trial.count >= LEAST_ROUNDS and trial.optimistic_rate < plain_rate:
            self._give_way()
        elif trial.count >= ENOUGH_ROUNDS:
            self._pause_tokens = FIRST_PAUSE_TOKENS
            if trial.rate < plain_rate:
                self._give_way()
        if slowdown >= WORTH_CHALLENGING and self._since_challenge >= self._patience:
            self._since_challenge = 0
            rival = self._next_rival()
            if not self.parked and rival is not None:
                self.strategy, self._rival_name, self._rival = rival, rival, Trial()

    def _give_way(self) -> None:
        """Try the next way that has not failed since the last pause; park when all have."""
        self._rates[self._champion] = self._trial.rate
        self._failed.add(self._champion)
        # Where drafting beside the verifier is slower than plain, in turn is too: no gain from
        # overlapping makes up for a drafter that is seldom right.
        if self._champion == "pipelined":
            self._failed.add("sequential")
        untried = [way for way in self._ways if way not in self._failed]
        if untried:
            self._crown(untried[0])
        else:
            self._park()

    def _park(self) -> None:
        self.strategy = "plain"
        self._pause_left = self._pause_tokens
        self._pause_tokens = min(2 * self._pause_tokens, LONGEST_PAUSE_TOKENS)

    def _next_rival(self) -> Active | None:
        """The way after the one that was tried last."""
        others = [way for way in self._ways if way != self._champion]
        if not others:
            return None
        last = others.index(self._rival_name) if self._rival_name in others else -1
        return others[(last + 1) % len(others)]

    def _judge_rival(self) -> None:
        rival, champion = self._rival, self._trial
        if rival.count < LEAST_ROUNDS:
            return
        lost = rival.optimistic_rate < champion.rate
        if not lost and rival.count < CHALLENGE_ROUNDS:
            return
        self._patience *= 2
        if rival.rate > champion.rate:
            self._champion, self._trial = self._rival_name, rival
        self.strategy = self._champion
