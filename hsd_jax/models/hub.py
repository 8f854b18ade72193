"""Fetches targets and drafters from the Hugging Face hub into local folders: safetensors and settings, never pickles.

The library `huggingface_hub` does the caching, the authentication and the downloads. Its environment variables apply
(HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). This module does not import jax.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from hsd_jax.models import foreign
from hsd_jax.tokenizer import OLDER_FILES, TOKENIZER_FILES

ANSWER_SECONDS = 10.0
"""The time limit for the first answer of the hub. The library itself would wait for ever."""

_SETTINGS = ("*.json", *TOKENIZER_FILES, *OLDER_FILES)
_LEFT_OUT = ("*/*.json", "*/*.safetensors", "consolidated*", "model.*.safetensors", "adapter_model*")
"""Folders, second copies of the weights (Mistral's, and of another dtype), and what is no model."""
_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".jsonl", ".yaml", ".bin", ".pt", ".pth", ".ckpt", ".pkl")


class HubError(ValueError):
    """The reason why a repository cannot be fetched, in one line."""


def is_repo_name(text: str) -> bool:
    """Whether a text is ORG/NAME as the hub allows it and does not end like a file name.

    A relative path of two parts, as "runs/mine", has the same form. The caller must look for a folder first.
    """
    if text.count("/") != 1 or text.lower().endswith(_FILE_ENDINGS):
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def fetch(
    name: str,
    revision: str | None = None,
    weights: bool = True,
    check: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """The folder of a repository in the shared cache of Hugging Face libraries, fetched as far as it is not there.

    The hub is asked first, so a branch that has moved is noticed. If it does not answer within ANSWER_SECONDS, or if
    HF_HUB_OFFLINE is set, the cache is used. Only files at the top of the repository are fetched, never pickles or
    code. Progress is shown on stderr.

    Args:
      name: ORG/NAME.
      revision: a branch, a tag or a commit. None: the branch `main`.
      weights: whether the safetensors are fetched. Without them the folder serves for its tokenizer.
      check: called with the folder before weights are fetched. What it raises is raised.
    """
    from huggingface_hub import constants, snapshot_download

    problem, folder = None, Path()
    for patterns in (_SETTINGS, (*_SETTINGS, "*.safetensors"))[: 1 + weights]:
        if problem is not None:
            check(folder)
        try:
            problem = _no_answer(name, revision) if problem is None else problem
            found = snapshot_download(
                name,
                revision=revision,
                cache_dir=constants.HF_HUB_CACHE,
                library_name="hsd_jax",
                local_files_only=bool(problem),
                allow_patterns=list(patterns),
                ignore_patterns=list(_LEFT_OUT),
            )
        except Exception as error:  # the library's own, those of its HTTP client, and those of the disk
            cached = f"{problem}, and {constants.HF_HUB_CACHE} does not hold all of it: " if problem else ""
            said = " ".join(str(error).split())[:400] or type(error).__name__
            raise HubError(f"{name} (revision {revision or 'main'}): {cached}{said}") from error
        folder = Path(found)
    if weights and not any(folder.glob("*.safetensors")):
        what = "no safetensors at its top; pickles are never loaded, and GGUF is read from a file"
        raise ValueError(f"{name}: {foreign.in_folder(folder) or what}")
    if problem and not constants.HF_HUB_OFFLINE:
        print(f"{name}: {problem}; using {folder.name[:12]} from the cache", file=sys.stderr, flush=True)
    return folder


def _no_answer(name: str, revision: str | None) -> str:
    """Why the hub cannot be asked; empty if it answers. Raises the library's error if it refuses."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        HfApi().model_info(name, revision=revision, timeout=ANSWER_SECONDS)
    except HfHubHTTPError as error:
        if (status := error.response.status_code) < 500 and status not in (408, 429):
            raise
        return f"{constants.ENDPOINT} answers with status {status}"
    except Exception as error:  # of the HTTP client, or of something else that answers
        return f"no answer from {constants.ENDPOINT} ({type(error).__name__})"
    return ""
