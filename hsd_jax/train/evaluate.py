"""How a drafter would fare on texts its target has already written: simulated tau, without decoding anything.

Under the `match` rule a text is a function of target, prompt and keys alone. So the tree of every position of a stored
text, and how far the text follows it, come from one pass, and a walk over these counts is the real decode, round by
round. Read next: `run.py`, which calls this while it trains.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax.api import decode
from hsd_jax.config import DrafterConfig, ModelConfig, TreeConfig, at_least
from hsd_jax.infer.accept import walk as walk_tree
from hsd_jax.infer.drafters.make import make_drafter
from hsd_jax.infer.tree import ancestor_mask
from hsd_jax.models.target import forward_sequence
from hsd_jax.params import Params
from hsd_jax.types import Drafter, DraftTree, DrawLaw, SamplingParams, Weights


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Section `eval` of a recipe: what the drafter is judged on while it trains."""

    every: int = 100
    """Steps between judgements; 0: never."""
    prompts: int = 16
    """Rows held out, the last of the data; their beginnings are the prompts."""
    prompt_tokens: int = 48
    max_new_tokens: int = 96
    temperature: float = 1.0
    """Of the sampled texts; greedy ones are always there."""
    nodes: int = 16
    depth: int = 6
    width: int = 4

    def __post_init__(self):
        at_least("eval", self, every=0, prompts=1, prompt_tokens=2, max_new_tokens=2)
        if not self.temperature > 0:
            raise ValueError(f"eval.temperature={self.temperature}: must be above 0; greedy texts are always there")

    def tree(self, num_steps: int) -> TreeConfig:
        """The tree of the simulation, no deeper than the drafter."""
        depth = min(self.depth, num_steps)
        return TreeConfig(min(self.nodes, 1 + self.width + (depth - 1) * self.width**2), depth, self.width)


@dataclasses.dataclass(frozen=True)
class Texts:
    """Prompts and what the target wrote behind them, padded."""

    tokens: np.ndarray
    """int32 [R, T]."""
    prompt_length: np.ndarray
    """int32 [R], at least 2."""
    length: np.ndarray
    """int32 [R], prompt included."""

    @property
    def written(self) -> np.ndarray:
        """What the target wrote, all rows behind one another."""
        at = np.arange(self.tokens.shape[1])
        return self.tokens[(at >= self.prompt_length[:, None]) & (at < self.length[:, None])]

    def save(self, path: Any) -> None:
        with open(path, "wb") as file:
            np.savez(file, tokens=self.tokens, prompt_length=self.prompt_length, length=self.length)

    @classmethod
    def load(cls, path: Any) -> Texts:
        with np.load(path, allow_pickle=False) as values:
            return cls(**{name: values[name] for name in ("tokens", "prompt_length", "length")})


def write_texts(
    params: Params, prompts: Sequence[np.ndarray], max_new_tokens: int, temperature: float, seed: int, batch: int = 8
) -> Texts:
    """Decodes plainly; prompts of fewer than two tokens are refused by `ValueError`."""
    if any(len(p) < 2 for p in prompts):
        raise ValueError("a prompt of fewer than 2 tokens leaves nothing to draft from")
    rows = []
    for first in range(0, len(prompts), batch):
        some = [np.asarray(p, np.int32) for p in prompts[first : first + batch]]
        seeds = [seed + first + i for i in range(len(some))]
        out = decode(params, some, max_new_tokens=max_new_tokens, temperature=temperature, seed=seeds, speculate=False)
        for prompt, tokens, num in zip(some, np.asarray(out.tokens), np.asarray(out.num_tokens), strict=True):
            rows.append(np.concatenate([prompt, tokens[:num]]))
    padded = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, text in zip(padded, rows, strict=True):
        row[: len(text)] = text
    return Texts(padded, np.array([len(p) for p in prompts], np.int32), np.array([len(r) for r in rows], np.int32))


def accepted_nodes(
    tree: DraftTree, text: Int[Array, "A T"], root: Int[Array, "A"], length: Int[Array, "A"], max_depth: int
) -> Int[Array, "A"]:
    """How many tokens of each tree the text follows; the root stands at position `root` of its text."""
    behind = root[:, None] + tree.depth + 1
    draws = jnp.take_along_axis(text, jnp.minimum(behind, text.shape[1] - 1), 1)
    draws = jnp.where(behind < length[:, None], draws, -1)  # no node holds what stands behind the end
    return walk_tree(tree, ancestor_mask(tree, max_depth), draws, max_depth).num_accepted


