"""Hidden-state speculative decoding on one page: plain JAX, one row, toy models. Run `python examples/one_round.py`.

A small drafter guesses a tree of tokens, and one pass of the target, the model whose text is wanted, verifies them all.
The drafter continues hidden states and reads none of its guesses, so a wrong one spoils no state. Tokens are added to
the logits of the states afterwards (Lyanna, arXiv:2602.21224). The files named below are those of hsd_jax.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

VOCAB, HIDDEN, RANK, SLOTS = 26, 32, 16, 96  # tokens are letters; a text has SLOTS of them, prompt included
NODES, DEPTH, WIDTH = 8, 4, 2  # of the tree: its size with the root, levels below the root, children of a node
POSITIONS, CAUSAL, NO_PARENT = np.arange(SLOTS), np.tri(SLOTS, dtype=bool), -1


# ---- The target: a Llama of one layer and one head (models/layers.py, models/target.py) ----
rms_norm = partial(jax.nn.standardize, mean=0.0, epsilon=1e-5)


def rope(x, positions):
    angles = positions[:, None] * 10_000.0 ** (-np.arange(HIDDEN // 2) / (HIDDEN // 2))
    cos, sin, (first, second) = jnp.cos(angles), jnp.sin(angles), jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def block(layer, x, positions, sees, cached=None):
    """A layer over N nodes. `sees[i, j]`: whether node i attends to entry j: cached slots first, then the nodes."""
    query, key, value = (rms_norm(x) @ layer[name] for name in "qkv")
    query, new_kv = rope(query, positions), jnp.stack([rope(key, positions), value])
    keys, values = new_kv if cached is None else jnp.concatenate([cached, new_kv], 1)
    x = x + jax.nn.softmax(jnp.where(sees, query @ keys.T * HIDDEN**-0.5, -jnp.inf)) @ values @ layer["o"]
    normed = rms_norm(x)
    return x + (jax.nn.silu(normed @ layer["gate"]) * (normed @ layer["up"])) @ layer["down"], new_kv


def forward(target, tokens, positions, sees, cache=None):
    """Logits [N, V], hidden states [N, H], keys and values [2, N, H]. A pass reads the cache and never writes to it."""
    x, new_kv = block(target["layer"], target["embedding"][tokens], positions, sees, cache)
    hidden = rms_norm(x)
    return hidden @ target["head"], hidden, new_kv


# ---- Draws: noise belongs to a position and not to a round (infer/sampling.py) ----
position_noise = jax.vmap(lambda key, place: jax.random.gumbel(jax.random.fold_in(key, place), (VOCAB,)), (None, 0))


def perturb(logits, noise, temperature):
    """Scores whose argmax is a draw from softmax(logits / temperature). At temperature 0 they are the logits."""
    return jnp.where(temperature > 0, logits / jnp.where(temperature > 0, temperature, 1) + noise, logits)


# ---- The drafter: states that read no draft (models/trunk.py), then tokens (drafters/hidden/weights.py) ----
def base_logits(target, drafter, features, length):
    """Logits [K, V] of K states: the trunk continues the target's states as a language model continues a text."""
    states = []  # the first stands for the root: the target has not read the last token yet
    for step in range(DEPTH):
        output, _ = block(drafter["trunk"], features, POSITIONS, CAUSAL)
        states.append(output[length - 2 + step])
        features = features.at[length - 1 + step].set(states[-1])
    return rms_norm(jnp.stack(states)) @ target["head"]


def inject(drafter, tokens):
    """Token information: a bias of low rank [V, V], of which each token adds its row to the logits after it."""
    return rms_norm(drafter["previous"][tokens]) @ drafter["bias"]


# ---- The tree: a beam over all levels (infer/tree.py) ----
class DraftTree(NamedTuple):
    tokens: jax.Array  # [N]; node 0 is the root, the last committed token
    parents: jax.Array  # [N]; a parent comes before its children
    depth: jax.Array  # [N]


