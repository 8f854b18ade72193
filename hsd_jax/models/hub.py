"""Fetches targets and drafters from the Hugging Face hub into local folders: safetensors and settings, never pickles.

The library `huggingface_hub` does the caching, the authentication and the downloads. Its environment variables apply
(HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). This module knows files only by their names, apart from
the index of shards, and does not import jax. Read next: `convert.py`, which reads such a folder.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hsd_jax.host.deadline import within
from hsd_jax.host.files import read_json

__all__ = ["HubError", "fetch", "is_repo_name"]

ANSWER_SECONDS = 10.0
"""The time limit for an answer of the hub, including name lookup, connections and redirects."""

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
DRAFTERS = {"drafter_config.json": "drafter.safetensors", "ngram_config.json": "ngram.safetensors"}
STEERING = {"steering_config.json": "steering.safetensors"}
PAIRS = {**DRAFTERS, **STEERING}
"""Configuration files of drafters and their weights. Steering needs a model in its folder, the others do not."""

SMALL_FILES = (
    CONFIG_FILE,
    *PAIRS,
    INDEX_FILE,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_BRANCH = "main"
_BAD_TOKEN = "Invalid credentials in Authorization header"  # the hub's message for a wrong token, not a missing one
_PART = re.compile(r"\w(?:[\w.-]{0,94}\w)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".jsonl", ".yaml", *PICKLES)


class HubError(ValueError):
    """The reason why a repository cannot be fetched.

    Its text is "NAME (revision REVISION): REASON". `reason` is the last part, for a caller that lists its attempts.
    """

    def __init__(self, name: str, revision: str, reason: str):
        super().__init__(name, revision, reason)
        self.name, self.revision, self.reason = name, revision, reason

    def __str__(self) -> str:
        return f"{self.name} (revision {self.revision}): {self.reason}"


class _NoAnswer(Exception):
    """The hub gave no answer, or not the answer of a hub."""


def is_repo_name(text: str) -> bool:
    """Whether a text is ORG/NAME as the hub allows it and does not end like a file name.

    A relative path of two parts, as "runs/mine", has the same form. The caller must look for a folder first.
    """
    parts = text.split("/")
    return (
        len(parts) == 2
        and all(_PART.fullmatch(part) for part in parts)
        and not ("--" in text or ".." in text or text.endswith(".git"))
        and not text.lower().endswith(_FILE_ENDINGS)
    )


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fetch(name: str, revision: str | None = None, report: Callable[[str], None] = _to_stderr) -> Path:
    """Fetches a target or a drafter of the hub and returns its folder in the shared cache of Hugging Face libraries.

    The hub is asked first, so a branch that has moved is noticed. If the hub does not answer within ANSWER_SECONDS, or
    if HF_HUB_OFFLINE is set, a complete snapshot from the cache is used. The function fetches SMALL_FILES and the
    safetensors that this package reads, only from the top folder of the repository. It never fetches pickles or code.
    Progress is shown on stderr.

    Args:
      name: ORG/NAME.
      revision: a branch, a tag or a commit. None: the branch `main`.
      report: receives one line if the cache is used because the hub does not answer.
    Raises:
      HubError: a ValueError that states the fault and the remedy: no such repository or revision, no access, no
        readable weights, no answer and nothing in the cache, or no space on the disk.
    """
    shown = _BRANCH if revision is None else revision
    if not is_repo_name(name):
        raise HubError(name, shown, "not a name of the hub; expected ORG/NAME")
    if not shown.strip() or ".." in shown or shown.startswith("/"):
        raise HubError(name, shown, "not a valid name of a branch, tag or commit")
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    if constants.HF_HUB_OFFLINE:
        folder, lacks = _find_cached(cache, name, shown)
        if folder is None:
            raise HubError(
                name,
                shown,
                f"HF_HUB_OFFLINE is set and {lacks}. Unset it, or fetch the repository with a network connection:"
                f" `hf download {name}{'' if revision is None else f' --revision {revision}'}`",
            )
        return folder
    try:
        commit, listing = _ask(name, revision)
    except _NoAnswer as error:
        folder, lacks = _find_cached(cache, name, shown)
        if folder is None:
            raise HubError(name, shown, f"{error}, and {lacks}. Check the network, or give a local folder") from error
        report(f"{name}: {error}; using {folder.name[:12]} from the cache")
        return folder
    except Exception as error:
        raise HubError(name, shown, _refusal(error, name)) from error
    return _download(cache, name, shown, commit, listing, report)


def _ask(name: str, revision: str | None) -> tuple[str, list[str]]:
    """The commit of a revision and the paths of its files.

    Raises:
      _NoAnswer: if the hub does not answer in time.
      Exception: the library's exception if the hub refuses.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    endpoint = constants.ENDPOINT
    # The library's time limit applies to each read and each redirect, and not to name lookup. `within` limits the total
    # time. The library's limit is longer, so that it never ends first.
    ask = functools.partial(HfApi(endpoint=endpoint).model_info, name, revision=revision, timeout=2 * ANSWER_SECONDS)
    try:
        answer = within(ANSWER_SECONDS, ask)
    except TimeoutError as error:
        raise _NoAnswer(f"no answer from {endpoint} within {ANSWER_SECONDS:g} s") from error
    except HfHubHTTPError as error:
        if (status := error.response.status_code) in (408, 429) or status >= 500:
            raise _NoAnswer(f"{endpoint} answers with status {status}") from error
        raise
    except Exception as error:
        raise _NoAnswer(f"no answer from {endpoint} ({_short(error)})") from error
    if not answer.sha or answer.siblings is None:
        raise _NoAnswer(f"{endpoint} does not answer with a commit and files, as a hub does; check HF_ENDPOINT")
    return answer.sha, [sibling.rfilename for sibling in answer.siblings]


