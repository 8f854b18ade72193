"""Texts that a model writes after prompts, each row with a seed of its own, and files that keep them."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsd_jax.api import check_valid
from hsd_jax.config import TreeConfig, bucket
from hsd_jax.host.files import replacing, sha256
from hsd_jax.pair import Params
from hsd_jax.session import Generated, Session


@dataclasses.dataclass(frozen=True)
class Texts:
    """Prompts with the texts that the target wrote after them, padded."""

    tokens: np.ndarray
    """int32 [texts, T]."""
    prompt_length: np.ndarray
    """int32 [texts], at least 2."""
    length: np.ndarray
    """int32 [texts], prompt included."""
    seeds: np.ndarray
    """uint32 [texts]. Each text was decoded alone with its seed, so COUPLED drafts can use the same noise. Greedy text
    has no noise."""

    @property
    def written(self) -> np.ndarray:
        """The tokens that the target wrote, all rows concatenated."""
        at = np.arange(self.tokens.shape[1])
        return self.tokens[(at >= self.prompt_length[:, None]) & (at < self.length[:, None])]

    @classmethod
    def join(
        cls,
        prompts: Sequence[Sequence[int] | np.ndarray],
        written: Sequence[Sequence[int] | np.ndarray],
        seeds: Sequence[int] | None = None,
    ) -> Texts:
        """Joins prompts and the texts written after them. Without `seeds`, with which texts were drawn, all are 0."""
        if any(len(p) < 2 for p in prompts):
            raise ValueError("a prompt has fewer than 2 tokens: at least 2 are needed for drafting")
        rows = [np.array([*prompt, *text], np.int32) for prompt, text in zip(prompts, written, strict=True)]
        padded = np.zeros((len(rows), max(map(len, rows))), np.int32)
        for row, text in zip(padded, rows, strict=True):
            row[: len(text)] = text
        given, whole = (np.array([len(x) for x in some], np.int32) for some in (prompts, rows))
        return cls(padded, given, whole, np.array([0] * len(rows) if seeds is None else seeds, np.uint32))


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
    size. So a run that was interrupted continues with the same programs. Without a tree decoding is plain; no text
    depends on it.
    """
    longest = min(max_len, params.max_len)
    with Session(params, slots, longest, tree=tree, speculate=tree is not None, accept="match") as session:
        session.reserve()
        yield from session.generate(requests, ordered)


def write_all(params: Params, requests: Sequence[dict[str, Any]], slots: int, max_len: int) -> list[np.ndarray]:
    """The answers of plain decoding, at most `slots` at once, in the order of the requests."""
    answers = list(write(params, requests, min(slots, bucket(len(requests), 1)), max_len, ordered=True))
    check_valid(dict(enumerate(answers)))
    return [answer.tokens for answer in answers]


def write_texts(
    params: Params, prompts: Sequence[np.ndarray], max_new_tokens: int, temperature: float, seed: int, batch: int = 8
) -> Texts:
    """Writes texts by plain decoding, at most `batch` at once. Prompt i has the seed `seed` + i."""
    Texts.join(prompts, [()] * len(prompts))  # raises for short prompts before anything is decoded
    seeds = [seed + i for i in range(len(prompts))]
    asked = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    requests = [{"prompt": p, "seed": s, **asked} for p, s in zip(prompts, seeds, strict=True)]
    written = write_all(params, requests, batch, max(map(len, prompts)) + max_new_tokens)
    return Texts.join(prompts, written, seeds)


def stored_texts(
    folder: str | Path,
    name: str,
    params: Params,
    target_hash: str,
    prompts: Sequence[np.ndarray],
    max_new_tokens: int,
    temperature: float,
    report: Callable[[str], None],
) -> Texts:
    """The texts that the target writes after `prompts`, kept in `folder` by a hash of all that they depend on."""
    asked = (np.asarray([len(prompt), *prompt], "<i4").tobytes() for prompt in prompts)
    identity = sha256(target_hash, *asked, repr((max_new_tokens, temperature, params.eos, "with seeds")))
    path = Path(folder) / f"{name}-{identity[:16]}.npz"
    try:
        return Texts(**load_arrays(path, *(field.name for field in dataclasses.fields(Texts))))
    except FileNotFoundError:
        pass
    except ValueError as error:
        report(f"{path}: damaged ({error}); written again")
    report(f"the target writes {len(prompts)} {name} texts of {max_new_tokens} tokens for the evaluation")
    written = write_texts(params, prompts, max_new_tokens, temperature, seed=0)
    save_arrays(path, vars(written))
    return written


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays to a file, completely or not at all."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **dict(arrays))  # type: ignore[arg-type]


def load_arrays(path: Path, *names: str) -> dict[str, np.ndarray]:
    """The arrays that `save_arrays` wrote."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as values:
            return {name: values[name] for name in names}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(str(error)) from error