def grow_tree(drafter, logits, root, noise, temperature):
    """The root and the likeliest drafts. They are COUPLED: the noise with which the target will draw is added."""
    inverse_temperature = jnp.where(temperature > 0, 2 * jnp.minimum(temperature, 1), 3)
    tokens, parents, depth, scores = root[None], jnp.array([NO_PARENT]), [0], jnp.zeros(1)  # of all candidates
    frontier = jnp.array([0])  # those of the last level that get children
    for level in range(DEPTH):
        perturbed = perturb(logits[level] + inject(drafter, tokens[frontier]), noise[level], temperature)
        logp, children = jax.lax.top_k(jax.nn.log_softmax(inverse_temperature * perturbed), WIDTH)
        new_scores = (scores[frontier, None] + jnp.minimum(logp, 0)).ravel()  # rounded, a logp may be above 0
        parents = jnp.concatenate([parents, jnp.repeat(frontier, WIDTH)])
        frontier = len(tokens) + jax.lax.top_k(new_scores, WIDTH)[1]
        tokens, scores = jnp.concatenate([tokens, children.ravel()]), jnp.concatenate([scores, new_scores])
        depth += [level + 1] * len(new_scores)
    _, kept = jax.lax.top_k(scores, NODES)  # scores fall along a path, so the parents of kept nodes are kept
    parents = jnp.argmax(parents[kept, None] == kept, -1).at[0].set(NO_PARENT)
    return DraftTree(tokens[kept], parents, jnp.array(depth)[kept])


def ancestor_mask(tree):
    """`mask[i, j]`: whether node j is node i or one of its ancestors."""
    own = mask = jnp.eye(len(tree.tokens), dtype=bool)
    for _ in range(DEPTH):
        mask = own | (mask[tree.parents] & (tree.parents != NO_PARENT)[:, None])
    return mask


# ---- The rule `match`: plain decoding draws the same tokens, since the noise is the same (infer/rules/accept.py) ----
def match(tree, logits, noise, temperature):
    """Draws the target's token at every node, and follows the draws from the root until no child holds one.

    Returns the path, the number of accepted drafts, and the tokens to emit: these drafts, one more draw, and padding.
    """
    draws = jnp.argmax(perturb(logits, noise[tree.depth], temperature), -1)
    path = [jnp.array(0)]
    for _ in range(DEPTH):
        is_next = (tree.parents == path[-1]) & (tree.tokens == draws[path[-1]])
        path.append(jnp.where(jnp.any(is_next), jnp.argmax(is_next), path[-1]))
    return jnp.stack(path), tree.depth[path[-1]], draws[jnp.stack(path)]


# ---- One round (infer/round.py), and the loop (infer/loop.py) ----
class DecodeState(NamedTuple):
    tokens: jax.Array  # [SLOTS]
    length: jax.Array  # the number of committed tokens
    cache: jax.Array  # [2, SLOTS, H]: keys and values of all committed tokens but the root
    features: jax.Array  # [SLOTS, H]: the target's hidden states of the same tokens
    accepted_histogram: jax.Array  # [D + 1]: the number of rounds with 0, 1, ... accepted drafts


def one_round(models, key, temperature, speculates, state):
    """Draft, verify, judge, commit. Returns the next state, and tree and path for the reader."""
    (target, drafter), root_position = models, state.length - 1
    noise = position_noise(key, state.length + jnp.arange(DEPTH + 1))
    tree = DraftTree(state.tokens[root_position][None], jnp.array([NO_PARENT]), jnp.array([0]))  # plain decoding
    if speculates:
        logits = base_logits(target, drafter, state.features, state.length)
        tree = grow_tree(drafter, logits, tree.tokens[0], noise, temperature)
    sees = jnp.concatenate([jnp.tile(root_position > POSITIONS, (len(tree.tokens), 1)), ancestor_mask(tree)], 1)
    logits, hidden, new_kv = forward(target, tree.tokens, root_position + tree.depth, sees, state.cache)
    path, num_accepted, emitted = match(tree, logits, noise, temperature)
    count = jnp.minimum(num_accepted + 1, SLOTS - state.length)
    slots = root_position + jnp.arange(DEPTH + 1)  # padding is written, too, and overwritten by the next round
    state = DecodeState(
        tokens=state.tokens.at[slots + 1].set(emitted),
        length=state.length + count,
        cache=state.cache.at[:, slots].set(new_kv[:, path]),
        features=state.features.at[slots].set(hidden[path]),
        accepted_histogram=state.accepted_histogram.at[count - 1].add(1),
    )
    return state, tree, path