def _download(
    cache: Path, name: str, revision: str, commit: str, listing: list[str], report: Callable[[str], None]
) -> Path:
    """Fetches the missing files of a commit, the small files first, because they show most faults."""
    names = {path for path in listing if "/" not in path}
    lacks = _missing(names)
    if lacks:
        raise HubError(name, revision, _useless(lacks, name, listing))
    try:
        small = [_get(cache, name, commit, file) for file in SMALL_FILES if file in names]
        folder = small.pop().parent
        shards = _checked_shards(folder, names, name, revision)
        weights = [*shards, *(file for file in PAIRS.values() if file in names)]
        _check_room(cache, name, revision, commit, weights)
        for file in weights:
            _get(cache, name, commit, file)
    except HubError:
        raise
    except Exception as error:
        raise HubError(name, revision, _broken(error, name, cache)) from error
    _write_ref(cache, name, revision, commit, report)
    return folder


def _checked_shards(folder: Path, names: set[str], name: str, revision: str) -> list[str]:
    """`_shards` of the repository. Raises a HubError if one is missing."""
    try:
        shards = _shards(folder, names)
        lacks = _missing(names, shards)
    except ValueError as error:
        shards, lacks = [], str(error)
    if lacks:
        raise HubError(name, revision, f"the repository is incomplete: {lacks}. Report it to its owner, or use another")
    return shards


def _get(cache: Path, name: str, commit: str, file: str, dry_run: bool = False) -> Any:
    """The path of one file, fetched if it is not in the cache. With `dry_run`, only the library's report about it."""
    from huggingface_hub import constants, hf_hub_download

    where = {"revision": commit, "cache_dir": cache, "endpoint": constants.ENDPOINT, "library_name": "hsd_jax"}
    found: Any = hf_hub_download(name, file, dry_run=dry_run, **where)
    return found if dry_run else Path(found)


def _check_room(cache: Path, name: str, revision: str, commit: str, weights: list[str]) -> None:
    """Raises a HubError if the disk has no space for the weights that are still to be fetched."""
    infos = [_get(cache, name, commit, file, dry_run=True) for file in weights]
    wanted = sum(info.file_size or 0 for info in infos if info.will_download)
    free = shutil.disk_usage(cache).free
    if wanted > free:
        raise HubError(
            name,
            revision,
            f"{wanted / 1e9:,.1f} GB are to be fetched and {cache} has {free / 1e9:,.1f} GB free. Free some space"
            " there, or set HF_HOME to a folder on a larger disk",
        )


def _write_ref(cache: Path, name: str, revision: str, commit: str, report: Callable[[str], None]) -> None:
    """Records the current commit of a branch in the cache.

    The library records it before it has the files. Here it comes last, so that after an interrupted update the old
    snapshot is still found offline.
    """
    ref = _store(cache, name) / "refs" / revision
    if revision == commit or (ref.is_file() and ref.read_text().strip() == commit):
        return
    # `files.replacing` writes only on the first host of a run, but each host has its own cache.
    temporary = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
    try:
        ref.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(commit)
        temporary.replace(ref)
    except OSError as error:
        report(f"{ref}: cannot be written ({error.strerror}), so {name} will not be found offline")
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _store(cache: Path, name: str) -> Path:
    return cache / f"models--{name.replace('/', '--')}"


def _find_cached(cache: Path, name: str, revision: str) -> tuple[Path | None, str]:
    """The complete snapshot of a revision in the cache, or None and a text that says what is missing."""
    store, commit = _store(cache, name), revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = (store / "refs" / revision).read_text().strip()
        except OSError:
            commit = ""
    folder = store / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not folder.is_dir():
        return None, f"it is not in the cache {cache}"
    names = {path.name for path in folder.iterdir() if path.is_file()}  # False for a broken link
    try:
        lacks = _missing(names, _shards(folder, names))
    except (ValueError, OSError) as error:
        lacks = _short(error)
    return (None, f"it is incomplete in the cache {cache}: {lacks}") if lacks else (folder, "")


