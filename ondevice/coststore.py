"""Measured costs, kept for the next time: HOME/costs/KEY.json.

A table belongs to one pair, machine and set of versions; the key is the hash of all that. Tables
are written by a calibration only: what a `CostModel` learns while it runs is not kept, since it
follows heat and other load of that hour.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal, Self

from pydantic import AwareDatetime, PositiveInt, model_validator

from ondevice import blas
from ondevice.artifact import (
    DRAFTER_FILE,
    PAIR_FILE,
    VERIFIER_FILE,
    DrafterManifest,
    Manifest,
    PairManifest,
)
from ondevice.calibration import Calibration, calibrate, is_sure
from ondevice.converters.progress import Reporter
from ondevice.costs import CostTable, implausible
from ondevice.errors import ArtifactError, CacheUnwritable
from ondevice.home import home_folder, locked
from ondevice.machine import this_machine
from ondevice.units import DrafterUnit, VerifierUnit
from ondevice.worker import UnitWorker

VERSIONED = ("ondevice", "mlx", "mlx-lm", "numpy")
"""Packages whose version may change what a step takes."""
RUNTIME = "drafter runtime"
FORMAT = "ondevice-costs-2"
"""Tables of the first had one row for a pair without a drafter."""
MOST_TRIES = 2
"""Openings that measure a pair for want of a sure table; a machine that is always busy must do."""


class CostRecord(Manifest):
    """A table and what it belongs to. spread, trouble: see `Calibration`.

    tries: how many calibrations by openings it is the best of.
    """

    format: Literal["ondevice-costs-2"] = "ondevice-costs-2"
    identity: dict[str, str]
    measured_at: AwareDatetime
    took_s: float
    spread: float | None
    trouble: str
    tries: PositiveInt = 1
    table: CostTable

    @property
    def sure(self) -> bool:
        """Whether the passes agreed: the machine was quiet enough."""
        return is_sure(self.spread)

    @model_validator(mode="after")
    def _is_plausible(self) -> Self:
        if wrong := implausible(self.table):
            raise ValueError(wrong)
        return self

    @classmethod
    def of(cls, identity: Mapping[str, str], measured: Calibration) -> Self:
        """What was measured just now."""
        return cls(
            identity=dict(identity),
            measured_at=datetime.now(UTC),
            took_s=measured.took_s,
            spread=measured.spread,
            trouble=measured.trouble,
            table=measured.table,
        )


def costs_folder() -> Path:
    """Where the tables are; may not exist yet."""
    return home_folder() / "costs"


def identity_of(folder: Path, runtime: str | None) -> dict[str, str]:
    """Everything that the costs of the pair in `folder` hang on, by name.

    runtime: what runs the drafter; None without one. Raises ArtifactError when `folder` is no pair.
    """
    pair = PairManifest.read(folder / PAIR_FILE)
    manifests = [folder / PAIR_FILE, folder / pair.verifier / VERIFIER_FILE]
    if pair.drafter is not None:
        manifests.append(folder / pair.drafter / DRAFTER_FILE)
    machine, report = this_machine(), blas.prepare()
    return {
        "pair": _digest(manifests),
        RUNTIME: runtime or "none",
        "cpu": machine.cpu,
        "cores": f"{machine.usable_cores} of {machine.cores}",
        "system": machine.system,
        "blas": f"{report.library or 'the default'}, {report.threads or 'default'} threads",
        **{name: version(name) for name in VERSIONED},
    }


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ArtifactError(
                f"no readable manifest at {path} ({error.strerror}); convert the pair again"
            ) from error
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def record_path(identity: Mapping[str, str]) -> Path:
    """The file of the table that belongs to `identity`."""
    text = json.dumps([FORMAT, dict(identity)], sort_keys=True)
    return costs_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def stored(identity: Mapping[str, str]) -> CostRecord | None:
    """The table kept for `identity`; None when there is none, or one that cannot be trusted."""
    try:
        record = CostRecord.read(record_path(identity))
    except ArtifactError:
        return None
    return record if record.identity == identity else None


def stored_for(folder: Path) -> CostRecord | None:
    """The newest table for the pair in `folder` on this machine, whatever runs the drafter."""
    wanted = identity_of(folder, None)
    found = []
    for path in costs_folder().glob("*.json"):
        try:
            record = CostRecord.read(path)
        except ArtifactError:
            continue
        if record.identity | {RUNTIME: ""} == wanted | {RUNTIME: ""}:
            found.append(record)
    return max(found, key=lambda record: record.measured_at, default=None)


def known_or_measured(
    identity: Mapping[str, str],
    measure: Callable[[], Calibration],
    *,
    again: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> CostRecord:
    """The table kept for `identity`, else a new one, which is kept.

    A table that is not `sure` is measured again MOST_TRIES - 1 times, and the better one kept.
    again: measure in any case. Two processes do not measure at the same time. A folder that cannot
    be written costs only the time to measure at every start; `say` is told so. Raises what
    `measure` raises.
    """
    known = stored(identity)
    if not again and known is not None and _will_do(known):
        return known
    record = None
    try:
        with locked(costs_folder(), lambda: say("Waiting: another process measures this machine")):
            known = None if again else stored(identity)
            if known is not None and _will_do(known):
                return known
            record = _better(CostRecord.of(identity, measure()), known)
            record.write(record_path(identity))
    except CacheUnwritable as error:
        say(f"What was measured is not kept: {error}")
        record = record or CostRecord.of(identity, measure())
    return record


def _will_do(record: CostRecord) -> bool:
    return record.sure or record.tries >= MOST_TRIES


def _better(new: CostRecord, old: CostRecord | None) -> CostRecord:
    if old is None:
        return new
    surest = min(new, old, key=lambda record: math.inf if record.spread is None else record.spread)
    return surest.model_copy(update={"tries": old.tries + 1})


def costs_of(
    folder: Path,
    verifier: UnitWorker[VerifierUnit],
    drafter: UnitWorker[DrafterUnit] | None,
    *,
    again: bool = False,
    quiet: bool = False,
) -> CostRecord:
    """What the steps of the opened pair in `folder` take here, kept or measured now.

    Says on stderr what takes its time, unless `quiet`. Raises what a verifier raises that cannot be
    measured.
    """
    reporter, pair = Reporter(quiet), PairManifest.read(folder / PAIR_FILE)
    rows: list[int] = []
    if drafter is not None and pair.drafter is not None:
        rows = DrafterManifest.read(folder / pair.drafter / DRAFTER_FILE).row_counts

    def measure() -> Calibration:
        with reporter.stage(f"Measuring {pair.name} on this machine") as progress:
            return calibrate(verifier, drafter, rows, progress=progress)

    runtime = drafter.opened().runtime_name if drafter is not None else None
    identity = identity_of(folder, runtime)
    return known_or_measured(identity, measure, again=again, say=reporter.say)
