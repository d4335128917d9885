"""What a profile found, as it is saved, printed as JSON, and compared with a later one.

`ondevice profile --json` prints one object and `--save` writes the same, format
"ondevice-profile-1". Fields are those of `Report`; each entry of `figures` has those of
`ondevice.apps.figures.Figures`, and besides, for programs that do not want to divide:
`acceptance_rate`, `first_choice_rate`, `tokens_per_verify`, `rerooting_rate`, `verifier_busy`,
`drafter_busy`, `both_busy`, `idle`. Times are in ms, rates in tokens a second, energy in mJ a
token; what was not measured is null. `reported` holds the field's figures beside ours, see
`ondevice.apps.reported`. A reader ignores fields that it does not know; a change that it could not
read gets a new format. `json_schema` is the schema of what is read back.
"""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime, ConfigDict, TypeAdapter, ValidationError

from ondevice.apps.figures import EVERY, Figures
from ondevice.apps.loads import LoadFigures
from ondevice.apps.reported import Comparison, comparison
from ondevice.artifact import (
    DRAFTER_FILE,
    PAIR_FILE,
    VERIFIER_FILE,
    Manifest,
    PairManifest,
    file_sha256,
)
from ondevice.conditions import Conditions
from ondevice.costs import CostTable
from ondevice.errors import BadRequest
from ondevice.machine import this_machine

FORMAT = "ondevice-profile-1"


class Identity(Manifest):
    """What was measured, where. *_sha256: of the manifest, which holds the hashes of all files."""

    ondevice: str
    pair: str
    verifier_sha256: str
    drafter_sha256: str | None
    cpu: str
    system: str

    @classmethod
    def of(cls, pair: str, folder: Path) -> Identity:
        """Of the converted pair in `folder`, on this machine. Raises ArtifactError."""
        parts = PairManifest.read(folder / PAIR_FILE)
        drafter = folder / parts.drafter / DRAFTER_FILE if parts.drafter else None
        machine = this_machine()
        return cls(
            ondevice=version("ondevice"),
            pair=pair,
            verifier_sha256=file_sha256(folder / parts.verifier / VERIFIER_FILE),
            drafter_sha256=file_sha256(drafter) if drafter else None,
            cpu=machine.cpu,
            system=machine.system,
        )


class Report(Manifest):
    """A profile.

    prompts: how many; planned, answers: measured answers, meant and done; stopped: why they are
    fewer, "" if they are not. left_out: what could not be measured, and why. costs: of the pair's
    steps, None where they were not measured. loads: by number of sessions, none if not asked for.
    conditions: the worst that the machine was in after any of them.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: Literal["ondevice-profile-1"] = "ondevice-profile-1"
    identity: Identity
    measured_at: AwareDatetime
    prompts: int
    max_tokens: int
    repeats: int
    planned: int
    answers: int
    stopped: str
    placement: list[str]
    left_out: dict[str, str]
    costs: CostTable | None
    figures: list[Figures]
    loads: tuple[LoadFigures, ...] = ()
    conditions: Conditions = Conditions()

    @property
    def strategies(self) -> list[str]:
        """In the order of the table."""
        return list(dict.fromkeys(each.strategy for each in self.figures))

    @property
    def domains(self) -> list[str]:
        """Without that of all prompts, unless there is no other one."""
        found = dict.fromkeys(each.domain for each in self.figures)
        return [name for name in found if name != EVERY] or [EVERY]

    @property
    def over_all(self) -> list[Figures]:
        """Every strategy, on all prompts."""
        return [each for each in self.figures if each.domain == EVERY]

    def figures_of(self, strategy: str, domain: str = EVERY) -> Figures | None:
        """None where nothing was measured."""
        found = (f for f in self.figures if (f.strategy, f.domain) == (strategy, domain))
        return next(found, None)

    def as_json(self) -> dict[str, Any]:
        """Plain values, see the module."""
        content = self.model_dump(mode="json")
        for entry, figures in zip(content["figures"], self.figures, strict=True):
            entry |= derived(figures)
        reported = comparison(self.figures)
        content["reported"] = TypeAdapter(list[Comparison]).dump_python(reported, mode="json")
        return content


def derived(figures: Figures) -> dict[str, float | None]:
    """The rates of `figures` that follow from its counts."""
    busy = figures.busy
    return {
        "acceptance_rate": figures.acceptance_rate,
        "first_choice_rate": figures.first_choice_rate,
        "tokens_per_verify": figures.tokens_per_verify,
        "rerooting_rate": figures.rerooting_rate,
        "verifier_busy": busy.share(busy.verifier_ms),
        "drafter_busy": busy.share(busy.drafter_ms),
        "both_busy": busy.share(busy.both_ms),
        "idle": busy.share(busy.idle_ms),
    }


def json_schema() -> dict[str, Any]:
    """JSON Schema of a saved profile."""
    return Report.model_json_schema()


def now() -> datetime:
    """When a report is made."""
    return datetime.now(UTC)


def read_report(path: Path) -> Report:
    """A saved profile. Raises BadRequest for whatever is wrong with it."""
    advice = "make one with `ondevice profile --save`"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadRequest(f"cannot read the profile {path}: {reason}; {advice}") from error
    try:
        return Report.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise BadRequest(
            f"{path} is no profile of format {FORMAT}: {where}: {first['msg']}; {advice}"
        ) from error