def _missing(names: set[str], shards: Iterable[str] = ()) -> str:
    """A text that says what a folder with these files lacks as a target or a drafter. Empty if it lacks nothing.

    Without `shards`, the files that an index names are assumed to exist.
    """
    for shard in shards:
        if shard not in names:
            return f"{shard} is missing"
    for config, weights in PAIRS.items():
        if (config in names) != (weights in names):
            there, gone = (config, weights) if config in names else (weights, config)
            return f"{there} exists but {gone} is missing"
    if names.intersection(DRAFTERS) and not names.intersection((*STEERING, WEIGHTS_FILE, INDEX_FILE)):
        return ""
    if not names.intersection((WEIGHTS_FILE, INDEX_FILE)):
        return f"{WEIGHTS_FILE} and {INDEX_FILE} are missing"
    return "" if CONFIG_FILE in names else f"{CONFIG_FILE} is missing"


def _shards(folder: Path, names: set[str]) -> list[str]:
    """The files of a model's weights, as `convert.read_weights` reads them. Empty for a drafter without a model.

    Raises:
      ValueError: if the index names no file, or a file other than safetensors of the same folder.
    """
    if WEIGHTS_FILE in names or INDEX_FILE not in names:
        return [WEIGHTS_FILE] if WEIGHTS_FILE in names else []
    index = read_json(folder / INDEX_FILE)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{INDEX_FILE} has no weight_map")
    shards = sorted({str(shard) for shard in weight_map.values()})
    for shard in shards:
        if "/" in shard or not shard.endswith(".safetensors"):
            raise ValueError(f"{INDEX_FILE} names {shard!r}; expected safetensors of the same folder")
    return shards


def _useless(lacks: str, name: str, listing: list[str]) -> str:
    """The reason why nothing of a repository is fetched."""
    top = sorted(path for path in listing if "/" not in path)
    has_weights = any(path.endswith(".safetensors") for path in top)
    ggufs = sorted(path for path in listing if path.endswith(".gguf"))
    pickles = [path for path in top if path.endswith(PICKLES)]
    if ggufs and not has_weights:
        return (
            f"has its weights only as GGUF ({_few(ggufs)}). Fetch one, `hf download {name} {ggufs[0]}`, and give the"
            " path that it prints"
        )
    if pickles and not has_weights:
        return (
            f"has its weights only as pickles ({_few(pickles)}), which are never loaded, because they can run code."
            " Convert them to safetensors (in transformers: save_pretrained)"
        )
    return (
        f"{lacks}. Expected a model ({CONFIG_FILE} and {WEIGHTS_FILE} or its shards) or a drafter"
        f" ({', '.join(DRAFTERS)}) at the top of the repository; found {_few(top) or 'no files'}"
    )


def _refusal(error: Exception, name: str) -> str:
    """The meaning of the hub's answer, and the remedy."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"gated: its owner grants access on request. Request it at {page}, then log in with `hf auth login` or set"
            " HF_TOKEN"
        )
    response = error.response if isinstance(error, errors.HfHubHTTPError) else None
    status = None if response is None else response.status_code
    is_stranger = status == 401 and response is not None and response.headers.get("X-Error-Message") != _BAD_TOKEN
    if is_stranger or isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"no such repository, or a private one ({page}). Check its name, or log in with `hf auth login` or set"
            " HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no such branch, tag or commit; {page}/tree/main lists them"
    if status in (401, 403):
        return (
            f"the hub refuses the token (status {status}). Log in again with `hf auth login`, or set HF_TOKEN to a"
            " valid token"
        )
    return f"the hub refuses the request ({_short(error)}); see {page}"


def _broken(error: Exception, name: str, cache: Path) -> str:
    """The reason why a download failed, and the remedy."""
    from huggingface_hub.errors import HfHubHTTPError

    chain, cause = [], error
    while cause is not None and cause not in chain:  # the library wraps the exceptions that it catches
        chain.append(cause)
        cause = cause.__cause__
    for cause in chain:
        if isinstance(cause, HfHubHTTPError) and 400 <= cause.response.status_code < 500:
            return _refusal(cause, name)
    code = next((cause.errno for cause in chain if isinstance(cause, OSError) and cause.errno), None)
    if code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return f"the disk of {cache} is full. Free some space, or set HF_HOME to a folder on a larger disk"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{cache} cannot be written. Set HF_HOME to a folder that can be written"
    return f"the download failed ({_short(chain[-1])}). Start again: complete files are kept"


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _few(paths: list[str], limit: int = 3) -> str:
    rest = len(paths) - limit
    return ", ".join(paths[:limit]) + (f" and {rest} more" if rest > 0 else "")
