"""Texts that a model writes behind prompts, row by row from seeds of their own, and files that keep them.

A text depends on model, prompt, settings and seed alone, whatever is written beside it. Read next: `simulate.py`, which
judges drafters on a target's texts, `own_text.py` and `responses.py`, which make training data of them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsd_jax.api import check_valid
from hsd_jax.config import TreeConfig, bucket
from hsd_jax.host.files import replacing
from hsd_jax.params import Params
from hsd_jax.session import Generated, Session


def write(
    params: Params,
    requests: Sequence[dict[str, Any]],
    slots: int,
    max_len: int,
    tree: TreeConfig | None = None,
    ordered: bool = False,
) -> Generator[Generated, None, None]:
    """The answers to requests of `Session.admit`, as rows end; close it if it is not read to its end.

    Programs have the size of `max_len`, whatever comes: where rounding depends on it, which it does without the CPU
    kernels, a run that broke off goes on with the same ones.

    Args:
      max_len: tokens of the longest text, prompt included.
      tree: of the drafter in `params`, on which no text depends; None: plain decoding.
      ordered: as in `Session.generate`.
    """
    longest = min(max_len, params.max_len)
    with Session(params, slots, longest, tree=tree, speculate=tree is not None, accept="match") as session:
        session.reserve()
        yield from session.generate(requests, ordered)


def write_all(params: Params, requests: Sequence[dict[str, Any]], slots: int, max_len: int) -> list[np.ndarray]:
    """What plain decoding answers to each request, at most `slots` of them at once.

    Raises:
      ValueError: naming the row, if the model gives no distribution.
    """
    answers = list(write(params, requests, min(slots, bucket(len(requests), 1)), max_len, ordered=True))
    check_valid(answers)
    return [answer.tokens for answer in answers]


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays whole or not at all."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **dict(arrays))  # type: ignore[arg-type]


def load_arrays(path: Path, *names: str) -> dict[str, np.ndarray]:
    """The arrays that `save_arrays` wrote.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it cannot be read, or lacks one of the names.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as values:
            return {name: values[name] for name in names}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(str(error)) from error
