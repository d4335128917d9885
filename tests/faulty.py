"""Engines with something wrong in them, for the commands that must find it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ondevice.costs import table_from
from ondevice.drafter import CoreMLDrafter
from ondevice.engine import Engine
from ondevice.records import Verdict
from ondevice.units import DrafterUnit, VerifierUnit, VerifyRequest
from ondevice.verifier import MLXVerifier

Plant = Callable[[VerifyRequest, Verdict], Verdict]


class FaultyVerifier(MLXVerifier):
    """Tells another token than its own, but not in a plain run."""

    plant: Plant

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        verdicts = super().verify(requests)
        return [self.plant(*pair) for pair in zip(requests, verdicts, strict=True)]


DRAFTING_PAYS = table_from([1000.0 + n for n in range(16)], [(8, 1.0), (64, 1.0)])
"""So that every schedule drafts, as long as it has not learned better."""


def open_tiny(
    pair: Path, plant: Plant | None = None, drafter: Callable[[], DrafterUnit] | None = None
) -> Engine:
    with Engine.open_folder(pair, measure=False) as sound:
        tokenizer, ends = sound.model.tokenizer, sound.model.end_tokens

    def open_verifier() -> VerifierUnit:
        if plant is None:
            return MLXVerifier.open(pair / "verifier")
        unit = FaultyVerifier.open(pair / "verifier")
        unit.plant = plant
        return unit

    def open_drafter() -> DrafterUnit:
        return CoreMLDrafter.open(pair / "drafter", pair / "verifier")

    return Engine(tokenizer, ends, open_verifier, drafter or open_drafter, costs=DRAFTING_PAYS)


def other_token(_: VerifyRequest, verdict: Verdict) -> Verdict:
    return replace(verdict, tokens=(*verdict.tokens[:-1], (verdict.tokens[-1] + 5) % 200 + 10))


def twin_token(_: VerifyRequest, verdict: Verdict) -> Verdict:
    return replace(verdict, tokens=(*verdict.tokens[:-1], verdict.tokens[-1] ^ 1))