@partial(jax.jit, static_argnames="speculates")
def decode(models, prompt, key, temperature, speculates=True):
    """The state after the last round, and tree and path of the first one."""
    tokens = jnp.zeros(SLOTS, int).at[: len(prompt)].set(prompt)
    _, features, cache = forward(models[0], tokens, POSITIONS, CAUSAL)  # prefill
    start = DecodeState(tokens, jnp.array(len(prompt)), cache, features, jnp.zeros(DEPTH + 1, int))
    step = partial(one_round, models, key, temperature, speculates)
    return jax.lax.while_loop(lambda state: state.length < SLOTS, lambda state: step(state)[0], start), *step(start)[1:]


def toy_models(seed, num_steps=200):
    """A random target, and a drafter that is trained on the target's texts and distributions (train/drafter.py)."""
    rng, keys = np.random.default_rng(seed), jax.random.split(jax.random.key(seed), 16)
    normal = lambda rows, columns: jnp.asarray(rng.normal(0, rows**-0.5, (rows, columns)), jnp.float32)  # noqa: E731
    layer, trunk = ({x: normal(HIDDEN, HIDDEN) for x in ("q", "k", "v", "o", "gate", "up", "down")} for _ in range(2))
    target = {"embedding": normal(VOCAB, HIDDEN), "layer": layer, "head": 3 * normal(HIDDEN, VOCAB)}
    drafter = {"trunk": trunk, "previous": normal(VOCAB, RANK), "bias": normal(RANK, VOCAB)}
    say = jax.vmap(partial(decode, speculates=False), (None, 0, 0, None))
    texts = say((target, drafter), rng.integers(0, VOCAB, (len(keys), 4)), keys, 0.8)[0].tokens

    @jax.jit
    @jax.grad
    def slope(drafter, lengths):
        def loss(text, length):
            wanted, features, _ = forward(target, text, POSITIONS, CAUSAL)
            places = length - 1 + jnp.arange(DEPTH)
            logits = base_logits(target, drafter, features, length) + inject(drafter, text[places])
            return -jnp.sum(jax.nn.softmax(wanted[places]) * jax.nn.log_softmax(logits))

        return jnp.mean(jax.vmap(loss)(texts, lengths))

    for lengths in rng.integers(2, SLOTS - DEPTH, (num_steps, len(keys))):
        drafter = jax.tree.map(lambda weight, slope: weight - 0.2 * slope, drafter, slope(drafter, lengths))
    return target, drafter


if __name__ == "__main__":
    models, prompt, key = toy_models(seed=0), np.array([9, 13, 18]), jax.random.key(1)
    for temperature in (0.0, 0.8):
        plain, _, _ = decode(models, prompt, key, temperature, speculates=False)
        state, tree, path = decode(models, prompt, key, temperature)
        for name, tokens in (("plain", plain.tokens), ("speculative", state.tokens)):
            print(f"{name:12}", "".join(chr(97 + token) for token in tokens))
        same, tau = (plain.tokens == state.tokens).all(), (SLOTS - len(prompt)) / state.accepted_histogram.sum()
        print(f"temperature {temperature}: {tau:.2f} tokens per target pass, the same text: {same}; the first tree:")
        words = [""] * NODES  # of every node the path to it, by which they are sorted
        for node in range(NODES):
            words[node] = (words[tree.parents[node]] if node else "") + chr(97 + tree.tokens[node])
        for node in sorted(range(NODES), key=words.__getitem__):
            print("   " * len(words[node]), words[node][-1], "" if node not in path else "accepted" if node else "root")
