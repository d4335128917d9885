"""mlx-lm itself, on the verifier's own folder: plain, and its own speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from time import monotonic_ns

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from ondevice.apps.sides import Arrival, Drafting, Run
from ondevice.errors import UnsupportedModel
from ondevice.mlxfolder import load_folder

DRAFT_TOKENS = 3
"""Tokens that mlx-lm drafts a round: the default of its own command line."""

Step = tuple[int, bool]
"""A token, and whether the draft model wrote it."""


class MlxLmPlain:
    """`mlx_lm.generate.generate_step`. To be made and used on one thread, as all of MLX."""

    name = "mlx-lm"

    def __init__(self, folder: Path, end_tokens: frozenset[int]) -> None:
        """Load a second copy of the model in `folder`. Raises as `load_folder` does."""
        self.model: Module = load_folder(folder).model
        self.end_tokens = end_tokens

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """See `ondevice.apps.sides.Side`."""

        def steps() -> Generator[Step, None, None]:
            made = generate_step(mx.array(list(prompt)), self.model, max_tokens=max_tokens)
            with closing(made):
                for token, _ in made:
                    yield int(token), False

        return _run(steps, self.end_tokens, max_tokens, 0)


class MlxLmSpeculative:
    """`mlx_lm.generate.speculative_generate_step`: chains of `draft_tokens`, drafted then judged.

    Shares the model of `plain`, and so its thread.
    """

    name = "mlx-lm speculative"

    def __init__(
        self, plain: MlxLmPlain, draft_model: Module, draft_tokens: int = DRAFT_TOKENS
    ) -> None:
        """Raises UnsupportedModel for a model whose cache mlx-lm cannot roll back."""
        if draft_tokens != DRAFT_TOKENS:
            self.name = f"{self.name}, {draft_tokens}"
        if not can_trim_prompt_cache(make_prompt_cache(plain.model)):
            raise UnsupportedModel("mlx-lm cannot roll back this model's cache")
        self._plain = plain
        self._draft_model = draft_model
        self._draft_tokens = draft_tokens

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """See `ondevice.apps.sides.Side`."""
        model, end_tokens = self._plain.model, self._plain.end_tokens

        def steps() -> Generator[Step, None, None]:
            made = speculative_generate_step(
                mx.array(list(prompt)),
                model,
                self._draft_model,
                num_draft_tokens=self._draft_tokens,
                max_tokens=max_tokens,
            )
            with closing(made):
                for token, _, drafted in made:
                    yield int(token), drafted

        return _run(steps, end_tokens, max_tokens, self._draft_tokens)


def _run(
    steps: Callable[[], Generator[Step, None, None]],
    end_tokens: frozenset[int],
    max_tokens: int,
    draft_tokens: int,
) -> Run:
    """Read steps until the end; a round ends with a token that the draft model did not write."""
    tokens: list[int] = []
    arrivals: list[Arrival] = []
    rounds: list[tuple[int, int]] = []  # drafted, accepted
    mx.synchronize(generation_stream)
    start_ns = monotonic_ns()
    accepted = before = 0
    with closing(steps()) as made:
        for token, is_drafted in made:
            tokens.append(token)
            accepted += is_drafted
            ended = token in end_tokens or len(tokens) == max_tokens
            if is_drafted and not ended:
                continue
            kept = len(tokens) - before
            arrivals.append(Arrival(monotonic_ns(), kept))
            rounds.append((min(draft_tokens, max_tokens - before, kept), accepted))
            accepted, before = 0, len(tokens)
            if ended:
                break
    mx.synchronize(generation_stream)  # the forward after the last token is under way
    return Run(tuple(tokens), start_ns, tuple(arrivals), _drafting(rounds))


def _drafting(rounds: Iterable[tuple[int, int]]) -> Drafting:
    speculated = [(drafted, accepted) for drafted, accepted in rounds if drafted]
    return Drafting(
        steps=len(speculated),
        drafted=sum(drafted for drafted, _ in speculated),
        accepted=sum(accepted for _, accepted in speculated),
    )
