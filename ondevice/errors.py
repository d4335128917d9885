"""Every failure the product can explain.

    OnDeviceError
    ├── UserError                  the user's mistake: exit status 2
    │   ├── UnknownPair            no such name in pairs.toml, no such folder
    │   ├── BadCheckpoint          a source model that cannot be read
    │   ├── UnsupportedModel       a family or feature that is named and refused
    │   ├── ArtifactError          a package or folder whose manifest, hash or tokenizer is wrong
    │   ├── DownloadError          the default weights could not be brought
    │   ├── CacheUnwritable        the cache folder cannot be written, or the disk is full
    │   ├── BadRequest             a prompt or a parameter out of its range
    │   └── ContextOverflow        prompt longer than the verifier's context
    └── RuntimeFailure             ours: exit status 1
        ├── UnitFailed             a unit (drafter, verifier) raised
        │   └── UnitLost           it is gone for good: ended, hung, or its state is in doubt
        ├── Closed                 an engine or a session was used after its end
        ├── CallMismatch           a Core ML function called by a wrong name or with wrong tensors
        ├── RuntimeUnavailable     a Core ML runtime that this machine lacks, or that was refused
        └── UnknownOp              the emulator met an op that it does not know

A message is one line: what, expected and got, what to do.
"""


class OnDeviceError(Exception):
    """Root of the tree; `exit_status` is what the command line returns for it."""

    exit_status = 1


class UserError(OnDeviceError):
    """Something the user can mend."""

    exit_status = 2


class UnknownPair(UserError):
    """Neither a name in pairs.toml nor the folder of a converted pair."""


class BadCheckpoint(UserError):
    """A source model that is missing files, truncated or inconsistent."""


class UnsupportedModel(UserError):
    """A model family or feature that is not supported; the message lists what is."""


class ArtifactError(UserError):
    """A converted artifact whose manifest, hashes, tokenizer or shapes do not match."""


class DownloadError(UserError):
    """The default weights could not be downloaded or failed their checksum."""


class CacheUnwritable(UserError):
    """The cache folder cannot be written to, or its disk is full."""


class BadRequest(UserError):
    """A prompt or a parameter that is out of its range."""


class ContextOverflow(BadRequest):
    """Prompt and answer do not fit the verifier's context."""


class RuntimeFailure(OnDeviceError):
    """A failure that is not the user's."""


class UnitFailed(RuntimeFailure):
    """A unit raised while it worked."""


class UnitLost(UnitFailed):
    """A unit can do no more work: its process ended, it hung, or what it holds is in doubt."""


class CallMismatch(RuntimeFailure):
    """A Core ML function was called by a wrong name, or with missing, extra or wrong tensors."""


class RuntimeUnavailable(RuntimeFailure):
    """A Core ML runtime that cannot be had on this machine, or that failed its examination."""


class Closed(RuntimeFailure):
    """An engine or a session was used after it was closed."""


class UnknownOp(RuntimeFailure):
    """The emulator met an op that it does not know; the message names op and function."""