@functools.partial(jax.jit, static_argnames=("target_config", "config", "trees"))
def follow(
    drafter: Weights,
    target: Weights,
    target_config: ModelConfig,
    config: DrafterConfig,
    trees: tuple[TreeConfig, ...],
    tokens: Int[Array, "R T"],
    length: Int[Array, "R"],
    temperature: Float[Array, ""],
) -> tuple[Int[Array, "R C T-1"], Float[Array, "R T-1"]]:
    """Drafts from every position of every text, which was drawn at `temperature`.

    Returns:
      For each of the C `trees` and each root 1..T-1: the tokens of the text the tree would have got right.
      For each root: sum of min(p, q) at depth 1, p and q at temperature 1.
    """
    drafters = [make_drafter(target_config, config, tree) for tree in trees]
    one_draw = make_drafter(target_config, config, TreeConfig(2, 1, 1), law=DrawLaw.INDEPENDENT)
    models = {"target": target, "drafter": drafter}
    roots = jnp.arange(1, tokens.shape[1])
    keys = jax.vmap(jax.random.key)(jnp.zeros(len(roots), jnp.uint32))
    none, one = jnp.zeros(len(roots), jnp.int32), jnp.ones(len(roots))
    as_drawn, at_temperature_1 = SamplingParams(temperature * one, none, one), SamplingParams(one, none, one)

    def one_text(row: tuple[Array, Array]):
        text, end = row
        output = forward_sequence(target, target_config, text[None], taps=config.feature_layers)

        def drafted(drafter: Drafter, sampling: SamplingParams) -> DraftTree:
            """The tree of every root, each a row of one batch, as if its text ended there."""
            capacity = len(text) + drafter.max_depth + 1

            def start(root):
                return drafter.init(models, output, text[None], root[None] + 1, capacity)

            state = jax.tree.map(lambda x: x[:, 0], jax.vmap(start)(roots))
            return drafter.draft(models, state, text[1:], roots, keys, sampling)[0]

        texts, ends = jnp.broadcast_to(text, (len(roots), len(text))), jnp.broadcast_to(end, roots.shape)
        counts = [accepted_nodes(drafted(d, as_drawn), texts, roots, ends, d.max_depth) for d in drafters]
        draft_logp = drafted(one_draw, at_temperature_1).draft_logp
        assert draft_logp is not None
        common = jnp.minimum(draft_logp[:, 0], jax.nn.log_softmax(output.logits[0, 1:], -1))
        return jnp.stack(counts), jnp.exp(common).sum(-1)

    return lax.map(one_text, (tokens, length))


@dataclasses.dataclass(frozen=True)
class Fate:
    """What became of the drafts of one tree over a set of texts."""

    tau: float
    """Tokens a target pass, the target's own included."""
    histogram: tuple[int, ...]
    """Rounds by accepted tokens, [D+1]."""
    num_passes: int

    @property
    def acceptance(self) -> list[float]:
        """Conditional acceptance by depth: of the rounds that got so far, the share that got one token further."""
        reached = np.cumsum(self.histogram[::-1])[::-1]
        return [float(b / a) if a else 0.0 for a, b in itertools.pairwise(reached)]


def walk(counts: np.ndarray, texts: Texts, depth: int) -> Fate:
    """The rounds a decode of `texts` would take, where `counts` [R, T-1] tokens are accepted at each root 1..T-1."""
    histogram = np.zeros(depth + 1, int)
    emitted = 0
    for row in range(len(counts)):
        root, last = int(texts.prompt_length[row]) - 1, int(texts.length[row]) - 1
        while root < last:
            num = min(int(counts[row, root - 1]) + 1, last - root)
            histogram[num - 1] += 1  # as in decoding: a round cut by the end counts what it emitted
            root, emitted = root + num, emitted + num
    passes = int(histogram.sum())
    return Fate(emitted / max(passes, 1), tuple(int(n) for n in histogram), passes)


def simulate(
    drafter: Weights,
    config: DrafterConfig,
    target: Weights,
    target_config: ModelConfig,
    texts: Texts,
    tree: TreeConfig,
    temperature: float,
) -> dict[str, Any]:
    """How the drafter fares on `texts`, which the target wrote at `temperature`.

    Returns:
      tau and acceptance (by depth) of `tree`; chain_tau and chain_acceptance of a chain of all the drafter's steps;
      overlap: mean sum of min(p, q) at depth 1, the chance that a sampled draft token is accepted at temperature 1.
    """
    chain = TreeConfig(config.num_steps + 1, config.num_steps, 1)
    models = drafter, target, target_config, config
    counts, overlap = follow(*models, (tree, chain), texts.tokens, texts.length, temperature)
    counts, overlap = np.asarray(counts), np.asarray(overlap)
    of_tree, of_chain = walk(counts[:, 0], texts, tree.depth), walk(counts[:, 1], texts, chain.depth)
    root = np.arange(1, texts.tokens.shape[1])
    is_root = (root >= texts.prompt_length[:, None] - 1) & (root < texts.length[:, None] - 1)
    return {
        "tau": of_tree.tau,
        "acceptance": of_tree.acceptance,
        "chain_tau": of_chain.tau,
        "chain_acceptance": of_chain.acceptance,
        "overlap": float(overlap[is_root].mean()),
    }


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
    """What the target writes behind `prompts`, decoded once and kept in a file of `folder`.

    The file is named after `name` and a hash of everything the texts depend on, the end tokens included.
    """
    digest = hashlib.sha256(target_hash.encode())
    for prompt in prompts:
        digest.update(np.asarray([len(prompt), *prompt], "<i4").tobytes())
    digest.update(repr((max_new_tokens, temperature, params.eos)).encode())
    path = Path(folder) / f"{name}-{digest.hexdigest()[:16]}.npz"
    if not path.is_file():
        report(f"the target writes {len(prompts)} {name} texts of {max_new_tokens} tokens to judge by")
        written = write_texts(params, prompts, max_new_tokens, temperature, seed=0)
        temporary = path.with_suffix(".tmp")
        written.save(temporary)
        temporary.replace(path)
    return Texts.load(path)
