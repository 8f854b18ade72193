"""Texts that a model writes after prompts, each row with a seed of its own, and files that keep them.

A text depends only on model, prompt, settings and seed, and not on the other rows. Read next: `simulate.py`, which
evaluates drafters on a target's texts; `own_text.py` and `responses.py`, which make training data from them.
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
    """Yields the answers to requests as their rows end. Close the generator if you do not read all answers.

    All programs have the size of `max_len`, whatever the requests are. Without the CPU kernels rounding depends on that
    size. So a run that was interrupted continues with the same programs.

    Args:
      requests: arguments of `Session.admit`.
      max_len: tokens of the longest text, prompt included.
      tree: of the drafter in `params`; None: plain decoding. No text depends on it.
      ordered: as in `Session.generate`.
    """
    longest = min(max_len, params.max_len)
    with Session(params, slots, longest, tree=tree, speculate=tree is not None, accept="match") as session:
        session.reserve()
        yield from session.generate(requests, ordered)


def write_all(params: Params, requests: Sequence[dict[str, Any]], slots: int, max_len: int) -> list[np.ndarray]:
    """The answers of plain decoding, in the order of the requests.

    Args:
      slots: the largest number of requests decoded at once.
    Raises:
      ValueError: naming the row, if the model gives no distribution.
    """
    answers = list(write(params, requests, min(slots, bucket(len(requests), 1)), max_len, ordered=True))
    check_valid(answers)
    return [answer.tokens for answer in answers]


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays to a file, completely or not at all."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **dict(arrays))  # type: ignore[arg-type]


def load_arrays(path: Path, *names: str) -> dict[str, np.ndarray]:
    """The arrays that `save_arrays` wrote.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if the file cannot be read, or lacks one of the names.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as values:
            return {name: values[name] for name in names}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(str(error)) from error
