"""Models by their names: `owner/name[@revision]` becomes a folder of this machine, here alone.

huggingface_hub fetches, and keeps what it fetched in its cache: small files (config, tokenizer,
index) at once, a file of weights when it is first opened. A folder of the cache tells by its path
of which model and commit it is, so whoever opens a file in it needs to know nothing else.
"""

import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stageline.errors import UserError
from stageline.terminal import is_first

PREFIX = "hub:"  # in front of a name: it is none of a folder
FETCHED = "STAGELINE_HUB_FETCHED"  # tells the processes of a run what the first one has found
_NAME = re.compile(r"(?:hub:)?(\w[\w.-]*/\w[\w.-]*?)(?:@(\w[\w./-]*))?")
_FILE = re.compile(r".*\.(jsonl?|ndjson|[ct]sv|txt|parquet|arrow|safetensors|bin|py|ya?ml|idx)")
_SNAPSHOT = re.compile(r"(.+)/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Weights other than these are never fetched: what torch.save writes can run any program.
_AT_ONCE = "*.json *.jinja *.txt *.model *.tiktoken *.spm *.bpe *.vocab *.py".split()
_LEFT_OUT = ["onnx/*", "openvino/*", "original/*", "runs/*", "*checkpoint-*/*"]
_ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True)
class HubName:
    """A name as it was given: `owner/name`, and a branch, tag or commit of it."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return bool(self.revision and _COMMIT.fullmatch(self.revision))


def read_name(text: str | Path, *, folder: Path = Path()) -> HubName | None:
    """The name that `owner/name[@revision]` is; None: it is a path.

    It is one where something of this name, or a folder called as the owner, lies in `folder`; never
    behind `hub:`.
    """
    text = str(text)
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    is_here = (folder / text).exists() or (folder / match[1]).parent.exists()
    is_path = not text.startswith(PREFIX) and (is_here or _FILE.fullmatch(text))
    return None if is_path else HubName(match[1], match[2])


def with_commit(given: str, recorded: Iterable[str]) -> str:
    """A name with the commit that an earlier start of the run has recorded for it, if it did."""
    name = read_name(given)
    if name is None or name.is_pinned:
        return given
    for old in recorded:
        then = read_name(str(old))
        if then is not None and then.repo == name.repo and then.is_pinned:
            return old
    return given


def name_of(folder: str | Path) -> HubName | None:
    """The name and commit that a folder of the cache is of, by its path; None: it is another."""
    match = _SNAPSHOT.fullmatch(str(folder))
    return HubName(f"{match[2]}/{match[3]}", match[4]) if match else None


def title_of(folder: Path) -> str:
    """What a model is called: its name on a hub, else that of its folder."""
    name = name_of(folder)
    return name.repo if name is not None else folder.name


def local_folder(given: str | Path, *, option: str = "`model_path`") -> Path:
    """The folder of a model, adapter or tokenizer, fetched if it is none of this machine.

    Raises:
        UserError: nothing of this name can be had; it says why and what to do.
    """
    name = read_name(given)
    if name is None:
        return Path(given).expanduser()
    found = _fetched().get(str(name))
    if found is None:
        if _uses_modelscope():
            found = _from_modelscope(name, option)
        else:
            found = _from_hub(name, option)
            if Path(found, "adapter_config.json").exists():
                fetch_missing(Path(found, _ADAPTER))
        _note(name, found)
    return Path(found)


def pinned_set(given: str, *, option: str = "`dataset_path`") -> str:
    """The name of a data set with its commit, `hub:owner/name@commit`; a path stays as it is.

    The library for data sets fetches the files itself. A name stays without a commit where the hub
    does not answer: what the library has kept of it may do.
    """
    name = read_name(given)
    if name is None:
        return given
    if name.is_pinned:
        return f"{PREFIX}{name}"
    found = _fetched().get(f"{PREFIX}{name}")
    if found is None:
        from huggingface_hub import HfApi
        from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT as TIMEOUT

        try:
            info = HfApi().dataset_info(name.repo, revision=name.revision, timeout=TIMEOUT)
            found = f"{PREFIX}{name.repo}@{info.sha}"
        except Exception as error:  # the library raises what its transport does
            if _is_silence(error):
                return f"{PREFIX}{name}"
            raise _refused(name, option, error, kind="datasets") from error
        _note(f"{PREFIX}{name}", found)
    return found


def can_fetch(path: Path) -> bool:
    """Whether a file that is not here belongs to a folder of the cache."""
    return not path.exists() and name_of(path.parent) is not None


def fetch_missing(path: Path) -> None:
    """Fetches a file of weights into its folder of the cache, if it is not there yet.

    Processes of a machine that want the same file wait for the first of them. A file whose name
    the hub does not have stays away: whoever wants it says so.

    Raises:
        UserError: the hub does not give it.
    """
    name = name_of(path.parent)
    if name is None or path.exists():
        return
    from filelock import FileLock
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    cache = path.parents[3]
    lock = cache / ".locks" / path.parents[2].name / f"{path.name}.stageline.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if not path.exists():
                hf_hub_download(name.repo, path.name, revision=name.revision, cache_dir=cache)
    except Exception as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return
        raise _refused(name, path.name, error) from error


def _from_hub(name: HubName, option: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    had_bars = not are_progress_bars_disabled()
    disable_progress_bars()  # of small files
    try:
        return snapshot_download(
            name.repo,
            revision=name.revision,
            allow_patterns=_AT_ONCE,
            ignore_patterns=_LEFT_OUT,
        )
    except Exception as error:  # the library raises what its transport does
        raise _refused(name, option, error) from error
    finally:
        if had_bars:
            enable_progress_bars()


def _uses_modelscope() -> bool:
    return os.environ.get("USE_MODELSCOPE_HUB", "").lower() in ("1", "true", "yes", "on")


def _from_modelscope(name: HubName, option: str) -> str:
    """The whole folder: its cache does not tell commits, so no file can be fetched later."""
    from filelock import FileLock

    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise UserError(
            f"{option} {name} was to come from ModelScope (USE_MODELSCOPE_HUB), whose package was "
            "expected: it is not installed. pip install modelscope, or take the variable away."
        ) from error
    lock = Path.home() / ".cache" / "modelscope" / f"{name.repo.replace('/', '--')}.stageline.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            return str(
                snapshot_download(
                    name.repo,
                    revision=name.revision,
                    allow_patterns=[*_AT_ONCE, _ADAPTER, "model*.safetensors"],
                    ignore_patterns=_LEFT_OUT,
                )
            )
    except Exception as error:
        raise _refused(name, option, error, where="ModelScope") from error


def _fetched() -> dict[str, str]:
    return dict(json.loads(os.environ.get(FETCHED, "{}")))


def _note(name: HubName | str, found: str) -> None:
    os.environ[FETCHED] = json.dumps({**_fetched(), str(name): found})
    if is_first():
        commit = found if isinstance(name, str) else f"{name} is {found}"
        print(commit, file=sys.stderr, flush=True)


def _is_silence(error: BaseException) -> bool:
    """Whether nobody answered; what refuses has the class of its refusal."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    return not isinstance(error, HFValidationError)


