"""Stand-in for Core ML: the same calls, the emulator behind them, and no forgiveness.

A compiled model is a folder with a copy of its package.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import objc
from Foundation import (
    NSURL,
    NSError,
    NSMutableArray,
    NSMutableDictionary,
    NSNumber,
    NSString,
)
from Quartz.CoreVideo import CVPixelBuffer
from standin import Memory, Owned, VarList, Violation, fault, in_a_pool

from ondevice.coreml.emulator import Emulator
from ondevice.coreml.package import Op, Package

MLComputeUnitsCPUAndNeuralEngine = 3
FLOAT16, FLOAT32, INT32 = 0x10000 | 16, 0x10000 | 32, 0x20000 | 32
TYPES = {FLOAT16: np.float16, FLOAT32: np.float32, INT32: np.int32}


class Allocated:
    """Classes whose objects are made by alloc and an init."""

    @classmethod
    def alloc(cls) -> Any:
        return cls.__new__(cls)


class MLMultiArray(Allocated):
    _pixels: CVPixelBuffer | None = None

    def initWithShape_dataType_error_(self, shape: Any, code: int, error: None) -> Any:
        if fault("array"):
            return None, NSError("out of memory", code=1)
        self._take(shape, code)
        item = np.dtype(TYPES[code]).itemsize
        self._memory = Memory(int(np.prod(self._shape)) * item)
        self._strides = _dense(self._shape)
        return self, None

    def initWithPixelBuffer_shape_(self, pixels: CVPixelBuffer, shape: Any) -> MLMultiArray:
        self._take(shape, FLOAT16)
        if self._shape[-1] != pixels.width or np.prod(self._shape[:-1]) != pixels.height:
            raise objc.error("The shape's last dimension doesn't match the pixel buffer's width")
        self._pixels, self._memory = pixels, pixels.memory
        rows = _dense((*self._shape[:-1], 1))
        self._strides = (*(stride * (pixels.bytes_per_row // 2) for stride in rows[:-1]), 1)
        return self

    def _take(self, shape: Any, code: int) -> None:
        if not isinstance(shape, NSMutableArray):
            raise Violation("a shape that is no NSArray")
        self._shape = tuple(int(size) for size in shape)
        self._code = code

    def shape(self) -> tuple[int, ...]:
        return self._shape

    def dataType(self) -> int:
        return self._code

    def strides(self) -> tuple[int, ...]:
        ordered = fault("strides")
        if ordered == "zero" and self._pixels is None:
            return (0,) * len(self._shape)
        return self._strides

    def dataPointer(self) -> VarList:
        if self._pixels is not None and not self._pixels.locks:
            raise Violation("the address of a pixel buffer that is not locked")
        return VarList(self._memory)

    def view(self) -> np.ndarray:
        """The elements, for Core ML itself."""
        item = np.dtype(TYPES[self._code]).itemsize
        strides = tuple(stride * item for stride in self._strides)
        return np.ndarray(self._shape, TYPES[self._code], self._memory.bytes, 0, strides)

    def checksum(self) -> int:
        return zlib.crc32(self._memory.bytes)


class MLFeatureValue:
    def __init__(self, array: MLMultiArray) -> None:
        self._array = array

    @classmethod
    def featureValueWithMultiArray_(cls, array: MLMultiArray) -> MLFeatureValue:
        return cls(array)

    def multiArrayValue(self) -> MLMultiArray:
        return self._array


class MLDictionaryFeatureProvider(Allocated):
    made = 0

    def initWithDictionary_error_(self, dictionary: Any, error: None) -> Any:
        if not isinstance(dictionary, NSMutableDictionary):
            raise Violation("features that are no NSDictionary")
        if fault("provider"):
            return None, NSError("these features cannot be provided")
        self._values = {name: dictionary.objectForKey_(name) for name in dictionary.allKeys()}
        MLDictionaryFeatureProvider.made += 1
        return self, None

    def featureValueForName_(self, name: str) -> MLFeatureValue | None:
        return self._values.get(name)


class MLPredictionOptions(Allocated):
    def init(self) -> MLPredictionOptions:
        return self

    def setOutputBackings_(self, backings: Any) -> None:
        if not isinstance(backings, NSMutableDictionary):
            raise Violation("backings that are no NSDictionary")
        self.backings = {name: backings.objectForKey_(name) for name in backings.allKeys()}


class MLModelConfiguration(Allocated):
    def init(self) -> MLModelConfiguration:
        self.units, self.function = 2, ""
        return self

    def setComputeUnits_(self, units: int) -> None:
        self.units = units

    def setFunctionName_(self, name: NSString) -> None:
        if not isinstance(name, NSString):
            raise Violation("a function's name that is no NSString")
        self.function = name


class MLModel(Owned):
    def __init__(self, emulator: Emulator, function: str) -> None:
        super().__init__()
        self._emulator, self._function = emulator, function
        self.bound: list[MLDictionaryFeatureProvider] = []

    @classmethod
    def compileModelAtURL_error_(cls, url: NSURL, error: None) -> Any:
        in_a_pool("compiling")
        match fault("compile"):
            case "error":
                return None, NSError("Failed to compile\nthe model", code=11)
            case "exception":
                raise objc.error("NSGenericException - compiler")
            case "crash":
                os.abort()
            case "hang":
                time.sleep(600)
        folder = Path(tempfile.mkdtemp()) / f"{Path(url.path()).stem}.mlmodelc"
        shutil.copytree(url.path(), folder / "copy.mlpackage")
        return NSURL.fileURLWithPath_(str(folder)), None

    @classmethod
    def modelWithContentsOfURL_configuration_error_(
        cls, url: NSURL, chosen: Any, none: None
    ) -> Any:
        in_a_pool("loading")
        if fault("load"):
            return None, NSError("Unable to build the ML execution plan: error code: -14", code=-14)
        if chosen.units != MLComputeUnitsCPUAndNeuralEngine:
            raise Violation(f"compute units {chosen.units}")
        package = Package.open(Path(url.path()) / "copy.mlpackage")
        function = chosen.function or package.default_function
        if function not in package.functions or function == fault("missing"):
            return None, NSError(f"The function {function} is not in the model", code=0)
        return cls(Emulator(package, "fp16"), function), None

    def predictionFromFeatures_options_error_(self, provider: Any, options: Any, none: None) -> Any:
        self._on_its_thread()
        in_a_pool("predicting")
        Memory.check_graves()
        self.bound.append(provider)  # as Core ML does, for a second after the call
        self.bound = self.bound[-2:]
        if fault("predict") == "exception":
            raise objc.error("NSInternalInconsistencyException - 0x1d")
        if fault("predict"):
            return None, NSError("Failed to evaluate model 0 in pipeline", code=0)
        arrays = {}
        for name, spec in self._emulator.functions[self._function].inputs.items():
            value = provider.featureValueForName_(name)
            array = None if value is None else value.multiArrayValue()
            if array is None or array.shape() != spec.shape or _type(array) != spec.dtype:
                return None, NSError(f"MultiArray {name} does not fit {spec.shape}", code=1)
            arrays[name] = array
        backings = options.backings
        for array in [*arrays.values(), *backings.values()]:
            if array._pixels is not None and array._pixels.locks:
                return None, NSError("a pixel buffer's base address is locked", code=2)
        return self._run(arrays, backings), None

    def _run(self, arrays: dict[str, MLMultiArray], backings: dict[str, MLMultiArray]) -> Any:
        before = {name: array.checksum() for name, array in arrays.items()}
        time.sleep(fault("slow_s", 0))
        inputs = {name: array.view() for name, array in arrays.items()}
        outputs = self._emulator.predict(self._function, inputs)
        if before != {name: array.checksum() for name, array in arrays.items()}:
            raise Violation("an input was changed while a prediction ran")
        return _Result({name: _placed(name, value, backings) for name, value in outputs.items()})


class _Result:
    def __init__(self, arrays: dict[str, MLMultiArray | None]) -> None:
        self._arrays = arrays

    def featureValueForName_(self, name: str) -> MLFeatureValue | None:
        array = self._arrays.get(name)
        return None if array is None else MLFeatureValue(array)


def _placed(name: str, value: np.ndarray, backings: dict[str, MLMultiArray]) -> Any:
    if name == fault("lost"):
        return None
    if fault("nan"):
        value = np.full_like(value, np.nan)
    if fault("wrong"):
        value = value[..., ::-1] + value.dtype.type(1)
    if fault("flat") == name:
        value = value.ravel()
    backing = backings.get(name)
    if backing is None or fault("backings") == "ignored" or backing.shape() != value.shape:
        shape = NSMutableArray.array()
        for size in value.shape:
            shape.addObject_(NSNumber.numberWithInteger_(size))
        backing, _ = MLMultiArray.alloc().initWithShape_dataType_error_(shape, FLOAT16, None)
    backing.view()[...] = value
    if backing._pixels is not None:
        backing._pixels.seal = backing._pixels.checksum()  # it was Core ML that wrote
    return backing


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(strides[::-1])


def _type(array: MLMultiArray) -> np.dtype[Any]:
    return np.dtype(TYPES[array.dataType()])


# The plan: which device would run which op


class MLNeuralEngineComputeDevice:
    pass


class MLGPUComputeDevice:
    pass


class MLCPUComputeDevice:
    pass


class _Plain:
    """Answers each name in `values` as a method without arguments."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Callable[[], Any]:
        if name not in self._values:
            raise AttributeError(name)
        return lambda: self._values[name]


