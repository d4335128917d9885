"""A drafter's examination on this machine, in a process of its own, before it is first used.

Core ML's compilers crash and hang, and a model that runs may run elsewhere than told to, or compute
something else (facts that others reported; none of it can be seen from outside). So: load, run and
time every function, ask Core ML where its ops go, compare with the emulator, go on for a while.
`examine` is the parent's side: whatever happens to the process becomes a report with a reason.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np

from ondevice.artifact import DRAFTER_FILE, DRAFTER_PACKAGE, DrafterManifest
from ondevice.childprocess import ChildProcess, Ended, Parent
from ondevice.conditions import conditions_now
from ondevice.coreml.package import Package
from ondevice.coreml.runtime import Array, CoreMLRuntime
from ondevice.coreml.toolsruntime import MOST_CACHE_BYTES
from ondevice.drafterfolder import Functions
from ondevice.errors import OnDeviceError, RuntimeUnavailable
from ondevice.probereport import FunctionReport, ProbeReport
from ondevice.reference import Samples, reference

RuntimeKind = Literal["pyobjc", "coremltools", "mlx"]

# The bars. Nobody has seen this on a Mac yet: "a guess" is to be replaced by a measurement there.
LIMIT_SECONDS = 300.0
"""For the whole examination. A guess: others report compilations that take minutes, and some that
never end (coremltools issue 2367)."""
MIN_ANE_SHARE = 0.9
"""Of the estimated cost. A guess: each op elsewhere costs two changes of device in every step."""
MIN_AGREEMENT = 0.98
"""Positions whose first choice is among the emulator's first three. Measured on an earlier default
drafter, 292 positions: 100 % when everything is computed in halves; 99.7 % with noise of 1 % of the
largest logit on every logit, 93.5 % with 3 %."""
MAX_ERROR = 0.1
"""Largest difference of a logit, in parts of the largest logit. Measured as above: 0.002 in halves,
0.05 with noise of 1 %, 0.16 with 3 %."""
MOST_STEP_MS = 100.0
"""A step of about 8 rows. A guess: others report 2 to 30 ms on a Neural Engine."""
SOAK_CALLS = 256
"""Palettised models have crashed after 100 to 200 (coremltools issue 2716)."""
TIMED_CALLS = 32
"""Of each row count; their median counts."""
GAIN = 0.9
"""A smaller function must take less than that of a larger one's time, or it is not loaded. A guess:
each function that is loaded takes memory and time to load."""


def open_runtime(kind: str, path: Path, functions: Sequence[str]) -> CoreMLRuntime:
    """The runtime of that kind with these functions of a package. Raises what opening it raises."""
    package = Package.open(path)
    if kind == "mlx":
        from ondevice.coreml.mlxruntime import MLXRuntime

        return MLXRuntime(package, functions)
    from ondevice.coreml.compiled import compiled_model

    compiled = compiled_model(path, kind)
    if kind == "coremltools":
        from ondevice.coreml.toolsruntime import CoreMLToolsRuntime

        return CoreMLToolsRuntime(package, compiled, functions)
    from ondevice.coreml.pyobjc import PyObjCRuntime

    return PyObjCRuntime(package, compiled, functions)


def examine(
    kind: RuntimeKind,
    folder: Path,
    verifier_folder: Path,
    progress: Callable[[str], None] = lambda stage: None,
    limit_s: float = LIMIT_SECONDS,
) -> ProbeReport:
    """Examine the drafter in `folder` on that runtime; takes seconds to minutes, never raises.

    progress: called with what is being done now.
    """
    until, stage = time.monotonic() + limit_s, "starting"
    child = ChildProcess(__name__)
    try:
        child.send((kind, folder, verifier_folder))
        while True:
            what, value = child.receive(max(0.0, until - time.monotonic()))
            if what == "report":
                return ProbeReport.model_validate_json(value)
            stage = value
            progress(stage)
    except TimeoutError:
        return ProbeReport(runtime=kind, reason=f"no end of {stage} after {limit_s:.0f} s")
    except Ended as error:
        return ProbeReport(runtime=kind, reason=f"its process {error}, while {stage}")
    finally:
        child.close()


# The child


def serve(handle: int) -> None:
    """The child's main program: one examination, its stages and its report."""
    parent = Parent(handle)
    kind, folder, verifier_folder = parent.receive()
    examination = _Examination(kind, folder, verifier_folder, lambda at: parent.send(("stage", at)))
    parent.send(("report", examination.report().model_dump_json()))


