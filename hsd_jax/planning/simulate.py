"""Simulated tau: what a drafter would achieve on texts that its target has already written, without decoding.

Under the `match` rule a text depends only on target, prompt and keys. So one pass can draft a tree at every position
of a stored text and count how many of its tokens the text follows. Walking along these counts gives the same rounds as
a real decode.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax.api import conditional_acceptance
from hsd_jax.config import (
    AHEAD,
    NO_REUSE,
    NO_REUSE_FORM,
    DrafterConfig,
    ModelConfig,
    ReuseConfig,
    TreeConfig,
)
from hsd_jax.drafters.table import make_drafter, method_of
from hsd_jax.host.distributed import fetch
from hsd_jax.infer.decode import drafter_after
from hsd_jax.infer.rules import RULES
from hsd_jax.infer.sampling import round_noise, row_keys
from hsd_jax.infer.tree import on_text
from hsd_jax.models.target import forward_sequence
from hsd_jax.planning.acceptance import Distribution
from hsd_jax.planning.texts import Texts
from hsd_jax.types import Drafter, DraftTree, DrawScheme, RoundInputs, SamplingParams, Weights

Shape = tuple[TreeConfig, ReuseConfig]
"""The shape of the trees and the form of reuse."""


class AcceptedByAge(NamedTuple):
    """How many tokens would be accepted from every root, for spare states of each age.

    Spares of age n come from a run of the trunk n tokens before the root. At the largest age no spare is left. Without
    reuse there is only age 0.
    """

    counts: Int[Array, "*texts ages roots"]
    """The number of tokens of the text that the tree of each root contains."""
    age: Int[Array, "*texts ages"]
    """The age of the spares after the round has drafted: 0 if the trunk ran in this round."""


def accepted_nodes(
    tree: DraftTree, text: Int[Array, "B T"], root: Int[Array, "B"], length: Int[Array, "B"], max_depth: int
) -> Int[Array, "B"]:
    """How many tokens of the text each tree contains. Its root is at position `root` of the text."""
    followed = on_text(tree, text, root + 1, length, max_depth)
    return jnp.max(jnp.where(followed, tree.depth, 0), 1)


@functools.partial(jax.jit, static_argnames=("target_config", "config", "drafts", "num_roots"))
def accepted_by_age(
    drafter: Weights,
    target: Weights,
    target_config: ModelConfig,
    config: Any,
    drafts: tuple[Shape, ...],
    num_roots: int,
    tokens: Int[Array, "texts T"],
    length: Int[Array, "texts"],
    first: Int[Array, "texts"],
    keys: jax.Array,
    temperature: Float[Array, ""],
) -> tuple[list[AcceptedByAge], Float[Array, "texts roots"] | None]:
    """Drafts from `num_roots` positions of every text, beginning at position `first`.

    Args:
      keys: the row keys [texts] with which the texts were drawn. COUPLED drafts depend on them.
      temperature: at which the texts were drawn.
    Returns:
      For each of `drafts`, how many tokens would be accepted.
      For each root, the sum of min(p, q) at depth 1, with p and q at temperature 1. None for drafters that are not
      trained on their target's features.
    """
    scheme, method = RULES["match"].scheme, method_of(config)
    drafters = [make_drafter(target_config, config, tree, scheme=scheme, reuse=reuse) for tree, reuse in drafts]
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

        def counted(drafter: Drafter, state: Any) -> tuple[Array, Any]:
            tree, after = drafter.draft(models, state, RoundInputs(text[roots], roots, own_keys, as_drawn, noise))
            return accepted_nodes(tree, texts, roots, ends, drafter.max_depth), after

        def followed(drafter: Drafter, draft: Shape) -> AcceptedByAge:
            (tree, reuse), state = draft, state_of(drafter)
            if reuse == NO_REUSE:
                return AcceptedByAge(counted(drafter, state)[0][None], none[:1])
            assert method.inspection.aged is not None, "make_drafter refuses drafters without spare states"
            num_states = reuse.num_states(tree.depth, config.num_steps)
            state_at = method.inspection.aged(models, target_config, config, num_states, state)

            def at_age(age: Array) -> AcceptedByAge:
                counts, after = counted(drafter, state_at(age))
                return AcceptedByAge(counts, num_states - after.spares.num[0])

            return lax.map(at_age, jnp.arange(num_states + 1))

        found = [followed(drafter, draft) for drafter, draft in zip(drafters, drafts, strict=True)]
        if method.training is None:
            return found, None
        one_draw = make_drafter(target_config, config, TreeConfig.chain(1), scheme=DrawScheme.INDEPENDENT)
        drawn, _ = one_draw.draft(
            models, state_of(one_draw), RoundInputs(text[roots], roots, own_keys, at_temperature_1)
        )
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
    trunk_runs: tuple[tuple[bool, ...], ...]
    """For each text and each of its rounds, whether the drafter's trunk ran."""

    @property
    def num_passes(self) -> int:
        return sum(self.histogram)

    @property
    def distribution(self) -> Distribution:
        """The distribution of the number of tokens of a round."""
        return {num + 1: count / self.num_passes for num, count in enumerate(self.histogram)}

    def in_step(self, batch: int) -> tuple[int, int]:
        """The number of rounds, and the number of rounds with a trunk run, if `batch` texts are decoded at once.

        A batch ends when its last row ends. Its trunk runs in a round if any row needs it.
        """
        batches = (self.trunk_runs[first : first + batch] for first in range(0, len(self.trunk_runs), batch))
        rounds = [any(runs) for some in batches for runs in itertools.zip_longest(*some, fillvalue=False)]
        return len(rounds), sum(rounds)

    @property
    def acceptance(self) -> list[float]:
        """The acceptance probability by depth, given that all drafts before were accepted."""
        return conditional_acceptance(self.histogram).tolist()