def _refused(
    name: HubName,
    what: str,
    error: Exception,
    *,
    kind: Literal["models", "datasets"] = "models",
    where: str = "",
) -> UserError:
    """The error for what a hub would not give: what was asked for, why, and the cure."""
    from huggingface_hub import constants, errors

    at = where or constants.ENDPOINT
    asked = f"{what} {name}: {at}"
    logged_in = "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{asked} gives it only to people whom its owner has let in, and a token of one of "
            f"them was expected. Ask on {constants.ENDPOINT}/{name.repo}, then {logged_in}."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(
            f"{asked} has no revision {name.revision} of {name.repo}, a branch, a tag or a commit "
            f"was expected behind the @. Its page lists them: {constants.ENDPOINT}/{name.repo}."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        local = "" if kind == "datasets" else f", and no folder {Path(name.repo).absolute()}"
        return UserError(
            f"{asked} knows nothing of this name that you may see{local}. A folder of this machine "
            f"or a name of the hub's {kind} was expected. Check the spelling; if it is private, "
            f"{logged_in}."
        )
    if isinstance(error, errors.HFValidationError):
        return UserError(
            f"{asked} has no such names ({error}). owner/name[@revision] was expected."
        )
    told = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {told[0][:200] if told else ''}"
    if constants.is_offline_mode() and not where:
        return UserError(
            f"{asked} is not asked, because HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} "
            "does not have all of it; a copy there was expected. Fetch it once with a network "
            f"(`hf download {name.repo}`), or give a folder."
        )
    return UserError(
        f"{asked} did not give it ({reason}), and {constants.HF_HUB_CACHE} does not have it. An "
        "answer or a copy was expected. Look at the network, the proxy, the room on the disk and "
        "HF_ENDPOINT, and start again: whole files that came are kept. Or give a folder."
    )
