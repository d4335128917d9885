"""The same prompts under every strategy: where their tokens part from plain decoding, and why."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ondevice.apps.margin import NEAR_TIE, margin
from ondevice.apps.terminal import figure
from ondevice.engine import Engine
from ondevice.sampling import SamplingParams
from ondevice.schedule import STRATEGIES, Sizes, Strategy
from ondevice.session import Answer, Options

SEED = 7
LAWS = (SamplingParams(), SamplingParams(temperature=0.8, seed=SEED))
SPECULATING: tuple[Strategy, ...] = tuple(name for name in STRATEGIES if name != "plain")
SIZES = Sizes(verify_rows=8, depth=4)
"""Of a set strategy's rounds: a check must speculate also where that does not pay."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a text first parts from the plain one.

    strategy: what wrote the other text. position: index into the answer. plain_token, token: None
    where that answer had ended. margin: see `margin`; None when there is no token to score.
    """

    prompt: str
    temperature: float
    strategy: str
    position: int
    plain_token: int | None
    token: int | None
    margin: float | None

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin is not None and self.margin < NEAR_TIE


@dataclass(slots=True)
class Tally:
    """One strategy at one temperature over all prompts.

    rounding: the largest difference of a token's log-probability to that of the plain run, where
    a row was computed alone. notes: what the answers said beside the strategy that was set.
    """

    temperature: float
    strategy: Strategy
    texts: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    rounding: float = 0.0
    rates_tok_s: list[float] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)

    def add(self, answer: Answer) -> None:
        """Count `answer`."""
        stats = answer.stats
        self.texts += 1
        self.tokens += len(answer.token_ids)
        self.steps += stats.num_spec_steps
        self.drafted += stats.num_draft_tokens
        self.accepted += stats.num_accepted_draft_tokens
        if stats.decode_tok_s is not None:
            self.rates_tok_s.append(stats.decode_tok_s)
        if self.strategy != "auto" and stats.reason != f"{self.strategy}, as set":
            self.notes.add(stats.reason)

    @property
    def near_ties(self) -> int:
        """Texts that part at a near-tie."""
        return sum(difference.near_tie for difference in self.differences)

    @property
    def faults(self) -> int:
        """Texts that part where they must not."""
        return len(self.differences) - self.near_ties

    @property
    def speculated(self) -> bool:
        """Whether any draft token was put before the verifier, where the strategy demands it.

        Without one nothing was tested. `auto` may find that speculation does not pay, `lookup` and
        `lookahead` that a text repeats nothing.
        """
        return self.strategy in ("plain", "auto", "lookup", "lookahead") or self.drafted > 0

    @property
    def median_tok_s(self) -> float | None:
        """Of the answers' decoding rates."""
        return statistics.median(self.rates_tok_s) if self.rates_tok_s else None


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found."""

    tallies: tuple[Tally, ...]

    @property
    def passed(self) -> bool:
        """No text parts from the plain one but at near-ties, and all strategies did speculate."""
        return all(tally.faults == 0 and tally.speculated for tally in self.tallies)

    @property
    def differences(self) -> list[Difference]:
        """Of all strategies."""
        return [difference for tally in self.tallies for difference in tally.differences]

    @property
    def rounding(self) -> float:
        """The largest of all tallies."""
        return max(tally.rounding for tally in self.tallies)


def compare(
    engine: Engine,
    prompts: Sequence[str],
    max_tokens: int,
    on_text: Callable[[], None] = lambda: None,
) -> Report:
    """Every prompt under every law and strategy; `on_text` is called after each answer.

    Raises as `Session.generate` does.
    """
    tallies: list[Tally] = []
    for law in LAWS:
        of_law = {name: Tally(law.temperature, name) for name in STRATEGIES}
        tallies += of_law.values()
        for prompt in prompts:
            plain = engine.generate(prompt, Options(law, max_tokens, strategy="plain"))
            of_law["plain"].add(plain)
            on_text()
            for name in SPECULATING:
                sizes = None if name == "auto" else SIZES
                options = Options(law, max_tokens, strategy=name, sizes=sizes)
                answer = engine.generate(prompt, options)
                of_law[name].add(answer)
                _judge(engine, prompt, law, plain, answer, of_law[name])
                on_text()
    return Report(tuple(tallies))


def answers_needed(prompts: Sequence[str]) -> int:
    """How often `compare` calls `on_text`."""
    return len(LAWS) * len(STRATEGIES) * len(prompts)


def _judge(
    engine: Engine, prompt: str, law: SamplingParams, plain: Answer, answer: Answer, tally: Tally
) -> None:
    """Enter into `tally` how `answer` differs from `plain`."""
    same = common_length(plain.token_ids, answer.token_ids)
    for one, other in zip(answer.tokens[:same], plain.tokens[:same], strict=True):
        tally.rounding = max(tally.rounding, abs(one.logprob - other.logprob))
    found = difference(engine, prompt, law, tally.strategy, plain.token_ids, answer.token_ids)
    if found is not None:
        tally.differences.append(found)


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens the two have in common from their start."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def difference(
    engine: Engine,
    prompt: str,
    law: SamplingParams,
    strategy: str,
    plain: Sequence[int],
    tokens: Sequence[int],
) -> Difference | None:
    """Where `tokens`, an answer to `prompt`, part from `plain`; None when they do not.

    The margin is computed with `engine`, which decodes the common part again.
    """
    same = common_length(plain, tokens)
    rivals = [answer[same] for answer in (plain, tokens) if same < len(answer)]
    if not rivals:
        return None
    return Difference(
        prompt=prompt,
        temperature=law.temperature,
        strategy=strategy,
        position=same,
        plain_token=plain[same] if same < len(plain) else None,
        token=tokens[same] if same < len(tokens) else None,
        margin=margin(engine, prompt, law, plain[:same], rivals) if len(rivals) == 2 else None,
    )


def difference_line(difference: Difference, reference: str = "plain decoding") -> str:
    """For people. reference: what wrote the text that the other one parts from."""
    kind = "near-tie" if difference.near_tie else "FAULT"
    return (
        f"{kind}: {difference.strategy} at temperature {difference.temperature:g}, token "
        f"{difference.position} is {_token(difference.token)}, {reference}'s is "
        f"{_token(difference.plain_token)}; margin {figure(difference.margin, '.1e')}, "
        f"near-ties are under {NEAR_TIE:.0e}; prompt: {difference.prompt}"
    )


def _token(token: int | None) -> str:
    return "none, the answer had ended" if token is None else str(token)