@dataclass(slots=True)
class _Examination:
    kind: str
    folder: Path
    verifier_folder: Path
    say: Callable[[str], None]
    found: ProbeReport = field(init=False)

    def report(self) -> ProbeReport:
        self.found = ProbeReport(runtime=self.kind, reason="")
        manifest = DrafterManifest.read(self.folder / DRAFTER_FILE)
        try:
            self._run(_fitting(self.kind, manifest), manifest)
            self._note(reason=_verdict(self.found))
        except OnDeviceError as error:
            self._note(reason=str(error))
        except Exception as error:
            self._note(reason=f"{type(error).__name__}: {error}")
        return self.found

    def _note(self, **found: object) -> None:
        self.found = self.found.model_copy(update=found)

    def _run(self, functions: Functions, manifest: DrafterManifest) -> None:
        names = functions.names(manifest)
        self._note(
            row_counts=list(functions.row_counts), context_sizes=list(functions.context_sizes)
        )
        self.say(f"compiling and loading {len(names)} functions")
        begun = time.monotonic()
        runtime = open_runtime(self.kind, self.folder / DRAFTER_PACKAGE, names)
        self._note(load_s=time.monotonic() - begun)
        self.say("computing the reference")
        samples = reference(self.folder, self.verifier_folder, functions)
        self._functions(runtime, samples)
        if self.kind != "mlx":
            self._placement()
        self._parity(runtime, samples)
        if not _verdict(self.found):
            self._timing(runtime, samples, functions, manifest)
        self._note(ignored_backings=getattr(runtime, "ignored_backings", 0))
        runtime.close()

    def _functions(self, runtime: CoreMLRuntime, samples: Samples) -> None:
        """Every function once."""
        reports = {}
        for name in runtime.functions:
            if name not in samples:
                raise RuntimeUnavailable(f"there is no reference for {name}")
            sample = samples[name][0]
            self.say(f"running {name}")
            begun = time.monotonic()
            runtime.predict(name, _as_wanted(runtime, name, sample.inputs))
            reports[name] = FunctionReport(first_call_ms=_since_ms(begun))
        self._note(functions=reports)

    def _placement(self) -> None:
        """Where Core ML means to run each op. Without PyObjC nobody can say."""
        from ondevice.coreml.compiled import compiled_model
        from ondevice.coreml.plan import plan_of

        placed = {}
        for name, report in self.found.functions.items():
            self.say(f"asking for the plan of {name}")
            try:
                plan = plan_of(compiled_model(self.folder / DRAFTER_PACKAGE, self.kind), name)
            except RuntimeUnavailable:
                return
            where = {"ane_share": plan.ane_share, "elsewhere": plan.elsewhere}
            placed[name] = report.model_copy(update=where)
        self._note(functions=placed)

    def _parity(self, runtime: CoreMLRuntime, samples: Samples) -> None:
        self.say("comparing with the emulator")
        agreed, error, positions = 0, 0.0, 0
        for name, taken in samples.items():
            for sample in taken:
                got = _logits(runtime.predict(name, _as_wanted(runtime, name, sample.inputs)))
                if not np.isfinite(got).all():
                    self._note(agreement=0.0, max_error=None, positions=positions + len(got))
                    return
                wanted = _logits(sample.outputs)
                best = np.argpartition(wanted, -3, axis=1)[:, -3:]
                agreed += int((best == got.argmax(axis=1)[:, None]).any(axis=1).sum())
                scale = float(np.abs(wanted[wanted > -9e3]).max())  # not the padding rows
                error = max(error, float(np.abs(got - wanted).max()) / scale)
                positions += len(got)
        self._note(positions=positions, agreement=agreed / positions, max_error=error)

    def _timing(
        self,
        runtime: CoreMLRuntime,
        samples: Samples,
        functions: Functions,
        manifest: DrafterManifest,
    ) -> None:
        context = min(functions.context_sizes)
        narrow = [rows for rows in functions.row_counts if rows <= 8] or [min(functions.row_counts)]
        calls = {}
        begun = time.monotonic()
        for rows in narrow:
            name = next(
                each.name
                for each in manifest.functions
                if (each.rows, each.context) == (rows, context)
            )
            inputs = _bound(runtime, name, samples[name][0].inputs)
            calls[rows] = name, inputs
            runtime.predict(name, inputs)
        self._note(bind_ms=_since_ms(begun) / len(calls))
        self.say(f"{SOAK_CALLS} steps")
        for number in range(SOAK_CALLS):
            name, inputs = calls[narrow[number % len(narrow)]]
            outputs = runtime.predict(name, inputs)
            if not np.isfinite(outputs["k_new"]).all():
                raise RuntimeUnavailable(f"step {number} of {name} gave values that are not finite")
        self._note(soak_calls=SOAK_CALLS)
        self.say("timing steps")
        now = conditions_now()
        self._note(thermal_state=now.thermal_state, low_power_mode=now.low_power_mode)
        alone = _step_ms(runtime, calls)
        self._note(step_ms=alone, row_counts=_worth_loading(functions.row_counts, alone))
        self.say("timing steps beside MLX")
        with _mlx_at_work():
            self._note(beside_ms=_step_ms(runtime, calls))


