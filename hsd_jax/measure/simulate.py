"""Simulated tau: what a drafter would achieve on texts that its target has already written, without decoding.

Under the `match` rule a text depends only on target, prompt and keys. So one pass can draft a tree at every position
of a stored text and count how many of its tokens the text follows. Walking along these counts gives the same rounds as
a real decode.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax.api import conditional_acceptance
from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.table import make_drafter, method_of
from hsd_jax.host.distributed import fetch
from hsd_jax.infer.loop import drafter_after
from hsd_jax.infer.rules.table import RULES
from hsd_jax.infer.sampling import round_noise, row_keys
from hsd_jax.infer.tree import on_text
from hsd_jax.measure.texts import Texts
from hsd_jax.models.target import forward_sequence
from hsd_jax.pair import Params
from hsd_jax.planning.acceptance import Distribution
from hsd_jax.types import Drafter, DraftTree, DrawScheme, RoundInputs, SamplingParams, Weights


def accepted_nodes(
    tree: DraftTree, text: Int[Array, "B T"], root: Int[Array, "B"], length: Int[Array, "B"], max_depth: int
) -> Int[Array, "B"]:
    """How many tokens of the text each tree contains. Its root is at position `root` of the text."""
    followed = on_text(tree, text, root + 1, length, max_depth)
    return jnp.max(jnp.where(followed, tree.depth, 0), 1)


@functools.partial(jax.jit, static_argnames=("target_config", "config", "trees", "num_roots"))
def accepted_from_roots(
    drafter: Weights,
    target: Weights,
    target_config: ModelConfig,
    config: Any,
    trees: tuple[TreeConfig, ...],
    num_roots: int,
    tokens: Int[Array, "texts T"],
    length: Int[Array, "texts"],
    first: Int[Array, "texts"],
    keys: jax.Array,
    temperature: Float[Array, ""],
) -> tuple[list[Int[Array, "texts roots"]], Float[Array, "texts roots"] | None]:
    """Drafts from `num_roots` positions of every text, beginning at position `first`.

    Args:
      keys: the row keys [texts] with which the texts were drawn. COUPLED drafts depend on them.
      temperature: at which the texts were drawn.
    Returns:
      For each of `trees`, the number of tokens of the text that the tree of each root contains.
      For each root, the sum of min(p, q) at depth 1, with p and q at temperature 1. None for drafters that are not
      trained on their target's features.
    """
    scheme, method = RULES["match"].scheme, method_of(config)
    drafters = [make_drafter(target_config, config, tree, scheme=scheme) for tree in trees]
    num_noisy = max(drafter.max_depth for drafter in drafters)
    models = {"target": target, "drafter": drafter}
    index = jnp.arange(num_roots)
    none, one = jnp.zeros(num_roots, jnp.int32), jnp.ones(num_roots)
    as_drawn, at_temperature_1 = SamplingParams(temperature * one, none, one), SamplingParams(one, none, one)

    def one_text(row: tuple[Array, Array, Array, Array]):
        text, end, start, key = row
        own_keys = jnp.broadcast_to(key, (num_roots,))
        output = forward_sequence(target, target_config, text[None], feature_layers=drafters[0].feature_layers)
        roots = jnp.minimum(start + index, len(text) - 1)
        noise = round_noise(own_keys, roots, num_noisy, target_config.vocab_size, as_drawn)
        texts, ends = jnp.broadcast_to(text, (num_roots, len(text))), jnp.broadcast_to(end, roots.shape)

        def state_of(drafter: Drafter) -> Any:
            """A batch with one row for each root, whose text ends at that root."""
            capacity = len(text) + drafter.most_written + 1
            begin = lambda root: drafter_after(drafter, models, output, text[None], root[None] + 1, capacity)  # noqa: E731
            return jax.tree.map(lambda x: x[:, 0], jax.vmap(begin)(roots))

        inputs = RoundInputs(text[roots], roots, own_keys, as_drawn, noise, jnp.ones(num_roots, bool))

        def counted(drafter: Drafter) -> Array:
            tree, _ = drafter.draft(models, state_of(drafter), inputs)
            return accepted_nodes(tree, texts, roots, ends, drafter.max_depth)

        found = [counted(drafter) for drafter in drafters]
        if method.training is None:
            return found, None
        one_draw = make_drafter(target_config, config, TreeConfig.chain(1), scheme=DrawScheme.INDEPENDENT)
        warm = dataclasses.replace(inputs, sampling=at_temperature_1)
        drawn, _ = one_draw.draft(models, state_of(one_draw), warm)
        assert drawn.draft_logp is not None
        common = jnp.minimum(drawn.draft_logp[:, 0], jax.nn.log_softmax(output.logits[0, roots], -1))
        return found, jnp.exp(common).sum(-1)

    return lax.map(one_text, (tokens, length, first, keys))


@dataclasses.dataclass(frozen=True)
class AcceptedLengths:
    """Accepted lengths of one way to draft over a set of texts."""

    tau: float
    """Tokens per target pass, the target's own token included."""
    histogram: tuple[int, ...]
    """The number of rounds by accepted length, [D+1]."""
    rounds: tuple[int, ...]
    """The number of rounds of each text."""

    @property
    def num_passes(self) -> int:
        return sum(self.histogram)

    @property
    def distribution(self) -> Distribution:
        """The distribution of the number of tokens of a round."""
        return {num + 1: count / self.num_passes for num, count in enumerate(self.histogram)}

    @property
    def acceptance(self) -> list[float]:
        """The acceptance probability by depth, given that all drafts before were accepted."""
        return conditional_acceptance(self.histogram).tolist()


