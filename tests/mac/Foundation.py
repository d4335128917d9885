"""Stand-in for Foundation: native containers, errors, the process's state."""

from __future__ import annotations

from typing import Any

from standin import Violation, fault


class NSString(str):
    @classmethod
    def stringWithString_(cls, text: str) -> NSString:
        return cls(text)


class NSNumber(int):
    @classmethod
    def numberWithInteger_(cls, number: int) -> NSNumber:
        return cls(number)


class NSMutableArray:
    def __init__(self) -> None:
        self._items: list[Any] = []

    @classmethod
    def array(cls) -> NSMutableArray:
        return cls()

    def addObject_(self, item: Any) -> None:
        self._items.append(_native(item))

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class NSMutableDictionary:
    def __init__(self) -> None:
        self._items: dict[str, Any] = {}

    @classmethod
    def dictionary(cls) -> NSMutableDictionary:
        return cls()

    def setObject_forKey_(self, value: Any, key: NSString) -> None:
        if not isinstance(key, NSString):
            raise Violation(f"the key {key!r} is no NSString")
        self._items[key] = _native(value)

    def objectForKey_(self, key: str) -> Any:
        return self._items.get(key)

    def allKeys(self) -> list[str]:
        return list(self._items)


class NSURL:
    def __init__(self, path: str) -> None:
        self._path = path

    @classmethod
    def fileURLWithPath_(cls, path: str) -> NSURL:
        return cls(path)

    def path(self) -> str:
        return self._path


class NSError:
    def __init__(self, text: str, domain: str = "com.apple.CoreML", code: int = 0) -> None:
        self._text, self._domain, self._code = text, domain, code

    def localizedDescription(self) -> str:
        return self._text

    def domain(self) -> str:
        return self._domain

    def code(self) -> int:
        return self._code


class NSProcessInfo:
    @classmethod
    def processInfo(cls) -> NSProcessInfo:
        return cls()

    def thermalState(self) -> int:
        return fault("thermal", 0)

    def isLowPowerModeEnabled(self) -> bool:
        return fault("low_power", False)


def _native(value: Any) -> Any:
    if isinstance(value, dict | list | tuple) or type(value) in (str, int, float):
        raise Violation(f"{value!r} would be a proxy that calls back into Python")
    return value
