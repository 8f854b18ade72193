"""Golden numbers of the bundled demo pair: what `golden.json` beside this file holds, and how it is made.

`python -m tests.support.golden` writes it anew, after a new training of the demo or an intended change of the
mathematics.
Prompts without near-ties are chosen, so that the numbers hold on other CPUs too.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.hidden.weights import inject
from hsd_jax.drafters.table import make_drafter
from hsd_jax.drafters.trunk_state import trunk_states
from hsd_jax.infer.tree import grow_tree, token_free
from hsd_jax.lab.bench import prompts
from hsd_jax.models.checkpoint import DEMO
from hsd_jax.models.target import forward_sequence
from hsd_jax.models.trunk import base_logits
from hsd_jax.session import prepare
from hsd_jax.settings import Sampling
from hsd_jax.types import DrawScheme
from support import toy

FILE = Path(__file__).with_name("golden.json")
COMMAND = "python -m tests.support.golden"
NEW_TOKENS = 24
TOP = 5
TOLERANCE = 1e-3
"""Of logits and log-probabilities: float32 sums in another order stay a hundred times below it."""
NEAR_TIE = 10 * TOLERANCE
"""A choice that changes when the numbers move by this much is no golden choice."""


def assets_hash() -> str:
    """Of all files of the demo pair but its README."""
    digest = hashlib.sha256()
    for path in sorted(p for p in DEMO.rglob("*") if p.is_file() and p.suffix != ".md"):
        digest.update(f"{path.relative_to(DEMO).as_posix()} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def params() -> hsd_jax.Params:
    return hsd_jax.load("demo", precision="exact", tree=TreeConfig(8, 7, 1))


@functools.partial(jax.jit, static_argnums=1)
def _logits(weights, config, tokens):
    return forward_sequence(weights, config, tokens).logits


def target_logits(tokens: list[int]) -> np.ndarray:
    """The logits behind each of `tokens` [T, V]."""
    return np.asarray(_logits(params().target, params().target_config, jnp.asarray([tokens])))[0]


def decode(tokens: list[int], speculate: bool) -> list[int]:
    return hsd_jax.decode(params(), tokens, NEW_TOKENS, speculate=speculate, eos=()).tokens[0].tolist()


def draft(tokens: list[int], noise: np.ndarray | None = None) -> dict[str, float]:
    """The first round's tree: the tokens of each path, as text, and its log-probability under the drafter.

    Args:
      noise: added to the base logits [D, hot V] before the tree is grown.
    """
    session = prepare(params(), tokens, Sampling(NEW_TOKENS, eos=()))
    models, (state, sampling, _) = session.setup.models, session.rows
    root, position = jnp.asarray([tokens[-1]]), jnp.asarray([len(tokens) - 1])
    rest = position, state.keys, sampling
    tree, distributions = _drafted(models, state.drafter, root, noise, *rest)
    nodes, parents = (np.asarray(x)[0].tolist() for x in (tree.tokens, tree.parents))
    paths, scores = [""], [0.0]
    for node, parent in list(zip(nodes, parents, strict=True))[1:]:
        paths.append(f"{paths[parent]} {node}".strip())
        scores.append(scores[parent] + float(distributions[parent, node]))
    return dict(zip(paths[1:], scores[1:], strict=True))


@jax.jit
def _drafted(models, state, root, noise, *rest):
    """The drafter's tree, and its distribution at each node as log-probabilities [N, V]."""
    p, weights = params(), models["drafter"]
    states, _ = trunk_states(models, p.target_config, p.drafter_config, p.tree.depth, state)
    base = base_logits(weights, p.drafter_config, models["target"], p.target_config, states)
    vocab, draft_to_target = p.target_config.vocab_size, weights.get("draft_to_target")
    inputs = toy.round_inputs(root, *rest, vocab=vocab)
    if noise is None:
        drafter = make_drafter(p.target_config, p.drafter_config, p.tree)
        tree, _ = drafter.draft(models, state, inputs)
    else:
        added_by = functools.partial(inject, weights, p.drafter_config)
        expand = token_free(base + noise, added_by, draft_to_target)
        tree, _ = grow_tree(expand, None, inputs, p.tree, DrawScheme.ARBITRARY)
    level = jnp.minimum(tree.depth[0], p.tree.depth - 1)  # a leaf at the bottom has no distribution
    added, read = inject(weights, p.drafter_config, tree.tokens, None)
    for _ in range(p.tree.depth if read is not None else 0):  # each pass is right one level further down
        parents = jnp.maximum(tree.parents, 0)[..., None]
        above = jnp.where((tree.parents >= 0)[..., None], jnp.take_along_axis(read, parents, 1), 0.0)
        added, read = inject(weights, p.drafter_config, tree.tokens, above)
    logp = jax.nn.log_softmax(base[0, level] + added[0])
    drafted = jnp.arange(vocab) if draft_to_target is None else draft_to_target
    return tree, jnp.full((len(logp), vocab), -jnp.inf).at[:, drafted].set(logp)


def has_near_tie(tokens: list[int], text: list[int]) -> bool:
    """Whether numbers that move by NEAR_TIE give another text or another tree."""
    best = np.sort(target_logits([*tokens, *text])[len(tokens) - 1 : -1], -1)
    if (best[:, -1] - best[:, -2]).min() < NEAR_TIE:
        return True
    rng, shape = np.random.default_rng(0), (params().tree.depth, params().drafter_config.draft_vocab_size)
    noises = [rng.uniform(-NEAR_TIE / 2, NEAR_TIE / 2, shape).astype(np.float32) for _ in range(8)]
    return any(draft(tokens, noise).keys() != draft(tokens).keys() for noise in noises)


def measure(name: str) -> dict[str, Any]:
    """The golden numbers of one demo prompt."""
    tokens = params().tokenizer.encode(next(p.text for p in prompts.demo_prompts() if p.name == name))
    text = decode(tokens, speculate=False)
    logits = target_logits([*tokens, *text])
    top = {}
    for position in (len(tokens) // 2, len(tokens) - 1, len(logits) - 1):
        best = np.argsort(-logits[position])[:TOP].tolist()
        top[str(position)] = {str(token): round(float(logits[position, token]), 5) for token in best}
    tree = {path: round(logp, 5) for path, logp in draft(tokens).items()}
    return {"prompt": name, "tokens": tokens, "target_logits": top, "draft_logp": tree, "greedy": text}


def main() -> None:
    """Writes the numbers of the first dialogue and of the first problem without a near-tie."""
    jax.config.update("jax_default_matmul_precision", "highest")
    found = []
    for end in ("Assistant:", "Answer:"):
        for prompt in (p for p in prompts.demo_prompts() if p.text.endswith(end)):
            numbers = measure(prompt.name)
            if not has_near_tie(numbers["tokens"], numbers["greedy"]):
                found.append(numbers)
                break
        else:
            raise SystemExit(f"every demo prompt that ends with {end!r} has a near-tie: lower NEW_TOKENS={NEW_TOKENS}")
    rows = ",\n".join(json.dumps(numbers) for numbers in found)
    FILE.write_text(f'{{"assets": "{assets_hash()}", "prompts": [\n{rows}\n]}}\n')
    print(f"wrote {FILE}: prompts {', '.join(f['prompt'] for f in found)}")


if __name__ == "__main__":
    main()