def accepted_along(
    counts: np.ndarray, texts: Texts, depth: int, age_after: Sequence[int] = (0,), first_age: int = 0
) -> AcceptedLengths:
    """The rounds that a decode of `texts` would take, from the counts of `accepted_by_age`.

    Args:
      counts: [texts, ages, roots], tokens accepted at each age and root. Root 0 is the last token of a prompt.
      age_after: [ages], the age of spares of each age after the round has drafted: 0 if the trunk ran in this round.
      first_age: the age in the first round.
    """
    histogram, runs, emitted = np.zeros(depth + 1, int), [], 0
    oldest = counts.shape[1] - 1
    for row, to_emit in enumerate(texts.length - texts.prompt_length):
        root, age, ran = 0, first_age, []
        while root < to_emit:
            num = min(int(counts[row, age, root]) + 1, int(to_emit) - root)
            histogram[num - 1] += 1  # as in decoding: a round that the end cuts short counts the tokens it emitted
            after = int(age_after[age])
            ran.append(after == 0)
            root, age = root + num, min(after + num, oldest)
        runs.append(tuple(ran))
        emitted += root
    passes = int(histogram.sum())
    return AcceptedLengths(emitted / max(passes, 1), tuple(int(n) for n in histogram), tuple(runs))


def accepted_lengths(
    drafter: Weights,
    config: Any,
    target: Weights,
    target_config: ModelConfig,
    texts: Texts,
    drafts: Sequence[Shape],
    temperature: float,
) -> tuple[list[AcceptedLengths], float | None]:
    """Simulates each of `drafts` on `texts`, which the target wrote at `temperature`.

    If the beginning of a drafter's chain is its shorter chain, only the longest chain without reuse is drafted. The
    shorter ones are read from it.

    Returns:
      The accepted lengths of each of `drafts`, and the mean overlap (see `simulate`). The overlap is None for a drafter
      that is not trained on its target's features.
    """

    def is_chain(draft: Shape) -> bool:
        return draft[0].width == 1 and draft[1] == NO_REUSE and method_of(config).planning.chains_nest

    longest = max(filter(is_chain, drafts), key=lambda draft: draft[0].depth, default=None)
    source = {draft: longest if is_chain(draft) and longest else draft for draft in drafts}
    asked = tuple(sorted(set(source.values()), key=repr))  # sorted, so that the same set compiles once
    written = texts.length - texts.prompt_length
    models = drafter, target, target_config, config
    keys = row_keys([(int(seed), 0) for seed in texts.seeds])
    rows = texts.tokens, texts.length, texts.prompt_length - 1, keys, np.float32(temperature)
    found, overlap = accepted_by_age(*models, asked, int(written.max()), *rows)
    of = dict(zip(asked, jax.tree.map(fetch, found), strict=True))

    def lengths_of(draft: Shape) -> AcceptedLengths:
        (tree, reuse), (counts, age) = draft, of[source[draft]]
        starts_fresh = reuse.form in (
            NO_REUSE_FORM,
            AHEAD,
        )  # AHEAD runs its trunk after prefill; other forms have no spares yet
        first_age = 0 if starts_fresh else counts.shape[1] - 1
        return accepted_along(np.minimum(counts, tree.depth), texts, tree.depth, age[0], first_age)

    if overlap is not None:
        overlap = float(fetch(overlap)[np.arange(written.max()) < written[:, None]].mean())
    return [lengths_of(draft) for draft in drafts], overlap


def simulate(
    drafter: Weights,
    config: DrafterConfig,
    target: Weights,
    target_config: ModelConfig,
    texts: Texts,
    tree: TreeConfig,
    temperature: float,
) -> dict[str, Any]:
    """Simulates the drafter on `texts`, which the target wrote at `temperature`.

    Returns:
      tau, acceptance: of `tree`; acceptance is by depth.
      chain_tau, chain_acceptance: of a chain as deep as the drafter has steps.
      overlap: the mean of the sum of min(p, q) at depth 1. This is the probability that a sampled draft is accepted at
        temperature 1.
    """
    chain = TreeConfig.chain(config.num_steps)
    drafts = (tree, NO_REUSE), (chain, NO_REUSE)
    (of_tree, of_chain), overlap = accepted_lengths(drafter, config, target, target_config, texts, drafts, temperature)
    return {
        "tau": of_tree.tau,
        "acceptance": of_tree.acceptance,
        "chain_tau": of_chain.tau,
        "chain_acceptance": of_chain.acceptance,
        "overlap": overlap,
    }
