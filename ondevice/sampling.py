"""The position-keyed sampling law, in numpy: the one definition of which token comes next.

The token at absolute position t is y_t = argmax(log p_t + g(seed, t)): p_t is the verifier's
distribution after penalties, biases, temperature and cuts, g Gumbel noise (Maddison et al. 2014,
section 2), zero at temperature 0. y_t depends on the text, the seed and t, never on how it was
speculated. `ondevice.sampling_mlx` is the same law on the device.
"""

from __future__ import annotations

import math
import numbers
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from ondevice.errors import BadRequest
from ondevice.records import FloatArray, VerifyRow

VERIFIER_STREAM = 0
"""Noise of the law itself; the drafter reads the same numbers to agree more often."""
DRAFT_STREAM = 1
"""Noise a drafter samples from under `rejection`; the verifier never uses it."""
ACCEPT_STREAM = 2
"""Element 0 decides acceptance under `rejection`."""

LEAST_TEMPERATURE = 1e-4
"""Below it logits / temperature leaves float32; the likeliest token is all that is left anyway."""

_LARGEST_U = np.float32(1 - 2**-24)  # u rounds to 1.0 in float32 for the last 128 of 2^32 values


@runtime_checkable
class Constraint(Protocol):
    """A grammar over tokens, with immutable states: branches and rollback cost nothing."""

    def start(self) -> Any:
        """The state before the answer's first token."""

    def advance(self, state: Any, token: int) -> Any:
        """The state after `token`, whatever it is: a draft may break the grammar.

        From such a dead state on nothing is allowed.
        """

    def allowed(self, state: Any) -> npt.NDArray[np.bool_]:
        """Mask of tokens that may come next, shape (vocab,)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; the defaults are greedy.

    temperature: 0 is greedy, and so is anything below LEAST_TEMPERATURE. top_k: 0 is off.
    top_p, min_p: 1.0 and 0.0 are off.
    repetition_penalty: 1.0 is off; divides positive and multiplies negative logits of tokens among
    the last `repetition_window` (Keskar et al. 2019, section 4.1). logit_bias: token -> addend.
    seed: None draws one, and the answer reports it. top_logprobs: how many to return per token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    top_logprobs: int = 0
    constraint: Constraint | None = None

    def checked(self, vocab_size: int) -> Self:
        """The same parameters with a seed; raises BadRequest for a value out of range."""
        _require("temperature", self.temperature, lambda x: x >= 0, "0 or more")
        _require("top-k", self.top_k, lambda x: x >= 0, "0 (off) or more", whole=True)
        _require("top-p", self.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1 (off)")
        _require("min-p", self.min_p, lambda x: 0 <= x < 1, "0 (off) or more and below 1")
        penalty = self.repetition_penalty
        _require("repetition penalty", penalty, lambda x: 0.01 <= x <= 100, "0.01 to 100, 1 is off")
        window = self.repetition_window
        _require("repetition window", window, lambda x: x >= 0, "0 (off) or more", whole=True)
        _require("top logprobs", self.top_logprobs, lambda x: 0 <= x <= 20, "0 to 20", whole=True)
        if not isinstance(self.logit_bias, Mapping):
            raise BadRequest(f"logit bias must map tokens to numbers, got {self.logit_bias!r}")
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise BadRequest(f"constraint must be a Constraint, got {self.constraint!r}")
        for token, bias in self.logit_bias.items():
            below = f"0 to {vocab_size - 1}"
            _require("logit bias token", token, lambda x: 0 <= x < vocab_size, below, whole=True)
            _require("logit bias", bias, lambda x: abs(x) <= 1e6, "-1e6 to 1e6")
        seed = secrets.randbits(32) if self.seed is None else self.seed
        _require("seed", seed, lambda x: 0 <= x < 2**64, "0 to 2^64 - 1", whole=True)
        temperature = self.temperature if self.temperature >= LEAST_TEMPERATURE else 0.0
        return replace(self, seed=seed, temperature=temperature)

    @property
    def rewrites_logits(self) -> bool:
        """Whether a row's own path changes its logits (penalty, bias or constraint)."""
        return (
            self.repetition_penalty != 1.0 or bool(self.logit_bias) or self.constraint is not None
        )


def _require(
    name: str, value: object, holds: Callable[[float], bool], expected: str, *, whole: bool = False
) -> None:
    kind = numbers.Integral if whole else numbers.Real
    right = isinstance(value, kind) and not isinstance(value, bool)
    # abs() first: math.isfinite cannot take an integer beyond float.
    if not (right and abs(cast(float, value)) < 2**64 and holds(cast(float, value))):
        what = "a whole number, " if whole else ""
        raise BadRequest(f"{name} must be {what}{expected}, got {value!r}")


