"""Which strategy is in force under `auto`: by measured rates, with the chance to be wrong small.

Plain decoding's rate is known from the costs, so it needs no trial. A way to speculate is left when
even an optimistic reading of its rounds is slower than plain: drafting gives way to doing without a
drafter, if that has not failed too; else speculation is parked, and probed again after a while that
doubles from one failure to the next. Drafting beside the verifier, drafting in turn and not
drafting are tried against each other only where the two units slow each other down: else
overlapping cannot lose. There the two ways to draft take turns in being probed, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Active = Literal["plain", "sequential", "pipelined", "weightless", "lookup", "lookahead", "jacobi"]
DRAFTING: tuple[Active, ...] = ("pipelined", "sequential")
"""Those that use a drafter."""

LEAST_ROUNDS = 3
"""A trial is not judged before: one round says nothing about the next."""
WARM_UP_ROUNDS = 16
"""Rounds before a trial begins all the same when no drafter step ends: the drafter may first have
to catch up with what was decoded plainly (1,024 tokens took it as long as ten forwards)."""
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
        """SPREAD standard errors above `rate`."""
        return self.rate + SPREAD * self._error

    @property
    def pessimistic_rate(self) -> float:
        """SPREAD standard errors below `rate`."""
        return self.rate - SPREAD * self._error

    @property
    def _error(self) -> float:
        """Standard error of `rate`; a round deviates by LEAST_DEVIATION at least."""
        mean = self.tokens / self.rounds
        deviation = math.sqrt(max(LEAST_DEVIATION**2, self.squares / self.rounds - mean * mean))
        return deviation * math.sqrt(self.rounds) / self.elapsed_ms


class Arbiter:
    """Decides for one session; `strategy` is what is in force."""

    def __init__(self) -> None:
        self.strategy: Active = "pipelined"
        self.rows = 4.0
        """Of a speculative forward, the latest on average."""
        self._ways: tuple[Active, ...] = ("pipelined", "sequential")
        self._champion: Active = "pipelined"
        self._failed: set[Active] = set()
        self._rival_name: Active = "sequential"
        self._trial = Trial()
        self._rival = Trial()
        self._pause_tokens = FIRST_PAUSE_TOKENS
        self._pause_left = 0
        self._patience = FIRST_CHALLENGE_ROUNDS
        self._since_challenge = 0
        self._warm_up_left = WARM_UP_ROUNDS

    def begin(self, ways: Sequence[Active]) -> None:
        """An answer that can be speculated for in these `ways`, the most promising first."""
        if not ways:
            return
        self._ways = tuple(ways)
        if self._champion not in ways:
            self._champion = ways[0]
        if not self.parked and self.strategy not in ways:
            self._crown(self._champion)

    def _crown(self, way: Active) -> None:
        self.strategy = self._champion = way
        self._trial = Trial()
        self._warm_up_left = WARM_UP_ROUNDS if way in DRAFTING else 0

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

    def learn(
        self, tokens: int, elapsed_ms: float, plain_ms: float, slowdown: float, drafted: bool
    ) -> None:
        """A round is over.

        plain_ms: of a token. slowdown: of a forward beside the drafter. drafted: whether a drafter
        step ended in it.
        """
        if self.parked:
            self._pause_left -= tokens
            if self._pause_left <= 0:
                self._failed.clear()
                self._crown(self._champion)
        elif self._warm_up_left > 0:
            self._warm_up_left = 0 if drafted else self._warm_up_left - 1
        elif self.strategy == self._champion:
            self._trial.add(tokens, elapsed_ms)
            self._defend(1 / plain_ms, slowdown)
        else:
            self._rival.add(tokens, elapsed_ms)
            self._judge_rival()

    def _defend(self, plain_rate: float, slowdown: float) -> None:
        trial = self._trial
        self._since_challenge += 1
        established = trial.count >= ENOUGH_ROUNDS
        rate = trial.rate if established else trial.optimistic_rate
        if trial.count >= LEAST_ROUNDS and rate < plain_rate:
            self._give_way(slowdown)
        elif established:
            self._pause_tokens = FIRST_PAUSE_TOKENS
            drafts = self._champion in DRAFTING
            worth = slowdown >= WORTH_CHALLENGING or not drafts
            if worth and self._since_challenge >= self._patience:
                self._since_challenge = 0
                self._challenge()

    def _give_way(self, slowdown: float) -> None:
        """Do without the drafter if that has not failed since the last pause; else park."""
        self._failed.add(self._champion)
        if "weightless" in self._ways and "weightless" not in self._failed:
            self._crown("weightless")
        else:
            self._park(slowdown)

    def _park(self, slowdown: float) -> None:
        self.strategy = "plain"
        self._pause_left = self._pause_tokens
        self._pause_tokens = min(2 * self._pause_tokens, LONGEST_PAUSE_TOKENS)
        drafting = [way for way in self._ways if way in DRAFTING]
        if self._champion not in DRAFTING and drafting:
            self._champion = drafting[0]
        elif slowdown >= WORTH_CHALLENGING and drafting:
            self._champion = drafting[(drafting.index(self._champion) + 1) % len(drafting)]

    def _challenge(self) -> None:
        """Try the way after the one that was tried last."""
        others = [way for way in self._ways if way != self._champion]
        if others:
            last = others.index(self._rival_name) if self._rival_name in others else -1
            self._rival_name = self.strategy = others[(last + 1) % len(others)]
            self._rival = Trial()

    def _judge_rival(self) -> None:
        rival, champion = self._rival, self._trial
        if rival.count < LEAST_ROUNDS:
            return
        lost = rival.optimistic_rate < champion.rate
        if not lost and rival.count < CHALLENGE_ROUNDS:
            return
        self._patience *= 2
        if rival.pessimistic_rate > champion.rate:
            self._champion, self._trial = self._rival_name, rival
        self.strategy = self._champion