def accepted_along(counts: Int[np.ndarray, "texts roots"], texts: Texts, depth: int) -> AcceptedLengths:
    """The rounds that a decode of `texts` would take, from the tokens accepted at each root.

    Root 0 is the last token of a prompt.
    """
    histogram, rounds, written = np.zeros(depth + 1, int), [], texts.length - texts.prompt_length
    for row, to_emit in enumerate(written):
        root, before = 0, histogram.sum()
        while root < to_emit:
            num = min(int(counts[row, root]) + 1, int(to_emit) - root)
            histogram[num - 1] += 1  # as in decoding: a round that the end cuts short counts the tokens it emitted
            root += num
        rounds.append(int(histogram.sum() - before))
    return AcceptedLengths(float(written.sum()) / max(sum(rounds), 1), tuple(histogram.tolist()), tuple(rounds))


def accepted_lengths(
    params: Params, texts: Texts, trees: Sequence[TreeConfig], temperature: float
) -> tuple[list[AcceptedLengths], float | None]:
    """Simulates each of `trees` on `texts`, which the target wrote at `temperature`.

    If the beginning of a drafter's chain is its shorter chain, only the longest chain is drafted. The shorter ones are
    read from it.

    Returns:
      The accepted lengths of each of `trees`, and the mean overlap (see `simulate`). The overlap is None for a drafter
      that is not trained on its target's features.
    """
    config = params.drafter_config
    chains = [tree for tree in trees if tree.width == 1 and method_of(config).planning.chains_nest]
    longest = max(chains, key=lambda tree: tree.depth, default=None)
    source = {tree: longest if longest and tree in chains else tree for tree in trees}
    asked = tuple(sorted(set(source.values()), key=repr))  # sorted, so that the same set compiles once
    written = texts.length - texts.prompt_length
    models = params.drafter, params.target, params.target_config, config
    keys = row_keys([(int(seed), 0) for seed in texts.seeds])
    rows = texts.tokens, texts.length, texts.prompt_length - 1, keys, np.float32(temperature)
    found, overlap = accepted_from_roots(*models, asked, int(written.max()), *rows)
    of = dict(zip(asked, jax.tree.map(fetch, found), strict=True))

    if overlap is not None:
        overlap = float(fetch(overlap)[np.arange(written.max()) < written[:, None]].mean())
    return [accepted_along(np.minimum(of[source[tree]], tree.depth), texts, tree.depth) for tree in trees], overlap


def simulate(params: Params, texts: Texts, tree: TreeConfig, temperature: float) -> dict[str, Any]:
    """Simulates a trained drafter on `texts`, which the target wrote at `temperature`.

    Returns:
      tau, acceptance: of `tree`; acceptance is by depth.
      chain_tau, chain_acceptance: of a chain as deep as the drafter has steps.
      overlap: the mean of the sum of min(p, q) at depth 1. This is the probability that a sampled draft is accepted at
        temperature 1.
    """
    chain = TreeConfig.chain(params.drafter_config.num_steps)
    (of_tree, of_chain), overlap = accepted_lengths(params, texts, (tree, chain), temperature)
    return {
        "tau": of_tree.tau,
        "acceptance": of_tree.acceptance,
        "chain_tau": of_chain.tau,
        "chain_acceptance": of_chain.acceptance,
        "overlap": overlap,
    }
