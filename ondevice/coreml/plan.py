"""Which device Core ML means to run each op of a function on, by MLComputePlan.

The plan is Core ML's preference, not a measurement: a function that is all on the Neural Engine by
its plan may still fail there, and no interface tells where a prediction ran.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ondevice.coreml.apple import Apple, describe
from ondevice.coreml.pyobjc import configuration
from ondevice.errors import UnitFailed

PLAN_SECONDS = 120.0
"""How long Core ML may take to make a plan; it compiles for it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one function. ane_share: of the estimated cost, 0 to 1, on the Neural Engine.

    elsewhere: ops that are not, by type and device ("softmax on the CPU"), with their number.
    """

    ane_share: float
    elsewhere: dict[str, int]


def plan_of(compiled: Path, function: str) -> Plan:
    """Core ML's plan for one function of a compiled model. Raises UnitFailed when it has none."""
    apple = Apple()
    with apple.pool(), apple.explained(f"Core ML makes no plan for {function}"):
        plan = _load(apple, compiled, function)
        program = plan.modelStructure().program()
        functions = None if program is None else program.functions()
        found = None if functions is None else functions.objectForKey_(apple.text(function))
        if found is None:
            raise UnitFailed(f"Core ML's plan has no function {function}")
        return _read(apple, plan, found.block().operations())


def _load(apple: Apple, compiled: Path, function: str) -> Any:
    """The plan; Apple calls back on a thread of its own."""
    done = threading.Event()
    answer: list[Any] = []

    def handler(plan: Any, error: Any) -> None:
        answer[:] = plan, error
        done.set()

    apple.core_ml.MLComputePlan.loadContentsOfURL_configuration_completionHandler_(
        apple.url(compiled), configuration(apple, function), handler
    )
    if not done.wait(PLAN_SECONDS):
        raise UnitFailed(f"Core ML makes no plan for {function}: none after {PLAN_SECONDS:.0f} s")
    plan, error = answer
    if plan is None:
        raise UnitFailed(f"Core ML makes no plan for {function}: {describe(error)}")
    return plan


def _read(apple: Apple, plan: Any, operations: Any) -> Plan:
    devices = {
        apple.core_ml.MLNeuralEngineComputeDevice: "the Neural Engine",
        apple.core_ml.MLGPUComputeDevice: "the GPU",
        apple.core_ml.MLCPUComputeDevice: "the CPU",
    }
    cost: Counter[str] = Counter()
    elsewhere: Counter[str] = Counter()
    for operation in operations:
        usage = plan.computeDeviceUsageForMLProgramOperation_(operation)
        if usage is None:
            continue  # a constant, or weights unpacked when the model is compiled
        device = usage.preferredComputeDevice()
        where = next((name for kind, name in devices.items() if isinstance(device, kind)), "?")
        weight = plan.estimatedCostOfMLProgramOperation_(operation)
        cost[where] += 0 if weight is None else weight.weight()
        if where != "the Neural Engine":
            kind = str(operation.operatorName()).rpartition(".")[2]
            elsewhere[f"{kind} on {where}"] += 1
    total = sum(cost.values())
    share = cost["the Neural Engine"] / total if total else float(not elsewhere)
    return Plan(share, dict(elsewhere.most_common()))
