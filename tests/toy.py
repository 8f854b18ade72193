"""Tiny models and calls for the tests: random targets, drafters that agree with them, a Markov target, an oracle.

Read first: `hsd_jax/infer/decode.py`, whose pure functions `Call` drives with fixed buckets, so that one compilation
serves many tests.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hsd_jax.config import (
    FULL,
    NO_REUSE,
    PARALLEL,
    REUSES,
    SLIDING,
    DrafterConfig,
    ModelConfig,
    ReuseConfig,
    RopeConfig,
    TreeConfig,
)
from hsd_jax.drafters.hidden.config import PATH, HiddenConfig
from hsd_jax.drafters.hidden.weights import inject
from hsd_jax.drafters.lookup.config import LookupConfig
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.drafters.table import METHODS, init_drafter
from hsd_jax.drafters.table import make_drafter as drafter_of
from hsd_jax.infer.accept import match_rule, recursive_rule
from hsd_jax.infer.decode import Decoder
from hsd_jax.infer.plain import make_plain_step
from hsd_jax.infer.step import make_step
from hsd_jax.infer.tree import Grower
from hsd_jax.models import draft_vocab
from hsd_jax.models.target import forward_sequence, init_target
from hsd_jax.types import (
    NO_PARENT,
    NO_TOKEN,
    DecodeState,
    Drafter,
    DraftTree,
    DrawScheme,
    Limits,
    RoundInputs,
    SamplingParams,
)

VOCAB = 24
PROMPT_BUCKET = 16
CAPACITY = 64
MAX_TOKENS = 96
GAIN = 1.5


def target_config(**changes) -> ModelConfig:
    plain = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        tie_embeddings=True,
    )
    return dataclasses.replace(plain, **changes)


def random_like(init, config, seed: int, gain: float) -> dict[str, Any]:
    """Weights of the structure of `init(key, config)`: norms of one, normal matrices. In NumPy: no compilation."""
    rng = np.random.default_rng(seed)
    offset = getattr(config, "norm_offset", 0.0)

    def one(path, leaf):
        if leaf.ndim == 1:
            is_norm = path[-1].key in ("weight", "norm")
            return jnp.asarray(np.full(leaf.shape, 1.0 - offset if is_norm else 0.1), jnp.float32)
        std = 0.5 if path[-1].key == "embedding" else gain * leaf.shape[1] ** -0.5
        if len(path) > 1 and path[-2].key == "o":
            std *= 0.4  # the last token matters most, so that a drafter has something to guess from
        return jnp.asarray(rng.normal(0.0, std, leaf.shape), jnp.float32)

    shapes = jax.eval_shape(lambda: init(jax.random.key(0), config))
    return jax.tree_util.tree_map_with_path(one, shapes)


def make_target(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Random weights, scaled so that the text depends on the context and does not fall into a loop at once."""
    return random_like(init_target, config, seed, GAIN)


causal_pass = jax.jit(forward_sequence, static_argnums=1, static_argnames="taps")
"""`forward_sequence` as one program: operation by operation it takes several times as long."""


def drafter_config(config: ModelConfig, kind: str = HiddenConfig.kind, **changes) -> DrafterConfig:
    made = METHODS[kind].config
    plain = dict(
        hidden_size=config.hidden_size,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=config.vocab_size,
        num_steps=4,
        rank=config.vocab_size,
    )
    own = {field.name for field in dataclasses.fields(made)}
    return made(**{name: value for name, value in plain.items() if name in own} | changes)