def uniform(seed: int, position: int, count: int, stream: int = VERIFIER_STREAM) -> FloatArray:
    """`count` numbers in (0, 1) from Philox keyed by (seed, position), shape (count,).

    Element i does not depend on `count`: it belongs to token id i.
    """
    key = np.array([seed, position], dtype=np.uint64)  # a list would pass through float64
    generator = np.random.Philox(key=key, counter=[0, 0, 0, stream])
    words = generator.random_raw((count + 1) // 2)
    bits = words.astype("<u8", copy=False).view("<u4")[:count]
    u: FloatArray = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    return np.minimum(u, _LARGEST_U, out=u)


def noise(seed: int, position: int, count: int, stream: int = VERIFIER_STREAM) -> FloatArray:
    """Gumbel noise g = -log(-log1p(-u)) of a position, shape (count,), float32.

    Large g comes from u near 0, where float32 keeps all 32 bits: ties among the largest values are
    as rare as the generator allows.
    """
    g: FloatArray = -np.log(-np.log1p(-uniform(seed, position, count, stream)))
    return g


class Law:
    """Sampling parameters bound to a vocabulary: the noise of each position is made once.

    Shared by the two units' threads of one session; `params` has its seed.
    """

    KEPT_ROWS = 64
    """Positions whose noise is kept: deeper than any tree, 12 MiB for 49,152 tokens."""

    def __init__(self, params: SamplingParams, vocab_size: int, answer_start: int = 0) -> None:
        """answer_start: position of the answer's first token, where a constraint begins."""
        self.params = params.checked(vocab_size)
        self.vocab_size = vocab_size
        self.answer_start = answer_start
        assert self.params.seed is not None
        self.seed: int = self.params.seed
        self._rows: OrderedDict[tuple[int, int], FloatArray] = OrderedDict()
        self._states: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def greedy(self) -> bool:
        """Whether the law takes the likeliest token and needs no noise."""
        return self.params.temperature == 0

    def noise(self, position: int, stream: int = VERIFIER_STREAM) -> FloatArray:
        """g(seed, position), shape (vocab_size,); do not write to it."""
        key = (position, stream)
        with self._lock:
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = noise(self.seed, position, self.vocab_size, stream)
                row.flags.writeable = False
                if len(self._rows) > self.KEPT_ROWS:
                    self._rows.popitem(last=False)
            return row

    def accept_uniform(self, position: int) -> float:
        """The number in (0, 1) that decides acceptance at `position` under `rejection`."""
        return float(uniform(self.seed, position, 1, ACCEPT_STREAM)[0])

    def allowed(self, history: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """The constraint's mask after `history`, shape (vocab,); None without a constraint."""
        constraint = self.params.constraint
        if constraint is None:
            return None
        answer = tuple(history[self.answer_start :])
        with self._lock:
            return constraint.allowed(self._state(constraint, answer))

    def _state(self, constraint: Constraint, answer: tuple[int, ...]) -> Any:
        known = len(answer)
        while known and answer[:known] not in self._states:
            known -= 1
        state = self._states[answer[:known]] if known else constraint.start()
        for end in range(known + 1, len(answer) + 1):
            state = self._states[answer[:end]] = constraint.advance(state, answer[end - 1])
            if len(self._states) > self.KEPT_ROWS:
                self._states.popitem(last=False)
        return state

    def rewrite(self, logits: FloatArray, history: Sequence[int]) -> FloatArray:
        """Logits after penalty, biases and constraint, shape (vocab,); the input is left alone.

        history: every token before this position, the prompt included.
        """
        if not self.params.rewrites_logits:
            return logits
        logits = logits.copy()
        touched = self.touched(history)
        logits[touched] = self.rewrite_some(logits[touched], touched, history)
        allowed = self.allowed(history)
        if allowed is not None:
            logits[~allowed] = -np.inf
        return logits

    def rewrite_some(
        self, logits: FloatArray, tokens: npt.NDArray[np.int64], history: Sequence[int]
    ) -> FloatArray:
        """Logits of some `tokens` after penalty and biases; logits and tokens (n,)."""
        penalty = np.float32(self.params.repetition_penalty)
        penalised = np.isin(tokens, self.penalised(history))
        scaled = np.where(logits > 0, logits / penalty, logits * penalty)
        biases = [self.params.logit_bias.get(int(token), 0.0) for token in tokens]
        return np.where(penalised, scaled, logits) + np.asarray(biases, np.float32)

    def touched(self, history: Sequence[int]) -> npt.NDArray[np.int64]:
        """The distinct tokens whose logits penalty or biases change after `history`, ascending."""
        bias = self.params.logit_bias
        return np.union1d(self.penalised(history), np.fromiter(bias, np.int64, len(bias)))

    def penalised(self, history: Sequence[int]) -> npt.NDArray[np.int64]:
        """The distinct tokens that the repetition penalty touches after `history`, ascending."""
        window = self.params.repetition_window
        if self.params.repetition_penalty == 1.0 or window == 0:
            return np.empty(0, dtype=np.int64)
        return np.unique(np.asarray(history[-window:], dtype=np.int64))

    def log_p(self, logits: FloatArray, history: Sequence[int]) -> FloatArray:
        """Log-probabilities after rewriting, temperature and cuts, shape (vocab,)."""
        return log_probabilities(self.rewrite(logits, history), self.params)

    def choose(self, logits: FloatArray, history: Sequence[int]) -> int:
        """y_t for t = len(history), given the verifier's logits after `history`, shape (vocab,)."""
        scores = self.log_p(logits, history)
        if not self.greedy:
            scores = scores + self.noise(len(history))
        return int(np.argmax(scores))


def log_probabilities(logits: FloatArray, params: SamplingParams) -> FloatArray:
    """log p after temperature, then top-k, top-p and min-p; cut tokens are -inf. Shape (vocab,).

    Each cut works on what the one before left, renormalised. Cuts go by value, so tokens that tie
    with the last one kept are kept too. At temperature 0 the cuts change nothing and are skipped.
    """
    if params.temperature == 0:
        return _log_softmax(logits)
    log_p = _log_softmax(logits / np.float32(params.temperature))
    if 0 < params.top_k < log_p.size:
        log_p = _keep(log_p, np.partition(log_p, -params.top_k)[-params.top_k])
    if params.top_p < 1:
        descending = -np.sort(-log_p)
        before = np.cumsum(np.exp(descending)) - np.exp(descending)
        log_p = _keep(log_p, descending[np.count_nonzero(before < params.top_p) - 1])
    if params.min_p > 0:
        log_p = _keep(log_p, log_p.max() + np.float32(math.log(params.min_p)))
    return log_p


def _keep(log_p: FloatArray, threshold: np.float32) -> FloatArray:
    return _log_softmax(np.where(log_p >= threshold, log_p, np.float32(-np.inf)))


def _log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits - logits.max()
    log_p: FloatArray = shifted - np.log(np.exp(shifted).sum(dtype=np.float32))
    return log_p


def walk_coupled(
    rows: Sequence[VerifyRow], choose: Callable[[int], int]
) -> tuple[list[int], list[int]]:
    """Follow the law's own choices through the tree of `rows`.

    choose(i): the law's token after row i. Returns the indices of the accepted rows, top down, and
    the tokens: those of the accepted rows, then the first one that no row holds.
    """
    children = {(row.parent, row.token): index for index, row in enumerate(rows) if index}
    at = 0
    accepted: list[int] = []
    tokens: list[int] = []
    while True:
        token = choose(at)
        tokens.append(token)
        child = children.get((at, token))
        if child is None:
            return accepted, tokens
        accepted.append(child)
        at = child


def walk_rejection(
    rows: Sequence[VerifyRow], log_p: Callable[[int], FloatArray], law: Law, position: int
) -> tuple[list[int], list[int]]:
    """Leviathan et al. 2023, algorithm 1, over a chain; for a law that is not greedy.

    log_p(i): the law's log-probabilities after row i, shape (vocab,). position: of the token after
    row 0. Row i + 1 was sampled from its `q`. Returns like `walk_coupled`.
    """
    accepted: list[int] = []
    tokens: list[int] = []
    for index, row in enumerate(rows[1:], start=1):
        at = position + index - 1
        p = np.exp(log_p(index - 1))
        q = np.zeros_like(p) if row.q is None else row.q
        q_token = 1.0 if row.q is None else float(q[row.token])
        if law.accept_uniform(at) * q_token >= p[row.token]:
            if row.q is None:
                q[row.token] = 1.0
            tokens.append(_sample_residual(p, q, law, at))
            return accepted, tokens
        accepted.append(index)
        tokens.append(row.token)
    last = position + len(rows) - 1
    tokens.append(int(np.argmax(log_p(len(rows) - 1) + law.noise(last))))
    return accepted, tokens


def _sample_residual(p: FloatArray, q: FloatArray, law: Law, position: int) -> int:
    residual = np.maximum(p - q, 0)
    if not residual.any():  # p and q differ by rounding alone
        residual = p
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(residual) + law.noise(position)))


def history_with_path(committed: Sequence[int], rows: Sequence[VerifyRow], index: int) -> list[int]:
    """`committed` (all tokens before row 0), then the path from row 0 down to row `index`."""
    path: list[int] = []
    at = index
    while at >= 0:
        path.append(rows[at].token)
        at = rows[at].parent
    return [*committed, *reversed(path)]
