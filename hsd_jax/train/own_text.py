"""Text that the drafter writes itself, as rows of its training (DistillSpec's on-policy data).

Every `refresh` steps the drafter writes texts with its current weights, for all batches up to the next refresh. Its
texts replace the first rows of every batch and continue the beginnings of these rows. It writes by plain decoding, as a
target does. The texts are first stored in the run's folder. So batch i is a function of rows, seed, i and the weights
at the last refresh, and a run that was interrupted between two refreshes continues with the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hsd_jax import validation
from hsd_jax.measure import texts
from hsd_jax.pair import Params
from hsd_jax.train import data
from hsd_jax.train.loop import LoopConfig
from hsd_jax.train.rows import beginnings
from hsd_jax.types import Weights
from hsd_jax.validation import Count, Share, Temperature

FOLDER = "on_policy"
AT_ONCE = 32
"""Rows decoded at once. The texts depend on it by rounding."""


@validation.dataclass
class OnPolicyConfig:
    """Section `on_policy` of a recipe: how much of a batch the drafter writes itself, and how."""

    share: Share = 0.0
    """Share of the rows of a batch that the drafter writes, a whole number of rows. 0: only rows of --data; 1: only the
    drafter's text."""
    refresh: Count = 50
    """Steps between two refreshes, at which the drafter writes new texts with its current weights."""
    temperature: Temperature = 1.0
    prompt_tokens: Count = 48
    """Most tokens of a prompt. The prompts are the beginnings of the rows that the texts replace."""
    max_new_tokens: Count | None = None
    """Most tokens of a text; null: until the row is full."""

    def num_rows(self, train: LoopConfig) -> int:
        """The number of rows of a batch that the drafter writes."""
        num = round(self.share * train.batch)
        if abs(num - self.share * train.batch) > 1e-6:
            raise ValueError(f"on_policy.share={self.share:g}: no whole number of train.batch={train.batch} rows")
        if num and self.prompt_tokens >= train.length:
            raise ValueError(f"on_policy.prompt_tokens={self.prompt_tokens}: must be below train.length={train.length}")
        return num


def write_rows(
    writer: Params, prompts: Sequence[np.ndarray], length: int, asked: OnPolicyConfig, seeds: Sequence[int]
) -> dict[str, np.ndarray]:
    """Continues each prompt by plain decoding to a row of at most `length + 1` tokens. The labels are what is written.

    Returns:
      `tokens` int32 [rows, length + 1], zeros after the end; `mask` bool [rows, length + 1].
    """
    tokens = np.zeros((len(prompts), length + 1), np.int32)
    mask = np.zeros(tokens.shape, bool)
    max_len = min(length + 1, writer.max_len)
    most, how = asked.max_new_tokens or max_len, {"temperature": asked.temperature}
    requests = [
        {"prompt": prompt, "max_new_tokens": min(max_len - len(prompt), most), "seed": seed, **how}
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    written = texts.write_all(writer, requests, AT_ONCE, max_len)
    for row, (prompt, text) in enumerate(zip(prompts, written, strict=True)):
        begin, end = len(prompt), len(prompt) + len(text)
        tokens[row, :end] = [*prompt, *text]
        mask[row, begin:end] = True
    return {"tokens": tokens, "mask": mask}


class MixedBatches(data.Batches):
    """Batches in which the drafter writes the first rows. Call `refresh` before every step.

    `writer` is the drafter as a target, with any weights. Its texts are kept in `on_policy/` of the run's folder.
    """

    def __init__(
        self, rows: data.Rows, train: LoopConfig, seed: int, asked: OnPolicyConfig, writer: Params, folder: Path
    ):
        super().__init__(rows, train.batch, seed)
        self._num, self._train, self._seed, self._asked = asked.num_rows(train), train, seed, asked
        self._writer, self._folder = writer, Path(folder) / FOLDER
        self._texts: dict[str, np.ndarray] | None = None

    def refresh(self, weights: Weights) -> None:
        """Lets the drafter write the texts of all steps up to the next refresh, if a refresh is due."""
        begun = self._next - self._next % self._asked.refresh
        path = self._folder / f"{begun:08d}.npz"
        if self._next == begun:
            self._texts = self._write(begun, weights)
            self._folder.mkdir(parents=True, exist_ok=True)
            texts.save_arrays(path, self._texts)
        elif self._texts is None:
            try:
                self._texts = texts.load_arrays(path, "tokens", "mask")
                wanted = self._num * min(self._asked.refresh, self._train.steps - begun)
                if len(self._texts["tokens"]) != wanted:  # share, refresh or steps were changed with --force
                    raise ValueError(f"holds {len(self._texts['tokens'])} texts for {wanted}")
            except (OSError, ValueError) as error:
                raise ValueError(f"{path}: not the drafter's texts of step {begun} ({error})") from error

    def _write(self, step: int, weights: Weights) -> dict[str, np.ndarray]:
        prompts: list[np.ndarray] = []
        for one in range(step, min(step + self._asked.refresh, self._train.steps)):
            batch = {name: value[: self._num] for name, value in self.batch_of(one).items()}
            found = beginnings(batch, self._asked.prompt_tokens)
            prompts += [p[:-1] if len(p) > 1 and p[-1] in self._writer.eos else p for p in found]
        seeds = [int(np.random.default_rng((self._seed, step, i)).integers(2**32)) for i in range(len(prompts))]
        writer = dataclasses.replace(self._writer, target=weights)
        return write_rows(writer, prompts, self._train.length, self._asked, seeds)

    def __next__(self) -> dict[str, np.ndarray]:
        assert self._texts is not None, "refresh comes first"
        first = self._next % self._asked.refresh * self._num
        own = {name: value[first : first + self._num] for name, value in self._texts.items()}
        own["starts"] = np.zeros_like(own["tokens"])
        return {name: np.concatenate([own[name], value[self._num :]]) for name, value in super().__next__().items()}