def make_drafter(config: DrafterConfig, target: ModelConfig, weights: Any, seed: int = 1) -> dict[str, Any]:
    """Random trunk, and an injector that knows what the target says behind each single token.

    So drafts agree with the target often, never always. Needs rank = vocabulary. An EAGLE drafter knows the same by
    its trunk; heads, which see no token, know nothing.
    """
    drafter = random_like(init_drafter, config, seed, 1.0)
    alone = causal_pass(weights, target, jnp.arange(config.vocab_size, dtype=jnp.int32)[:, None])
    if config.kind == "eagle":
        return drafter | {"trunk": knowing_trunk(drafter["trunk"], target, weights, alone.hidden[:, 0])}
    if config.kind == "medusa":
        return drafter
    alone = alone.logits[:, 0]
    one_hot = jnp.eye(config.vocab_size)
    drafter["injector"] = {
        "previous": one_hot,
        "norm": jnp.ones(config.rank),
        "bias": alone.T / config.rank**0.5,  # the norm of a one-hot row multiplies by sqrt(rank)
    }
    if config.injection == PATH:  # what the path says comes on top, loud enough to change trees
        drafter["injector"]["path"] = jnp.asarray(
            np.random.default_rng(seed).normal(0.0, 0.3 * config.rank**-0.5, (config.rank, config.rank)), jnp.float32
        )
    drafter["output_norm"] = {"weight": jnp.full(config.hidden_size, 0.1)}
    return drafter


def knowing_trunk(trunk: Any, target: ModelConfig, weights: Any, alone: Any) -> dict[str, Any]:
    """Forgets the state and turns the embedding of each token into `alone`, the target's state behind it alone.

    The layer behind adds a little noise of its own. Needs a width of at least the vocabulary.
    """
    embedding = np.asarray(weights["embedding"], np.float64) * target.embed_scale
    normed = embedding / np.sqrt((embedding**2).mean(-1, keepdims=True))
    to_alone = np.linalg.lstsq(normed, np.asarray(alone, np.float64), rcond=None)[0].T
    kernel = np.concatenate([-np.eye(len(to_alone)), to_alone], 1)
    layer = jax.tree.map(lambda x: x, trunk["layer_0"])
    for module, name in (("attn", "o"), ("mlp", "down")):
        layer[module][name]["kernel"] *= 0.3
    return trunk | {"layer_0": layer, "pair_in": {"kernel": jnp.asarray(kernel, jnp.float32)}}


