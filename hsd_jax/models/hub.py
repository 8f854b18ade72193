"""Repositories of the Hugging Face hub as local folders: what is fetched of a target or a drafter, and what never is.

The library `huggingface_hub` has the cache, the tokens and the downloads; its environment variables hold (HF_HOME,
HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). Knows nothing about what the files mean beyond their names, and
imports no jax. Read next: `convert.py`, which reads such a folder.
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
"""How long the hub may take until it answers: names, connections and redirects together."""

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
DRAFTERS = {"drafter_config.json": "drafter.safetensors", "ngram_config.json": "ngram.safetensors"}
STEERING = {"steering_config.json": "steering.safetensors"}
PAIRS = {**DRAFTERS, **STEERING}
"""Configurations of drafters and their weights. Steering lies beside a model, the others may lie alone."""

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
_BAD_TOKEN = "Invalid credentials in Authorization header"  # so the hub says where a token, not its absence, is wrong
_PART = re.compile(r"\w(?:[\w.-]{0,94}\w)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".jsonl", ".yaml", *PICKLES)


class HubError(ValueError):
    """Says why a repository cannot be had.

    `str` of it is "NAME (revision REVISION): REASON"; `reason` is the last part alone, for a caller that lists what
    it has tried.
    """

    def __init__(self, name: str, revision: str, reason: str):
        super().__init__(name, revision, reason)
        self.name, self.revision, self.reason = name, revision, reason

    def __str__(self) -> str:
        return f"{self.name} (revision {self.revision}): {self.reason}"


class _NoAnswer(Exception):
    """The hub has not answered, or not as a hub does."""


def is_repo_name(text: str) -> bool:
    """Whether a text is ORG/NAME as the hub allows it, and no path of a file.

    Of a relative path of two parts, "runs/mine", nobody can say; the caller looks for a folder first.
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
    """The folder with a target or a drafter of the hub, in the cache that all Hugging Face libraries share.

    The hub is asked first, so that a branch that has moved is seen. If it gives no answer within ANSWER_SECONDS, or if
    HF_HUB_OFFLINE is set, a whole snapshot in the cache is taken. Fetched are SMALL_FILES and the safetensors that
    the readers of this package open, all from the top of the repository: no pickles and no code. Progress is shown on
    stderr.

    Args:
      name: ORG/NAME.
      revision: a branch, a tag or a commit; None is the branch `main`.
      report: is told, in a line, where the cache stands in for the hub.
    Raises:
      HubError: a ValueError that says what is wrong and what to do: no such repository or revision, no access, no
        weights that can be read, no answer and nothing in the cache, no room on the disk.
    """
    shown = _BRANCH if revision is None else revision
    if not is_repo_name(name):
        raise HubError(name, shown, "no repository of the hub is called so; expected ORG/NAME")
    if not shown.strip() or ".." in shown or shown.startswith("/"):
        raise HubError(name, shown, "no branch, tag or commit can be called so")
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    if constants.HF_HUB_OFFLINE:
        folder, lacks = _find_cached(cache, name, shown)
        if folder is None:
            raise HubError(
                name,
                shown,
                f"HF_HUB_OFFLINE is set and {lacks}. Unset it, or fetch where there is a network:"
                f" `hf download {name}{'' if revision is None else f' --revision {revision}'}`",
            )
        return folder
    try:
        commit, listing = _ask(name, revision)
    except _NoAnswer as error:
        folder, lacks = _find_cached(cache, name, shown)
        if folder is None:
            raise HubError(name, shown, f"{error}, and {lacks}. Look to the network, or give a local folder") from error
        report(f"{name}: {error}; taking {folder.name[:12]} from the cache")
        return folder
    except Exception as error:
        raise HubError(name, shown, _refusal(error, name)) from error
    return _download(cache, name, shown, commit, listing, report)