class MLComputePlan:
    def __init__(self, package: Package) -> None:
        self._package = package

    @classmethod
    def loadContentsOfURL_configuration_completionHandler_(
        cls, url: NSURL, chosen: Any, handler: Callable[[Any, Any], None]
    ) -> None:
        def load() -> None:
            if fault("plan") == "error":
                handler(None, NSError("no plan for this model"))
            elif fault("plan") != "silent":
                handler(cls(Package.open(Path(url.path()) / "copy.mlpackage")), None)

        threading.Thread(target=load).start()  # a queue of Apple's, not the caller's thread

    def modelStructure(self) -> _Plain:
        if fault("plan") == "no program":
            return _Plain(program=None)
        functions = NSMutableDictionary.dictionary()
        for name, function in self._package.functions.items():
            operations = [_operation(op) for op in function.ops]
            block = _Plain(operations=operations)
            functions.setObject_forKey_(_Plain(block=block), NSString(name))
        return _Plain(program=_Plain(functions=functions))

    def computeDeviceUsageForMLProgramOperation_(self, operation: Any) -> Any:
        kind = operation.operatorName()
        if kind.removeprefix("ios18.").startswith(("const", "constexpr")):
            return None
        on_cpu = fault("plan") == "cpu" or kind in fault("on_cpu", ())
        device = MLCPUComputeDevice() if on_cpu else MLNeuralEngineComputeDevice()
        return _Plain(preferredComputeDevice=device)

    def estimatedCostOfMLProgramOperation_(self, operation: Any) -> Any:
        kind = operation.operatorName()
        if kind.endswith("reshape"):
            return None
        return _Plain(weight=0.1 if kind.endswith(("conv", "matmul")) else 0.001)


def _operation(op: Op) -> _Plain:
    prefix = "" if op.type == "const" else "ios18."
    return _Plain(operatorName=f"{prefix}{op.type}")
