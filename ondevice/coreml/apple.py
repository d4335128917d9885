"""Apple's frameworks through PyObjC: imported when asked for, handed native values only.

A Python list or dictionary that is given to Objective-C becomes a proxy: whenever Core ML looks at
it, in the middle of a prediction too, it calls back into Python and waits for the interpreter's
lock. Containers, numbers and names are therefore made native here, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ondevice.errors import RuntimeUnavailable, UnitFailed


class Apple:
    """CoreML, CoreVideo, Foundation and PyObjC itself, as modules."""

    def __init__(self) -> None:
        """Raises RuntimeUnavailable where PyObjC's frameworks are not installed."""
        try:
            import CoreML
            import Foundation
            import objc
            from Quartz import CoreVideo
        except ImportError as error:
            raise RuntimeUnavailable(
                f"no PyObjC frameworks ({error}); on a Mac: pip install pyobjc-framework-CoreML "
                "pyobjc-framework-Quartz"
            ) from error
        self.core_ml: Any = CoreML
        self.core_video: Any = CoreVideo
        self.foundation: Any = Foundation
        self.objc: Any = objc

    def array(self, numbers: Sequence[int]) -> Any:
        """An NSArray of NSNumbers."""
        array = self.foundation.NSMutableArray.array()
        for number in numbers:
            array.addObject_(self.foundation.NSNumber.numberWithInteger_(number))
        return array

    def text(self, text: str) -> Any:
        """An NSString."""
        return self.foundation.NSString.stringWithString_(text)

    def dictionary(self, values: Mapping[str, Any]) -> Any:
        """An NSDictionary of native values."""
        dictionary = self.foundation.NSMutableDictionary.dictionary()
        for name, value in values.items():
            dictionary.setObject_forKey_(value, self.text(name))
        return dictionary

    def url(self, path: Path) -> Any:
        """A file's NSURL."""
        return self.foundation.NSURL.fileURLWithPath_(str(path))

    def pool(self) -> Any:
        """A context manager: what Apple's code releases in the block is gone after it."""
        return self.objc.autorelease_pool()

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """An Objective-C exception in the block becomes UnitFailed, `what` its first words."""
        try:
            yield
        except self.objc.error as error:
            raise UnitFailed(f"{what}: {one_line(error)}") from error

    def must(self, answer: tuple[Any, Any], what: str) -> Any:
        """The object of an (object, NSError) answer; UnitFailed, beginning with `what`, if none."""
        value, error = answer
        if value is None:
            raise UnitFailed(f"{what}: {describe(error)}")
        return value


def describe(error: Any) -> str:
    """An NSError in one line."""
    if error is None:
        return "no reason given"
    return f"{one_line(error.localizedDescription())} ({error.domain()} {error.code()})"


def one_line(text: object) -> str:
    """Text of others, made fit for a message: one line, 300 characters."""
    return " ".join(str(text).split())[:300]