def _ask(name: str, revision: str | None) -> tuple[str, list[str]]:
    """The commit of a revision and the paths of its files.

    Raises:
      _NoAnswer: where there is none in time.
      Exception: the library's, where the hub refuses.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    endpoint = constants.ENDPOINT
    # The library's limit holds for each read and each redirect, and for looking up a name there is none: all of them
    # together are waited for here, and the library's limit is the longer one, so that it is never the first to end.
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
        raise _NoAnswer(f"{endpoint} names neither commit nor files, which a hub does; look to HF_ENDPOINT")
    return answer.sha, [sibling.rfilename for sibling in answer.siblings]


def _download(
    cache: Path, name: str, revision: str, commit: str, listing: list[str], report: Callable[[str], None]
) -> Path:
    """Fetches what the folder of a commit lacks: the small files first, in which most faults show."""
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
    """`_shards`, all of which the repository holds; a HubError where it does not."""
    try:
        shards = _shards(folder, names)
        lacks = _missing(names, shards)
    except ValueError as error:
        shards, lacks = [], str(error)
    if lacks:
        raise HubError(name, revision, f"the repository is not whole: {lacks}. Tell its owner, or take another")
    return shards


def _get(cache: Path, name: str, commit: str, file: str, dry_run: bool = False) -> Any:
    """The path of one file, fetched if it is not in the cache; with `dry_run` what fetching it would take."""
    from huggingface_hub import constants, hf_hub_download

    where = {"revision": commit, "cache_dir": cache, "endpoint": constants.ENDPOINT, "library_name": "hsd_jax"}
    found: Any = hf_hub_download(name, file, dry_run=dry_run, **where)
    return found if dry_run else Path(found)


def _check_room(cache: Path, name: str, revision: str, commit: str, weights: list[str]) -> None:
    """Raises a HubError where the disk is too small for the weights that are still to come."""
    infos = [_get(cache, name, commit, file, dry_run=True) for file in weights]
    wanted = sum(info.file_size or 0 for info in infos if info.will_download)
    free = shutil.disk_usage(cache).free
    if wanted > free:
        raise HubError(
            name,
            revision,
            f"{wanted / 1e9:,.1f} GB are to be fetched and {cache} has room for {free / 1e9:,.1f} GB. Make room there,"
            " or set HF_HOME to a folder on a larger disk",
        )


def _write_ref(cache: Path, name: str, revision: str, commit: str, report: Callable[[str], None]) -> None:
    """Notes which commit a branch stands at, as the library does, which does so before it has the files.

    Here it comes last: an update that breaks off leaves the snapshot that was there to be found offline.
    """
    ref = _store(cache, name) / "refs" / revision
    if revision == commit or (ref.is_file() and ref.read_text().strip() == commit):
        return
    # Each host has a cache of its own: `files.replacing` writes on the first host of a run alone.
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
    """The whole snapshot of a revision in the cache; or None, and in words what it lacks."""
    store, commit = _store(cache, name), revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = (store / "refs" / revision).read_text().strip()
        except OSError:
            commit = ""
    folder = store / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not folder.is_dir():
        return None, f"it is not in the cache {cache}"
    names = {path.name for path in folder.iterdir() if path.is_file()}  # False for a link whose file is gone
    try:
        lacks = _missing(names, _shards(folder, names))
    except (ValueError, OSError) as error:
        lacks = _short(error)
    return (None, f"it is in the cache {cache} only in part: {lacks}") if lacks else (folder, "")


def _missing(names: set[str], shards: Iterable[str] = ()) -> str:
    """In words what a folder with these files lacks to be a target or a drafter; empty if nothing.

    Without `shards`, an index stands for all it names.
    """
    for shard in shards:
        if shard not in names:
            return f"{shard} is missing"
    for config, weights in PAIRS.items():
        if (config in names) != (weights in names):
            there, gone = (config, weights) if config in names else (weights, config)
            return f"{there} is there and {gone} is missing"
    if names.intersection(DRAFTERS) and not names.intersection((*STEERING, WEIGHTS_FILE, INDEX_FILE)):
        return ""
    if not names.intersection((WEIGHTS_FILE, INDEX_FILE)):
        return f"neither {WEIGHTS_FILE} nor {INDEX_FILE} is there"
    return "" if CONFIG_FILE in names else f"{CONFIG_FILE} is missing"


def _shards(folder: Path, names: set[str]) -> list[str]:
    """The files that hold a model's weights, as `convert.read_weights` looks for them; none of a drafter alone.

    Raises:
      ValueError: if the index names none, or others than safetensors of the same folder.
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
    """Why nothing of a repository is fetched."""
    top = sorted(path for path in listing if "/" not in path)
    has_weights = any(path.endswith(".safetensors") for path in top)
    ggufs = sorted(path for path in listing if path.endswith(".gguf"))
    pickles = [path for path in top if path.endswith(PICKLES)]
    if ggufs and not has_weights:
        return (
            f"holds its weights only as GGUF ({_few(ggufs)}). Fetch one, `hf download {name} {ggufs[0]}`, and give the"
            " path that it prints"
        )
    if pickles and not has_weights:
        return (
            f"holds its weights only as pickles ({_few(pickles)}), which are never loaded, because they can run code."
            " Convert them to safetensors (in transformers: save_pretrained)"
        )
    return (
        f"{lacks}. Expected a model ({CONFIG_FILE} and {WEIGHTS_FILE} or its shards) or a drafter"
        f" ({', '.join(DRAFTERS)}) at the top of the repository; there are {_few(top) or 'no files'}"
    )


def _refusal(error: Exception, name: str) -> str:
    """What the hub's answer means, and what to do about it."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"gated: its owner lets in who asks. Ask for access at {page}, then log in with `hf auth login` or set"
            " HF_TOKEN"
        )
    response = error.response if isinstance(error, errors.HfHubHTTPError) else None
    status = None if response is None else response.status_code
    is_stranger = status == 401 and response is not None and response.headers.get("X-Error-Message") != _BAD_TOKEN
    if is_stranger or isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"no such repository, or a private one ({page}). Look at its name, or log in with `hf auth login` or set"
            " HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no such branch, tag or commit; {page}/tree/main lists them"
    if status in (401, 403):
        return (
            f"the hub refuses the token (status {status}). Log in again with `hf auth login`, or set HF_TOKEN to one"
            " that is valid"
        )
    return f"the hub refuses it ({_short(error)}); look at {page}"


def _broken(error: Exception, name: str, cache: Path) -> str:
    """Why a download has ended, and what to do about it."""
    from huggingface_hub.errors import HfHubHTTPError

    chain, cause = [], error
    while cause is not None and cause not in chain:  # the library wraps what it has caught
        chain.append(cause)
        cause = cause.__cause__
    for cause in chain:
        if isinstance(cause, HfHubHTTPError) and 400 <= cause.response.status_code < 500:
            return _refusal(cause, name)
    code = next((cause.errno for cause in chain if isinstance(cause, OSError) and cause.errno), None)
    if code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return f"no room is left on the disk of {cache}. Make room there, or set HF_HOME to a folder on a larger disk"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{cache} cannot be written. Set HF_HOME to a folder that can"
    return f"the download broke off ({_short(chain[-1])}). Start again: what has come whole is kept"


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _few(paths: list[str], limit: int = 3) -> str:
    rest = len(paths) - limit
    return ", ".join(paths[:limit]) + (f" and {rest} more" if rest > 0 else "")