def _fitting(kind: str, manifest: DrafterManifest) -> Functions:
    """All functions, but for coremltools only contexts whose caches it converts fast enough."""
    functions = Functions.all_of(manifest)
    if kind != "coremltools":
        return functions
    slot_bytes = 2 * 2 * manifest.num_layers * manifest.num_kv_heads * manifest.head_dim
    fitting = [size for size in manifest.context_sizes if size * slot_bytes < MOST_CACHE_BYTES]
    if not fitting:
        least = min(manifest.context_sizes) * slot_bytes / 1e6
        raise RuntimeUnavailable(
            f"caches of {least:.0f} MB would be converted in every call, most for coremltools is "
            f"{MOST_CACHE_BYTES / 1e6:.0f}"
        )
    return Functions(functions.row_counts, tuple(fitting))


def _verdict(found: ProbeReport) -> str:
    """Why the runtime is refused; "" if it is not. Comparisons are written so that NaN fails."""
    share = found.ane_share
    if share is not None and not share >= MIN_ANE_SHARE:
        worst = min(found.functions.items(), key=lambda each: each[1].ane_share or 0.0)
        ops = most_often(worst[1].elsewhere)
        return (
            f"Core ML would run {share:.0%} of {worst[0]} on the Neural Engine, expected at least "
            f"{MIN_ANE_SHARE:.0%} ({ops})"
        )
    if found.max_error is None:
        return "its logits are not finite"
    if not (found.agreement or 0.0) >= MIN_AGREEMENT or not found.max_error <= MAX_ERROR:
        return (
            f"it computes something else: {found.agreement:.0%} of {found.positions} first choices "
            f"are among the emulator's three, logits differ by up to {found.max_error:.1%}"
        )
    slowest = max(found.step_ms.items(), default=(0, 0.0))
    if not slowest[1] <= MOST_STEP_MS:
        return (
            f"a step of {slowest[0]} rows takes {slowest[1]:.0f} ms, expected at most "
            f"{MOST_STEP_MS:.0f}"
        )
    return ""


def most_often(counts: Mapping[str, int], shown: int = 3) -> str:
    """The first few of `counts`, and how many there are besides."""
    first = ", ".join(f"{count} {what}" for what, count in list(counts.items())[:shown])
    others = sum(list(counts.values())[shown:])
    return f"{first} and {others} others" if others else first


def _worth_loading(row_counts: Sequence[int], step_ms: Mapping[int, float]) -> list[int]:
    """Row counts without those that gain nothing over the next one, padded."""
    kept = sorted(row_counts)
    for rows, wider in itertools.pairwise(sorted(step_ms)):
        if step_ms[rows] >= GAIN * step_ms[wider]:
            kept.remove(rows)
    return kept


Calls = Mapping[int, tuple[str, dict[str, Array]]]


def _step_ms(runtime: CoreMLRuntime, calls: Calls) -> dict[int, float]:
    """Median time of a step by rows, the row counts in turn."""
    times: dict[int, list[float]] = {rows: [] for rows in calls}
    for _ in range(TIMED_CALLS):
        for rows, (name, inputs) in calls.items():
            begun = time.monotonic()
            runtime.predict(name, inputs)
            times[rows].append(_since_ms(begun))
    return {rows: median(taken) for rows, taken in times.items()}


@contextmanager
def _mlx_at_work() -> Iterator[None]:
    """Products on MLX's device for as long as the block lasts."""
    over = threading.Event()

    def work() -> None:
        import mlx.core as mx

        size = 2048 if mx.default_device().type == mx.gpu else 128
        matrix = mx.random.normal((size, size))
        while not over.is_set():
            mx.eval(matrix @ matrix)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _since_ms(begun: float) -> float:
    return (time.monotonic() - begun) * 1e3


def _logits(outputs: Mapping[str, Array]) -> Array:
    """Of every row, (T, vocabulary), float32."""
    parts = sorted((name for name in outputs if name.startswith("logits_")), key=_number)
    return np.concatenate([outputs[name][0, :, 0] for name in parts]).T.astype(np.float32)


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])


def _as_wanted(runtime: CoreMLRuntime, name: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
    specs = runtime.functions[name].inputs
    return {key: array.astype(specs[key].dtype) for key, array in inputs.items()}


def _bound(runtime: CoreMLRuntime, name: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs in the runtime's own buffers."""
    buffers = {key: runtime.buffer(spec) for key, spec in runtime.functions[name].inputs.items()}
    for key, array in inputs.items():
        buffers[key][...] = array
    return buffers