def make_small_lm(weights: Any, noise: float = 0.15, seed: int = 2) -> dict[str, Any]:
    """The target's own weights, each matrix off by a share `noise` of its scale: right most of the time."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, noise * float(x.std()), x.shape), jnp.float32), weights)


def markov_target(logits: np.ndarray) -> tuple[ModelConfig, dict[str, Any]]:
    """A transformer that reads its last token alone: `logits[a]` are the logits behind token a."""
    vocab = len(logits)
    config = ModelConfig(
        vocab_size=vocab,
        hidden_size=vocab,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        intermediate_size=2,
        norm_eps=1e-12,
    )
    weights = jax.tree.map(jnp.zeros_like, random_like(init_target, config, 0, 1.0))
    weights["embedding"] = jnp.eye(vocab)
    weights["final_norm"] = {"weight": jnp.ones(vocab)}
    weights["head"] = jnp.asarray(logits.T / vocab**0.5, jnp.float32)  # the norm multiplies by sqrt(V)
    return config, weights


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a decode, as NumPy; a list a setting, one entry a row."""

    prompts: list[np.ndarray]
    new_tokens: list[int]
    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    seeds: list[int]
    eos: tuple[int, ...] = ()

    @property
    def batch(self) -> int:
        return len(self.prompts)

    @property
    def length(self) -> np.ndarray:
        return np.array([len(p) for p in self.prompts], np.int32)

    def rows(self, index: list[int]) -> Call:
        """The same call with these rows, in this order."""
        lists = ("prompts", "new_tokens", "temperature", "top_k", "top_p", "seeds")
        return dataclasses.replace(self, **{name: [getattr(self, name)[i] for i in index] for name in lists})

    def replace(self, **changes) -> Call:
        return dataclasses.replace(self, **changes)

    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array, Limits, RoundInputs, SamplingParams]:
        tokens = np.zeros((self.batch, PROMPT_BUCKET), np.int32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
        eos = np.array([*self.eos, *[NO_TOKEN] * (4 - len(self.eos))], np.int32)
        limits = Limits(jnp.asarray(self.length + np.array(self.new_tokens, np.int32)), jnp.asarray(eos))
        sampling = SamplingParams(
            jnp.asarray(self.temperature, jnp.float32),
            jnp.asarray(self.top_k, jnp.int32),
            jnp.asarray(self.top_p, jnp.float32),
        )
        keys = jax.vmap(jax.random.key)(jnp.asarray(self.seeds, jnp.uint32))
        return jnp.asarray(tokens), jnp.asarray(self.length), keys, limits, sampling

    def start(self, decoder: Decoder, models: dict, capacity: int = CAPACITY) -> DecodeState:
        tokens, length, keys, limits, _ = self.arrays()
        return decoder.prefill(models, tokens, length, keys, limits, capacity=capacity, max_tokens=MAX_TOKENS)

    def resume(self, decoder: Decoder, models: dict, state: DecodeState, num_rounds: int = 2**30) -> DecodeState:
        _, _, _, limits, sampling = self.arrays()
        return decoder.run(models, sampling, limits, state, num_rounds)

    def run(self, decoder: Decoder, models: dict, capacity: int = CAPACITY) -> DecodeState:
        return self.resume(decoder, models, self.start(decoder, models, capacity))


def mixed_call(vocab: int = VOCAB, seed: int = 0) -> Call:
    """Six rows: two greedy, two at temperature 1, two filtered; prompts of 1, 2 and more tokens up to the bucket."""
    rng = np.random.default_rng(seed)
    lengths = [1, 5, 2, 16, 9, 3]
    return Call(
        prompts=[rng.integers(0, vocab, n).astype(np.int32) for n in lengths],
        new_tokens=[30, 17, 28, 23, 1, 30],
        temperature=[0.0, 0.0, 1.0, 1.0, 0.8, 0.8],
        top_k=[0, 0, 0, 0, 5, 5],
        top_p=[1.0, 1.0, 1.0, 1.0, 0.9, 0.9],
        seeds=[3, 1, 4, 15, 9, 2**32 - 1],
    )


def generated(call: Call, state: DecodeState) -> list[list[int]]:
    """The tokens of each row behind its prompt."""
    tokens, length = np.asarray(state.tokens), np.asarray(state.length)
    return [tokens[i, n : length[i]].tolist() for i, n in enumerate(call.length)]


def cut(text: list[int], new_tokens: int, eos: tuple[int, ...]) -> list[int]:
    """What is left of an endless text under the limits of a row."""
    text = text[:new_tokens]
    ends = [i for i, token in enumerate(text) if token in eos]
    return text[: ends[0] + 1] if ends else text


def token_info(weights, config: DrafterConfig, previous):
    """The bias of the previous token alone."""
    return inject(weights, config, previous, None)[0]


def of_tokens(bias):
    """The `Bias` of a function of the previous tokens alone."""
    return lambda tokens, above: (bias(tokens), None)


def grow_beam(base_logits, bias, root, config: TreeConfig, draft_to_target=None, num_levels=None):
    """The beam of a `Grower` at temperature 1, which multiplies no logit; it reads no key and no position."""
    one, zero = jnp.ones(root.shape), jnp.zeros(root.shape, jnp.int32)
    inputs = RoundInputs(root, zero, jax.random.key(0), SamplingParams(one, zero, one))
    grower = Grower(config, DrawScheme.ARBITRARY, base_logits.shape[-1])
    return grower.grow_token_free(base_logits, of_tokens(bias), inputs, draft_to_target, num_levels)


CHAIN = "chain"
DECOYS = "decoys"
ORACLE_DEPTH = 4


def oracle_drafter(layout: str, vocab: int = VOCAB) -> Drafter:
    """Proposes what `models["drafter"]["text"]` holds, off by one wherever `is_wrong` says so; no network at all.

    CHAIN is one path. DECOYS puts a wrong sibling before every right node, a right-looking child under each wrong
    sibling, and padding that holds the right token, which must never count.
    """
    # Per node: parent, depth, and how far its token is from the text.
    nodes = [(NO_PARENT, 0, 0, True)]
    trunk = 0
    for depth in range(1, ORACLE_DEPTH + 1):
        if layout == DECOYS:
            nodes.append((trunk, depth, 2, True))
            if depth < ORACLE_DEPTH:
                nodes.append((len(nodes) - 1, depth + 1, 0, True))
        nodes.append((trunk, depth, 0, True))
        trunk = len(nodes) - 1
    if layout == DECOYS:
        nodes += [(NO_PARENT, 0, 0, False), (NO_PARENT, 1, 0, False)]
    parents, depths, offsets, valid = (np.array(x) for x in zip(*nodes, strict=True))
    is_on_trunk = (offsets == 0) & valid & (depths > 0)

    def init(tokens, length, capacity):
        return {"num_rounds": jnp.zeros_like(length)}

    def read(models, state, *rest):
        return state

    def draft(models, state, inputs):
        table = models["drafter"]
        positions = inputs.position[:, None] + jnp.asarray(depths, jnp.int32)
        token = jnp.take_along_axis(table["text"], positions, 1, mode="clip")
        is_wrong = jnp.take_along_axis(table["is_wrong"], positions, 1, mode="clip") & jnp.asarray(is_on_trunk)
        token = (token + jnp.asarray(offsets, jnp.int32) + is_wrong.astype(jnp.int32)) % vocab
        token = token.at[:, 0].set(inputs.root)
        shape = token.shape

        def rows(x, dtype):
            return jnp.broadcast_to(jnp.asarray(x, dtype), shape)

        tree = DraftTree(token, rows(parents, jnp.int32), rows(depths, jnp.int32), rows(valid, bool))
        return tree, state

    def commit(models, state, verdict, output, num_committed):
        return {"num_rounds": state["num_rounds"] + 1}

    return Drafter(init, read, draft, commit, lambda state, capacity: state, DrawScheme.ARBITRARY, ORACLE_DEPTH)


def oracle_table(state: DecodeState, wrong_share: float, seed: int = 0) -> dict[str, jax.Array]:
    """The "weights" of the oracle drafter: a decoded text, and at random where the proposal goes wrong."""
    text = np.maximum(np.asarray(state.tokens), 0)
    is_wrong = np.random.default_rng(seed).random(text.shape) < wrong_share
    return {"text": jnp.asarray(text, jnp.int32), "is_wrong": jnp.asarray(is_wrong)}


def steered(hidden: Drafter, oracle: Drafter) -> Drafter:
    """A drafter that reads features with the oracle's trees: its caches live through every length of accepted path.

    The oracle's tree is cut to the depth of the hidden drafter's own, which is what its states allow.
    `models["drafter"]` holds the hidden drafter's weights and the oracle's table side by side.
    """

    def draft(models, state, *rest):
        own, state = hidden.draft(models, state, *rest)
        tree = oracle.draft(models, None, *rest)[0]
        deepest = jnp.max(jnp.where(own.valid, own.depth, 0), 1, keepdims=True)
        return tree.replace(valid=tree.valid & (tree.depth <= deepest)), state

    return hidden._replace(draft=draft, max_depth=oracle.max_depth)


VARIANTS = {
    "llama": target_config(),
    "untied": target_config(tie_embeddings=False, sliding_window=5, layer_types=(SLIDING, SLIDING)),
    "qwen": target_config(qk_norm=True, qkv_bias=True, tie_embeddings=False),
    "gemma": target_config(
        norm_offset=1.0,
        post_norms=True,
        embed_scale=32**0.5,
        query_scale=0.3,
        attention_softcap=4.0,
        logit_softcap=6.0,
        sliding_window=4,
        layer_types=(SLIDING, FULL),
        rope_local=RopeConfig(theta=100.0),
        activation="gelu_pytorch_tanh",
    ),
}
"""Settings of the one decoder, by name."""

TREES = {
    "beam": TreeConfig(nodes=10, depth=3, width=3),
    "chain": TreeConfig(nodes=5, depth=4, width=1),
    "two": TreeConfig(nodes=2, depth=1, width=1),
    "no_embeddings": TreeConfig(nodes=6, depth=2, width=2),
    "layers": TreeConfig(nodes=6, depth=2, width=2),
    "hot": TreeConfig(nodes=8, depth=3, width=2),
    "block": TreeConfig(nodes=10, depth=3, width=3),
    "block_layers": TreeConfig(nodes=6, depth=2, width=2),
    "eagle": TreeConfig(nodes=10, depth=3, width=3),
    "eagle_layers": TreeConfig(nodes=6, depth=2, width=2),
    "medusa": TreeConfig(nodes=16, depth=3, width=6),
    "path": TreeConfig(nodes=12, depth=4, width=3),
    "path_chain": TreeConfig(nodes=5, depth=4, width=1),
    "hot_path": TreeConfig(nodes=8, depth=3, width=2),
}
"""Trees of the drafters that read features, by the name of the proposer in `setup`."""

REUSE = {f"{trunk}{form}": ReuseConfig(form) for form in REUSES[1:] for trunk in ("", "block_")}
REUSE |= {name: ReuseConfig("skip", 1) for name in ("skip", "block_skip", "hot_skip")}
REUSE |= {"hot_ahead": ReuseConfig("ahead"), "hot_sum": ReuseConfig("sum")}
REUSE |= {f"path_{form}": ReuseConfig(form) for form in ("sum", "ahead")}
"""Proposers that reuse spare states; shallow trees, because a recurrence of many steps is slow to compile."""
TREES |= {name: TreeConfig(nodes=6, depth=2, width=2) for name in REUSE}

DRAFTERS: dict[str, dict[str, Any]] = {
    "no_embeddings": {"committed_embeddings": False},
    "layers": {"feature_layers": (0, 1)},
    "block": {"trunk": PARALLEL, "num_layers": 2},
    "block_layers": {"trunk": PARALLEL, "feature_layers": (0, 1), "committed_embeddings": False},
    "steered_block": {"trunk": PARALLEL},
    "eagle": {"kind": "eagle"},
    "eagle_layers": {"kind": "eagle", "feature_layers": (0, 1)},
    "steered_eagle": {"kind": "eagle"},
    "medusa": {"kind": "medusa"},
    **{name: {"trunk": PARALLEL} for name in REUSE if name.startswith("block_")},
    **{name: {"injection": PATH} for name in TREES if "path" in name},
}
"""What these proposers change of `drafter_config`."""
STEERED = (
    "steered",
    "steered_block",
    "steered_eagle",
    *[f"steered_{name}" for name in REUSE if name.endswith(("skip", "ahead"))],
)
"""The trunk under the oracle's trees, which are deeper."""


def _changes(proposer: str) -> dict[str, Any]:
    """What a proposer changes of `drafter_config`, the depths its form of reuse asks for included."""
    changes = dict(DRAFTERS.get(proposer) or DRAFTERS.get(proposer.removeprefix("steered_"), {}))
    if proposer.endswith(("skip", "ahead")):
        changes["num_steps"] = 2 * (ORACLE_DEPTH if proposer in STEERED else TREES[proposer].depth) + 1
    return changes


CHAINS = {"lookup": LookupConfig(), "small_lm": SmallLMConfig(**vars(VARIANTS["llama"]))}
"""Proposers that draft chains of their own kind, for the variant "llama"."""
DRAFT_TO_TARGET = np.flatnonzero(np.arange(VOCAB) % 3 != 1).astype(np.int32)
"""What the proposer "hot" may draft: two thirds of the tokens, so that texts are full of cold ones."""
WRONG_SHARE = 0.2


@dataclasses.dataclass(frozen=True)
class Setup:
    """A decoder and its weights."""

    config: ModelConfig
    drafter_config: Any
    drafter: Drafter | None
    models: dict[str, Any]
    decoder: Decoder

    def decoder_with(self, rule=None, use_native: bool = True) -> Decoder:
        """Another decoder of the same pair; `rule` in place of the match rule."""
        if self.drafter is None:
            step = make_plain_step(self.config)
        else:
            step = make_step(self.config, self.drafter, rule or match_rule(self.drafter.max_depth))
        return Decoder(self.config, step, self.drafter, precision="highest", use_native=use_native)


@functools.cache
def weights(variant: str) -> dict[str, Any]:
    return make_target(VARIANTS[variant])


@functools.cache
def setup(variant: str = "llama", proposer: str = "plain", scheme: DrawScheme = DrawScheme.COUPLED) -> Setup:
    """One pair of target and proposer, compiled once for all test files.

    Args:
      proposer: "plain" for none, a name in TREES for a drafter that reads features, a name in CHAINS, CHAIN_ORACLE or
        DECOYS_ORACLE, or one of STEERED.
      distribution: of trees judged by the match rule; oracles choose their tokens arbitrarily.
    """
    config, target = VARIANTS[variant], weights(variant)
    wanted = drafter_config(config, **_changes(proposer))
    drafter, drafter_weights = None, None
    if proposer in TREES:
        drafter_weights = make_drafter(wanted, config, target)
        if proposer.startswith("hot"):
            wanted, drafter_weights = draft_vocab.restrict(wanted, drafter_weights, DRAFT_TO_TARGET)
            drafter_weights = draft_vocab.attach(drafter_weights, drafter_weights["draft_to_target"], target, config)
        drafter = drafter_of(config, wanted, TREES[proposer], scheme=scheme, reuse=REUSE.get(proposer, NO_REUSE))
    elif proposer in CHAINS:
        wanted = CHAINS[proposer]
        drafter = drafter_of(config, wanted, TREES["chain"], scheme=scheme)
        drafter_weights = make_small_lm(target) if proposer == "small_lm" else {}
    elif proposer in (CHAIN_ORACLE, DECOYS_ORACLE):
        drafter = oracle_drafter(CHAIN if proposer == CHAIN_ORACLE else DECOYS)
        drafter_weights = oracle_table(long_text(variant), WRONG_SHARE)
    elif proposer in STEERED:
        reuse = REUSE.get(proposer.removeprefix("steered_"), NO_REUSE)
        drafter = steered(drafter_of(config, wanted, TREES["chain"], reuse=reuse), oracle_drafter(DECOYS))
        drafter_weights = make_drafter(wanted, config, target) | oracle_table(long_text(variant), WRONG_SHARE)
    elif proposer != "plain":
        raise ValueError(f"unknown proposer {proposer!r}")
    found = Setup(config, wanted, drafter, {"target": target, "drafter": drafter_weights}, None)  # type: ignore
    return dataclasses.replace(found, decoder=found.decoder_with())


@functools.cache
def sampled(scheme: DrawScheme) -> Setup:
    """The pair of "beam" with trees drawn under `scheme` and judged by the recursive rule."""
    tree, beam = TreeConfig(nodes=9, depth=3, width=3), setup("llama", "beam")
    drafter = drafter_of(beam.config, beam.drafter_config, tree, scheme=scheme)
    found = dataclasses.replace(beam, drafter=drafter)
    return dataclasses.replace(found, decoder=found.decoder_with(recursive_rule(tree.depth, tree.width)))


CHAIN_ORACLE, DECOYS_ORACLE = "chain_oracle", "decoys_oracle"
LONG = 60
"""Tokens in `long_text`: what plain decoding says of `mixed_call` without end tokens."""


@functools.cache
def long_text(variant: str = "llama") -> DecodeState:
    call = mixed_call()
    plain = setup(variant, "plain")
    return call.replace(new_tokens=[LONG] * call.batch).run(plain.decoder, plain.models)


def expected(variant: str, call: Call) -> list[list[int]]:
    """What plain decoding says under the limits of `call`, whose rows are those of `mixed_call`, in plain Python."""
    texts = generated(call, long_text(variant))
    return [cut(text, new, call.eos) for text, new in zip(texts, call.new_tokens, strict=True)]
