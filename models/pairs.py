"""The pairs that the product knows by name (pairs.toml)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ondevice.errors import UnknownPair


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WheelSource(_Entry):
    """Weights as a file inside a wheel of a package registry, pinned by size and sha256."""

    distribution: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str


class VerifierRecipe(_Entry):
    """How the verifier's folder is written: the type that weights are rounded to."""

    dtype: Literal["float32", "float16", "bfloat16"]


class DrafterRecipe(_Entry):
    """How the drafter is cut from the verifier.

    layers: indices of the verifier's layers, in order. row_counts, context_sizes: rows a step and
    slots of the exported functions.
    """

    layers: tuple[int, ...]
    row_counts: tuple[int, ...] = (1, 8, 64)
    context_sizes: tuple[int, ...] = (512, 2048)


class Pair(_Entry):
    """One entry of pairs.toml."""

    description: str
    source: WheelSource
    verifier: VerifierRecipe
    drafter: DrafterRecipe


class _Pairs(_Entry):
    default: str
    pairs: dict[str, Pair]


@cache
def _read() -> _Pairs:
    text = files("ondevice.models").joinpath("pairs.toml").read_text(encoding="utf-8")
    return _Pairs.model_validate(tomllib.loads(text))


def default_pair() -> str:
    """Name of the pair that is meant when none is given."""
    return _read().default


def pair_names() -> list[str]:
    """Every known name, the default first."""
    return sorted(_read().pairs, key=lambda name: (name != default_pair(), name))


def known_pair(name: str) -> Pair:
    """The entry called `name`; UnknownPair, with the names there are, when there is none."""
    pair = _read().pairs.get(name)
    if pair is None:
        raise UnknownPair(
            f"no pair {name!r}: expected one of {', '.join(pair_names())}, or the folder of a "
            "converted pair"
        )
    return pair
