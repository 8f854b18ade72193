"""Compares token-free states with the text that follows, at every position of the target's own text.

For every root it computes the states of one round and the rank that each of them gives the token that follows. Only the
text itself is decoded. Read next: `recall.py` and `rescore.py`, which use it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hsd_jax.arguments import encode
from hsd_jax.config import NO_REUSE, ModelConfig, TreeConfig
from hsd_jax.drafters.table import kinds_with, make_drafter, method_of
from hsd_jax.host.distributed import fetch
from hsd_jax.infer.decode import drafter_after
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.lab.bench.tables import say
from hsd_jax.models.draft_vocab import to_columns
from hsd_jax.models.target import forward_sequence
from hsd_jax.params import Params
from hsd_jax.planning.simulate import accepted_along, accepted_lengths
from hsd_jax.planning.texts import Texts, write_texts

ORACLES = (1, 4, 16)
"""Numbers of likeliest tokens of each state among which an oracle chooses, and for which recall is reported."""


class Lattice(NamedTuple):
    """The states of each root, compared with the tokens that follow it."""

    entropy: Float[Array, "*texts roots D"]
    """Entropy of each state's distribution in nats."""
    repeats: Float[Array, "*texts roots D-1"]
    """1 if the likeliest token of a state is also that of the state before."""
    rank: Int[Array, "*texts roots D"]
    """The number of tokens that a state ranks above the token that followed; the number of columns if none followed."""
    informed_rank: Int[Array, "*texts roots D"]
    """The same with token information, given the correct tokens before."""


@functools.partial(jax.jit, static_argnames=("target_config", "config", "tree", "num_roots"))
def look(
    drafter: Any,
    target: Any,
    target_config: ModelConfig,
    config: Any,
    tree: TreeConfig,
    num_roots: int,
    tokens: Int[Array, "B T"],
    length: Int[Array, "B"],
    first: Int[Array, "B"],
) -> Lattice:
    """The lattice of `num_roots` positions of every text, from `first` on."""
    models, proposer = {"target": target, "drafter": drafter}, make_drafter(target_config, config, tree)
    levels = method_of(config).lattice
    assert levels is not None, "drafters without a lattice were refused"

    def one_text(row: tuple[Array, Array, Array]) -> Lattice:
        text, end, start = row
        output = forward_sequence(target, target_config, text[None], feature_layers=proposer.feature_layers)
        roots = jnp.minimum(start + jnp.arange(num_roots), len(text) - 1)
        capacity = len(text) + proposer.most_written + 1
        begin = lambda root: drafter_after(proposer, models, output, text[None], root[None] + 1, capacity)  # noqa: E731
        states = jax.tree.map(lambda x: x[:, 0], jax.vmap(begin)(roots))
        logits, inject, _ = levels(target_config, config, tree)(models, states)
        logp, best = jax.nn.log_softmax(logits, -1), jnp.argmax(logits, -1)
        places = roots[:, None] + 1 + jnp.arange(tree.depth)
        columns, is_known = to_columns(drafter.get("draft_to_target"), text[jnp.minimum(places, len(text) - 1)])
        informed, above = [], None
        for level in range(tree.depth):
            informed.append(logits[:, level])
            if inject is not None:
                added, above = inject(text[jnp.minimum(roots + level, len(text) - 1)][:, None], above)
                informed[level] += added[:, 0]

        def rank(logits: Array) -> Array:
            own = jnp.take_along_axis(logits, columns[:, :, None], 2)
            return jnp.where(is_known & (places < end), (logits > own).sum(-1), logits.shape[-1])

        repeats = (best[:, 1:] == best[:, :-1]).astype(jnp.float32)
        return Lattice(-(jnp.exp(logp) * logp).sum(-1), repeats, rank(logits), rank(jnp.stack(informed, 1)))

    return jax.lax.map(one_text, (tokens, length, first))


def check_token_free(params: Params) -> None:
    """Raises a ValueError if the drafter has no token-free states, which are states that read no drafted token."""
    if method_of(params.drafter_config).lattice is None:
        having = ", ".join(kinds_with(lambda method: method.lattice is not None))
        raise ValueError(
            f"a drafter of kind {params.drafter_config.kind} has no token-free states; these have: {having}"
        )


def own_texts(params: Params, work: Workload, temperature: float) -> Texts:
    """The texts that the target writes after the prompts of a workload."""
    found = work.read(params, work.prompts)
    half = "" if work.half is None else f" of half {work.half}"
    say(f"temperature {temperature:g}: the target writes {len(found)} texts{half}")
    ids = [np.asarray(row) for row in encode(params, [prompt.tokens(params.tokenizer) for prompt in found])]
    return write_texts(params, ids, work.max_new_tokens, temperature, work.seed)


def tau_of(params: Params, texts: Texts, tree: TreeConfig, temperature: float) -> float:
    """Tokens per target pass of decoding these texts, by simulation."""
    assert params.drafter is not None
    models = params.drafter, params.drafter_config, params.target, params.target_config
    (fate,), _ = accepted_lengths(*models, texts, [(tree, NO_REUSE)], temperature)
    return fate.tau


def lattice_of(params: Params, texts: Texts, depth: int) -> tuple[Any, np.ndarray]:
    """The lattice of all positions of the texts, and a mask [texts, roots] of those before a text's end, in NumPy."""
    written, chain = texts.length - texts.prompt_length, TreeConfig.chain(depth)
    models = params.drafter, params.target, params.target_config, params.drafter_config
    rows = texts.tokens, texts.length, texts.prompt_length - 1
    found = jax.tree.map(fetch, look(*models, chain, int(written.max()), *rows))
    return found, np.arange(written.max()) < written[:, None]


def oracle_tau(rank: np.ndarray, texts: Texts) -> dict[str, float]:
    """Tokens per pass if an oracle chose the path of each round among the ORACLES likeliest tokens of every depth."""
    depth = rank.shape[-1]
    leading = {k: np.cumprod(rank < k, -1).sum(-1) for k in ORACLES}
    return {str(k): accepted_along(right[:, None], texts, depth).tau for k, right in leading.items()}


def facts(params: Params, texts: Texts, depth: int) -> dict[str, Any]:
    """Entropy by state, the share of neighbours with the same likeliest token, and tau if an oracle chose the path."""
    found, counts = lattice_of(params, texts, depth)
    entropy = found.entropy[counts].mean(0)
    rises = np.flatnonzero(np.diff(entropy) < 0)
    return {
        "entropy": entropy.tolist(),
        "rises_to": int(rises[0]) + 1 if len(rises) else depth,
        "repeated_neighbours": float(found.repeats[counts].mean()),
        "oracle_tau": oracle_tau(found.rank, texts),
    }
