"""Turn a name on a hub, `owner/name[@revision]`, into a folder of this machine.

huggingface_hub fetches and caches: small files (config, tokenizer, index) at once, a file of
weights when it is first opened. The path of a folder in the cache names its model and commit.
"""

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageline.errors import UserError

PREFIX = "hub:"  # prefix that marks a hub name, not a folder
FETCHED = "STAGELINE_HUB_FETCHED"  # passes the results of the first process to the others of a run
_NAME = re.compile(r"(?:hub:)?(\w[\w.-]*/\w[\w.-]*?)(?:@(\w[\w./-]*))?")
_FILE = re.compile(r".*\.(jsonl?|ndjson|[ct]sv|txt|parquet|arrow|safetensors|bin|py|ya?ml|idx)")
_SNAPSHOT = re.compile(r"(.+)/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Weights of adapters are small. What torch.save writes is never fetched: it can run any program.
_AT_ONCE = (
    "*.json *.jinja *.txt *.model *.tiktoken *.spm *.bpe *.vocab *.py adapter_model.safetensors"
).split()
_LEFT_OUT = ["onnx/*", "openvino/*", "original/*", "runs/*", "*checkpoint-*/*"]


@dataclass(frozen=True)
class HubName:
    """A name as it was given: `owner/name`, and a branch, tag or commit of it."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")

    @property
    def is_pinned(self) -> bool:
        """Return whether the revision is a commit, which never changes."""
        return bool(self.revision and _COMMIT.fullmatch(self.revision))


def read_name(text: str | Path, *, folder: Path = Path()) -> HubName | None:
    """Parse `owner/name[@revision]`; None: it is a path.

    It is a path where something of this name, or a folder called as the owner, is in `folder`;
    never behind `hub:`.
    """
    text = str(text)
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    is_here = (folder / text).exists() or (folder / match[1]).parent.exists()
    is_path = not text.startswith(PREFIX) and (is_here or _FILE.fullmatch(text))
    return None if is_path else HubName(match[1], match[2])


def name_of(folder: str | Path) -> HubName | None:
    """Return the name and commit of a cache folder, from its path; None: another folder."""
    match = _SNAPSHOT.fullmatch(str(folder))
    return HubName(f"{match[2]}/{match[3]}", match[4]) if match else None


def title_of(folder: Path) -> str:
    """Return the name of a model: that on a hub, else that of its folder."""
    name = name_of(folder)
    return name.repo if name is not None else folder.name


def local_folder(given: str | Path, *, option: str = "`model_path`") -> Path:
    """Return the folder of a model, adapter or tokenizer; fetch it if it is not here."""
    name = read_name(given)
    if name is None:
        return Path(given).expanduser()
    found = _fetched().get(str(name))
    if found is None:
        asked = os.environ.get("USE_MODELSCOPE_HUB", "").lower()
        is_modelscope = asked in ("1", "true", "yes", "on")
        try:
            found = _from_modelscope(name) if is_modelscope else _from_hub(name)
        except Exception as error:  # a client raises errors of its transport
            raise _refused(name, option, error) from error
        _note(name, found)
    return Path(found)


def pinned_set(given: str, *, option: str = "`dataset_path`") -> str:
    """Return a data set with its commit, `hub:owner/name@commit`, or a path unchanged.

    `datasets` fetches the files. A name stays without a commit where the hub does not answer: the
    cache of `datasets` may do.
    """
    name = read_name(given)
    if name is None:
        return given
    full = f"{PREFIX}{name}"
    if name.is_pinned or full in _fetched():
        return _fetched().get(full, full)
    from huggingface_hub import HfApi, errors
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT as TIMEOUT

    try:
        info = HfApi().dataset_info(name.repo, revision=name.revision, timeout=TIMEOUT)
    except Exception as error:  # the client raises errors of its transport
        has_answered = isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500
        if has_answered or isinstance(error, errors.HFValidationError):
            raise _refused(name, option, error, kind="datasets") from error
        return full
    found = f"{PREFIX}{name.repo}@{info.sha}"
    _note(full, found)
    return found


def fetch_missing(path: Path) -> None:
    """Fetch a file of weights into its folder of the cache, if it is not there yet.

    A file whose name the hub does not have stays away.
    """
    name = name_of(path.parent)
    if name is None or path.exists():
        return
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        hf_hub_download(name.repo, path.name, revision=name.revision, cache_dir=path.parents[3])
    except Exception as error:
        is_local = isinstance(error, LocalEntryNotFoundError)  # the hub did not answer
        if is_local or not isinstance(error, EntryNotFoundError):
            raise _refused(name, path.name, error) from error


def _from_hub(name: HubName) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):  # small files
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return snapshot_download(
        name.repo,
        revision=name.revision,
        allow_patterns=_AT_ONCE,
        ignore_patterns=_LEFT_OUT,
        tqdm_class=Silent,
    )


def _from_modelscope(name: HubName) -> str:
    """Return the whole folder: its cache has no commits, so no file can be fetched later."""
    from modelscope import snapshot_download

    wanted = [*_AT_ONCE, "model*.safetensors"]
    patterns = {"allow_patterns": wanted, "ignore_patterns": _LEFT_OUT}
    return str(snapshot_download(name.repo, revision=name.revision, **patterns))


def _fetched() -> dict[str, str]:
    return dict(json.loads(os.environ.get(FETCHED, "{}")))


def _note(name: HubName | str, found: str) -> None:
    os.environ[FETCHED] = json.dumps({**_fetched(), str(name): found})
    if os.environ.get("RANK", "0") == "0":
        print(f"{name} is {found}", file=sys.stderr, flush=True)


def _refused(name: HubName, what: str, error: Exception, *, kind: str = "models") -> UserError:
    """Return the error of a failed fetch, with the name, the cause and the remedy."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name.repo}"
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        told = f"it is only for people on a list. Ask on {page}, then {log_in}"
    elif isinstance(error, errors.RevisionNotFoundError):
        told = f"there is no revision {name.revision}. {page} lists the branches and commits"
    elif isinstance(error, errors.RepositoryNotFoundError):
        here = Path(name.repo).absolute()
        told = f"none of the {kind} that you may see, and no folder {here}. Check it, or {log_in}"
    elif isinstance(error, errors.HFValidationError):
        told = f"{error}. Write owner/name[@revision]"
    elif isinstance(error, ImportError):
        told = f"{error}. Run `pip install modelscope`, or unset USE_MODELSCOPE_HUB"
    elif constants.is_offline_mode():
        cache = constants.HF_HUB_CACHE
        told = f"HF_HUB_OFFLINE is set, and {cache} lacks it. Run `hf download {name.repo}` once"
    else:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        told = f"{why}. Look at the network, the proxy, the disk and HF_ENDPOINT, or give a folder"
    return UserError(f"{what} {name}: {told}.")
