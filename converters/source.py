"""Where a model comes from: a local folder or GGUF file, or the hub by its id.

Downloads are huggingface_hub's own: its cache, its token, its offline mode (HF_HUB_OFFLINE), its
endpoint (HF_ENDPOINT).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ondevice.artifact import unwritable
from ondevice.converters.progress import Reporter
from ondevice.errors import BadCheckpoint, DownloadError

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?P<file>(/[\w./-]+)?\.gguf)?(@(?P<revision>.+))?")
_NEEDED = ["*.json", "model*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]


def find_source(source: str, reporter: Reporter) -> Path:
    """The local path of SOURCE; a hub id is downloaded, or taken from the hub's cache.

    source: a path, OWNER/NAME, OWNER/NAME/FILE.gguf, either with @REVISION. Raises BadCheckpoint
    for what is none of these, DownloadError when the hub has no such model or cannot be reached.
    """
    path = Path(source).expanduser()
    if os.path.lexists(path):
        return path
    found = _HUB_ID.fullmatch(source)
    if found is None or source.startswith((".", "/", "~")):
        raise BadCheckpoint(
            f"no model at {source}: expected a folder in Hugging Face format, a .gguf file, or the "
            "id of a model on the hub (OWNER/NAME); check the path"
        )
    return _downloaded(found["repo"], found["file"], found["revision"], reporter)


def _downloaded(repo: str, file: str | None, revision: str | None, reporter: Reporter) -> Path:
    import huggingface_hub as hub

    reporter.say(f"Fetching {repo} from the hub or its cache")
    try:
        if file is not None:
            return Path(hub.hf_hub_download(repo, file.lstrip("/"), revision=revision))
        return Path(hub.snapshot_download(repo, revision=revision, allow_patterns=_NEEDED))
    except Exception as error:
        raise _explained(repo, error) from error


def _explained(repo: str, error: Exception) -> Exception:
    """The one-line error for what the hub's client raised; `error` itself if it is not its."""
    from huggingface_hub import errors

    known = {
        errors.GatedRepoError: "its licence must be accepted on the hub first; then log in "
        "(`hf auth login`)",
        errors.RepositoryNotFoundError: "the hub has no such model, or it is private; check the "
        "id, or log in (`hf auth login`)",
        errors.RevisionNotFoundError: "the model has no such revision; check what follows the @",
        errors.EntryNotFoundError: "the model has no such file; check its name",
        errors.OfflineModeIsEnabled: "HF_HUB_OFFLINE is set and it is not in the cache; unset it",
        errors.HFValidationError: "that is no id of a model; expected OWNER/NAME",
    }
    for kind, reason in known.items():
        if isinstance(error, kind):
            # LocalEntryNotFoundError is an EntryNotFoundError that means: could not be reached.
            if isinstance(error, errors.LocalEntryNotFoundError):
                break
            return DownloadError(f"could not get {repo}: {reason}")
    if isinstance(error, OSError) and error.errno is not None and not _is_network(error):
        return unwritable(Path(hub_cache()), error)
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    advice = "unset HF_HUB_OFFLINE" if offline else "check the network"
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DownloadError(f"could not get {repo}: {first_line[:200]}; {advice}, or give a folder")


def _is_network(error: OSError) -> bool:
    return isinstance(error, ConnectionError | TimeoutError)


def hub_cache() -> str:
    """Folder of the hub's own cache."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)
