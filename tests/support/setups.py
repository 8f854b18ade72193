"""The table of targets and proposers, each pair compiled once for all tests.

A proposer is a case of the conformance table (`infer/test_exact.py`) from the moment it stands here. A kind of drafter
of the package's own table that no proposer here drafts with fails a test there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from hsd_jax.config import (
    AHEAD,
    FULL,
    NO_REUSE,
    PARALLEL,
    REUSES,
    SKIP,
    SLIDING,
    SUM,
    ModelConfig,
    ReuseConfig,
    RopeConfig,
    TreeConfig,
)
from hsd_jax.drafters.both import BothConfig
from hsd_jax.drafters.dflash.weights import GATED, NONE, RNN, DFlashConfig
from hsd_jax.drafters.eagle3 import Eagle3Config
from hsd_jax.drafters.hidden.weights import PATH, HiddenConfig
from hsd_jax.drafters.lookup import LookupConfig
from hsd_jax.drafters.pearl.draft import PearlConfig
from hsd_jax.drafters.rescored.draft import RescoredConfig
from hsd_jax.drafters.small_lm import SmallLMConfig
from hsd_jax.drafters.stack import StackConfig
from hsd_jax.drafters.steered import STEERING, SteeredConfig, init_steering
from hsd_jax.drafters.table import DRAFTING_METHODS
from hsd_jax.drafters.table import make_drafter as drafter_of
from hsd_jax.infer import round as round_lib
from hsd_jax.infer.loop import Decoder, program_for
from hsd_jax.infer.plain import make_plain_step
from hsd_jax.infer.round import make_step
from hsd_jax.infer.rules.accept import match_rule
from hsd_jax.infer.rules.table import make_rule
from hsd_jax.infer.sampling import round_noise
from hsd_jax.models import draft_vocab
from hsd_jax.pair import Params
from hsd_jax.train.ngram import make_ngram
from hsd_jax.types import DecodeState, Drafter, DraftTree, DrawScheme, KVCache, NewKV, SamplingParams
from support.calls import CAPACITY, Call, cut, generated, mixed_call
from support.dspark import make_dspark, toy_config
from support.oracle_drafter import CHAIN, DECOYS, ORACLE_DEPTH, oracle_drafter, oracle_table, steered
from support.toy import VOCAB, drafter_config, make_drafter, make_eagle3, make_small_lm, make_target, target_config

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


@dataclasses.dataclass(frozen=True, eq=False)
class Proposer:
    """How a target's text is drafted in the table of `test_exact.py`."""

    name: str
    tree: TreeConfig | None = None
    """None: no drafts, or those of the oracle."""
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of `toy.drafter_config`."""
    reuse: ReuseConfig = NO_REUSE
    is_restricted: bool = False
    """Drafts from a reduced vocabulary, DRAFT_TO_TARGET."""
    oracle: str | None = None
    """Layout of the oracle's trees (`oracle_drafter.py`), if they stand in for the drafter's own."""
    is_trained: bool = True
    """Reads features of the target; else it is of another kind, `config`, or nothing but the oracle."""
    config: Any = None
    scorer: str | None = None
    """A key of `scorers`, if its drafts are rescored."""
    beside: LookupConfig | None = None
    """The lookup that drafts beside it, if one does."""
    is_slow: bool = False
    """Whether its case of the conformance table is left to `make test-slow`."""

    @property
    def kind(self) -> str | None:
        """The kind of the drafter in the package's table. None if none drafts, or the oracle alone."""
        if self.scorer is not None:
            return RescoredConfig.kind
        if self.beside is not None:
            return BothConfig.kind
        return self.changes.get("kind", HiddenConfig.kind) if self.is_trained else getattr(self.config, "kind", None)

    @property
    def drafter_changes(self) -> dict[str, Any]:
        """With the steps that its form of reuse asks for."""
        if self.reuse.form not in (SKIP, AHEAD):
            return self.changes
        depth = ORACLE_DEPTH if self.oracle else cast(TreeConfig, self.tree).depth
        return self.changes | {"num_steps": 2 * depth + 1}


BEAM, CHAIN_OF_4 = TreeConfig(nodes=10, depth=3, width=3), TreeConfig(nodes=5, depth=4, width=1)
SMALL, MIDDLE = TreeConfig(nodes=6, depth=2, width=2), TreeConfig(nodes=8, depth=3, width=2)
DRAWN_BEAM = TreeConfig(nodes=9, depth=3, width=3)
COPIED_BELOW, SELDOM_RIGHT = TreeConfig(nodes=8, depth=6, width=2), {"profile": (0.5, 0.25, 0.1)}
"""A tree whose last three levels are copies where the drafter is this seldom right."""
BRANCHING, SMALL_BRANCHING = TreeConfig(branching=(3, 2, 1)), TreeConfig(branching=(2, 2))
BLOCK, PATHS = {"trunk": PARALLEL}, {"injection": PATH}
HEADS = {"kind": "medusa"}
CHAIN_ORACLE, DECOYS_ORACLE = "chain_oracle", "decoys_oracle"
DRAFT_TO_TARGET = np.flatnonzero(np.arange(VOCAB) % 3 != 1).astype(np.int32)
"""What a restricted proposer may draft: two thirds of the tokens, so that texts are full of cold ones."""
WRONG_SHARE = 0.2
ARCS, ALPHA = 5, 0.5
"""Of rescored proposers."""


def _reuses() -> list[Proposer]:
    """Proposers that reuse spare states; shallow trees, because a recurrence of many steps is slow to compile."""
    forms = {form: ReuseConfig(form, 1 if form == SKIP else None) for form in REUSES[1:]}
    return [
        *(Proposer(form, SMALL, {}, reuse, is_slow=form != AHEAD) for form, reuse in forms.items()),
        *(Proposer(f"block_{form}", SMALL, BLOCK, reuse, is_slow=True) for form, reuse in forms.items()),
        *(
            Proposer(f"hot_{form}", SMALL, {}, forms[form], is_restricted=True, is_slow=form != SUM)
            for form in (SKIP, AHEAD, SUM)
        ),
        *(Proposer(f"path_{form}", SMALL, PATHS, forms[form], is_slow=True) for form in (SUM, AHEAD)),
    ]


_READING = [
    Proposer("beam", BEAM),
    Proposer("chain", CHAIN_OF_4),
    Proposer("two", TreeConfig(nodes=2, depth=1, width=1), is_slow=True),
    Proposer("no_embeddings", SMALL, {"committed_embeddings": False}, is_slow=True),
    Proposer("layers", SMALL, {"feature_layers": (0, 1)}, is_slow=True),
    Proposer("hot", MIDDLE, is_restricted=True, is_slow=True),
    Proposer("block", BEAM, BLOCK | {"num_layers": 2}),
    Proposer("block_layers", SMALL, BLOCK | {"feature_layers": (0, 1), "committed_embeddings": False}, is_slow=True),
    Proposer("eagle", BEAM, {"kind": "eagle"}),
    Proposer("eagle_layers", SMALL, {"kind": "eagle", "feature_layers": (0, 1)}, is_slow=True),
    Proposer("medusa", TreeConfig(nodes=16, depth=3, width=6), {"kind": "medusa"}),
    Proposer("path", TreeConfig(nodes=12, depth=4, width=3), PATHS, is_slow=True),
    Proposer("path_chain", CHAIN_OF_4, PATHS, is_slow=True),
    Proposer("branching", BRANCHING, PATHS),
    Proposer("eagle_branching", BRANCHING, {"kind": "eagle"}, is_slow=True),
    Proposer("sum_branching", SMALL_BRANCHING, {}, ReuseConfig(SUM), is_slow=True),
    Proposer("skip_branching", SMALL_BRANCHING, {}, ReuseConfig(SKIP, 1), is_slow=True),
    *_reuses(),
]


def _steered(one: Proposer, is_slow: bool) -> Proposer:
    """The trunk of a proposer under the oracle's trees, which are deeper."""
    name = f"steered_{one.name}" if one.name else "steered"
    return Proposer(name, CHAIN_OF_4, one.changes, one.reuse, oracle=DECOYS, is_slow=is_slow)


_STEERED = [
    _steered(Proposer(""), is_slow=False),
    _steered(Proposer("block", None, BLOCK), is_slow=True),
    _steered(Proposer("eagle", None, {"kind": "eagle"}), is_slow=True),
    *(_steered(one, one.name != f"block_{SKIP}") for one in _READING if one.reuse.form in (SKIP, AHEAD)),
]
SMALL_LM = SmallLMConfig(**vars(VARIANTS["llama"]))
FEWER_TOKENS = dataclasses.replace(SMALL_LM, stored_vocab_size=VOCAB - 6)
_OTHER = [
    Proposer("lookup", CHAIN_OF_4, is_trained=False, config=LookupConfig()),
    Proposer("small_lm", CHAIN_OF_4, is_trained=False, config=SMALL_LM),
    Proposer("small_lm_fewer", BRANCHING, is_trained=False, config=FEWER_TOKENS, is_slow=True),
]
STEERED = SteeredConfig(**vars(VARIANTS["llama"]), target_hidden_size=32, steering_layers=(1, 2), num_steps=4)
EAGLE3 = Eagle3Config(
    hidden_size=32,
    target_hidden_size=32,
    vocab_size=VOCAB,
    reduced_vocab_size=len(DRAFT_TO_TARGET),
    feature_layers=(-1, 0, 1),
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
)
_OWN = {"hidden_size": 24, "has_embedding": True, "num_layers": 2, "reduced_vocab_size": None, "qk_norm": True}
_NORMS = {"fc_norm": True, "norm_before_residual": True, "norm_output": True}
_PUBLISHED = [
    Proposer("eagle3", BEAM, is_trained=False, config=EAGLE3),
    Proposer(
        "eagle3_own", BRANCHING, is_trained=False, config=dataclasses.replace(EAGLE3, **_OWN, **_NORMS), is_slow=True
    ),
]
_STEERED_BY_STATES = [
    Proposer("sd2", CHAIN_OF_4, is_trained=False, config=STEERED),
    Proposer("sd2_branching", BRANCHING, is_trained=False, config=STEERED, is_slow=True),
]
_AHEAD = [
    Proposer("pearl", TreeConfig.chain(3), is_trained=False, config=PearlConfig(SMALL_LM, 3)),
    Proposer("pearl_fewer", TreeConfig.chain(3), is_trained=False, config=PearlConfig(FEWER_TOKENS, 3), is_slow=True),
]
_SMALL_LM_TREES = [
    Proposer("small_lm_branching", BRANCHING, is_trained=False, config=SMALL_LM),
    Proposer("small_lm_beam", MIDDLE, is_trained=False, config=SMALL_LM, is_slow=True),
]
_RESCORED = [
    Proposer("rescored_ngram", BEAM, HEADS, scorer="ngram"),
    Proposer("rescored_low_rank", MIDDLE, HEADS, scorer="low_rank", is_slow=True),
    Proposer("rescored_lm", MIDDLE, HEADS, scorer="small_lm"),
    Proposer("rescored_hidden", MIDDLE, PATHS, scorer="ngram", is_slow=True),
    Proposer("rescored_hot", MIDDLE, HEADS, scorer="ngram", is_restricted=True, is_slow=True),
]
_BOTH = [
    Proposer("both", BEAM, PATHS, beside=LookupConfig()),
    Proposer("both_deep", COPIED_BELOW, PATHS | SELDOM_RIGHT, beside=LookupConfig()),
    Proposer("both_deep_eagle", COPIED_BELOW, {"kind": "eagle"} | SELDOM_RIGHT, beside=LookupConfig(4), is_slow=True),
    Proposer("both_deep_heads", COPIED_BELOW, HEADS | SELDOM_RIGHT, beside=LookupConfig(), is_slow=True),
    Proposer("both_eagle", MIDDLE, {"kind": "eagle"}, beside=LookupConfig(4), is_slow=True),
    Proposer("both_branching", BRANCHING, PATHS, beside=LookupConfig(), is_slow=True),
]
_STACK_CHAIN, _INNER_LENGTH = TreeConfig.chain(6), 3
"""So the middle model has at least three tokens before they go up."""


def _stacked(inner: Any) -> StackConfig:
    return StackConfig(SMALL_LM, inner, _INNER_LENGTH)


_STACKS = [
    Proposer(f"stack_{name}", _STACK_CHAIN, is_trained=False, config=_stacked(inner), is_slow=is_slow)
    for name, inner, is_slow in (
        ("small_lm", SMALL_LM, True),
        ("hidden", drafter_config(VARIANTS["llama"], feature_layers=(0, 1)), False),
        ("lookup", LookupConfig(), False),
        ("medusa", drafter_config(VARIANTS["llama"], "medusa"), True),
        ("eagle", drafter_config(VARIANTS["llama"], "eagle"), True),
        ("stack", _stacked(SMALL_LM), True),
        ("sd2", STEERED, True),
    )
]


def _dspark(name: str, tree: TreeConfig, form: str = "none", is_slow: bool = True, **changes: Any) -> Proposer:
    reuse = ReuseConfig(form, 1 if form == SKIP else None)
    config = toy_config(VARIANTS["llama"], **changes)
    return Proposer(name, tree, {}, reuse, is_trained=False, config=config, is_slow=is_slow)


_SLIDES = {"layer_types": (SLIDING,), "sliding_window": 2}
_DSPARK = [
    _dspark("dspark", BEAM, is_slow=False),
    _dspark("dspark_chain", CHAIN_OF_4, **_SLIDES),
    _dspark("dspark_gated", BRANCHING, markov_head=GATED, **_SLIDES, sees_ahead=True),
    _dspark("dspark_rnn", BEAM, markov_head=RNN, samples_anchor=False, num_steps=4),
    _dspark("dflash", TreeConfig(nodes=16, depth=3, width=6), rank=0, confidence=NONE, samples_anchor=False),
    *(_dspark(f"dspark_{form}", SMALL, form) for form in REUSES[1:]),
]
_WITH_MODELS = (*_OTHER, *_AHEAD, *_STEERED_BY_STATES, *_SMALL_LM_TREES)
_LISTED = (*_READING, *_STEERED, *_WITH_MODELS, *_PUBLISHED, *_DSPARK, *_RESCORED, *_BOTH, *_STACKS)


def _unlisted() -> list[Proposer]:
    """Kinds of drafters that are trained on features and that nothing above drafts with."""
    kinds = {kind: one for kind, one in DRAFTING_METHODS.items() if one.training is not None}
    known = {one.kind for one in _LISTED}
    trees = {True: BEAM, False: CHAIN_OF_4}
    return [
        Proposer(kind, trees[one.planning.grows_wide], {"kind": kind})
        for kind, one in kinds.items()
        if kind not in known
    ]


PROPOSERS = {
    one.name: one
    for one in (
        Proposer("plain", is_trained=False),
        Proposer(CHAIN_ORACLE, is_trained=False, oracle=CHAIN),
        Proposer(DECOYS_ORACLE, is_trained=False, oracle=DECOYS),
        *_LISTED,
        *_unlisted(),
    )
}


def _of_each_kind() -> dict[str, str]:
    found: dict[str, str] = {}
    for one in PROPOSERS.values():
        if one.kind is not None and not one.is_slow:
            found.setdefault(one.kind, one.name)
    return found


OF_EACH_KIND = _of_each_kind()
"""For every kind of drafter its first proposer that is not slow."""
LEFT_TO_SLOW = ["eagle", "eagle3", "dspark", "medusa", "rescored_ngram", "both", "stack_hidden", "pearl", "sd2"]
"""Of these, what tests beside the conformance table leave to `make test-slow`."""
TREES = {one.name: one.tree for one in _READING}
"""Of the drafters that read features."""
REUSE = {one.name: one.reuse for one in _READING if one.reuse != NO_REUSE}


@functools.cache
def scorer(name: str) -> tuple[Any, dict[str, Any]]:
    """The configuration and the weights of a transition scorer for the variant "llama"."""
    config, target = VARIANTS["llama"], weights("llama")
    if name == "ngram":
        texts = generated(mixed_call(), long_text())
        documents = [(np.asarray(text, np.int32), np.arange(len(text)) > 0) for text in texts]
        found, own = make_ngram(documents, 3, VOCAB, "0" * 64)
        return found, {key: jnp.asarray(value) for key, value in own.items()}
    if name == "low_rank":
        found = drafter_config(config, injection=PATH)
        return found, {"injector": make_drafter(found, config, target)["injector"]}
    return SmallLMConfig(**vars(config)), make_small_lm(target)


def drafter_weights_of(config: Any, target: dict[str, Any], seed: int = 2) -> dict[str, Any]:
    """Of a drafter that is no trained one of the table: a model near its target, levels of them, or none."""
    if config.kind == StackConfig.kind:
        middle = make_small_lm(target, seed=seed)
        return {"middle": middle, "inner": drafter_weights_of(config.inner, middle, seed + 1)}
    if config.kind in (SmallLMConfig.kind, PearlConfig.kind):
        return make_small_lm(target, seed=seed)
    if config.kind == Eagle3Config.kind:
        tokens = np.arange(VOCAB) if config.reduced_vocab_size is None else DRAFT_TO_TARGET
        return make_eagle3(config, VARIANTS["llama"], target, tokens)
    if config.kind == SteeredConfig.kind:
        return {**make_small_lm(target, seed=seed), STEERING: make_steering(config)}
    if config.kind == DFlashConfig.kind:
        return make_dspark(config, VARIANTS["llama"], target, seed)
    return {} if DRAFTING_METHODS[config.kind].parse is not None else make_drafter(config, VARIANTS["llama"], target)


def make_steering(config: SteeredConfig) -> dict[str, Any]:
    """Weights that steer, a little."""
    rng = np.random.default_rng(3)
    fresh = init_steering(jax.random.key(0), config)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.05, x.shape), jnp.float32), fresh)


@dataclasses.dataclass(frozen=True)
class Setup:
    """A decoder and its weights."""

    config: ModelConfig
    drafter_config: Any
    drafter: Drafter | None
    models: dict[str, Any]
    decoder: Decoder

    def rounds(self, capacity: int = CAPACITY) -> Iterator[DecodeState]:
        """The state of `mixed_call` after its prompts, and after every round until all rows are done."""
        call = mixed_call()
        state = call.start(self.decoder, self.models, capacity)
        yield state
        while not bool(state.done.all()):
            state = call.resume(self.decoder, self.models, state, 1)
            yield state

    def after(self, num_rounds: int, capacity: int = CAPACITY) -> DecodeState:
        """The state of `mixed_call` after some rounds."""
        call = mixed_call()
        return call.resume(self.decoder, self.models, call.start(self.decoder, self.models, capacity), num_rounds)

    def decoder_with(self, rule=None) -> Decoder:
        """Another decoder of the same pair; `rule` in place of the match rule."""
        if self.drafter is None:
            step = make_plain_step(self.config)
        else:
            step = make_step(self.config, self.drafter, rule or match_rule(self.drafter.max_depth))
        return Decoder(self.config, step, self.drafter, own=program_for("highest"))


@functools.cache
def weights(variant: str) -> dict[str, Any]:
    return make_target(VARIANTS[variant])


@functools.cache
def setup(variant: str = "llama", proposer: str = "plain", scheme: DrawScheme = DrawScheme.COUPLED) -> Setup:
    """One pair of target and proposer, compiled once for all test files.

    Args:
      proposer: a name in PROPOSERS.
      scheme: of trees judged by the match rule; oracles choose their tokens arbitrarily.
    """
    config, target, one = VARIANTS[variant], weights(variant), PROPOSERS[proposer]
    wanted = drafter_config(config, **one.drafter_changes) if one.config is None else one.config
    drafter, drafter_weights = None, None
    if one.is_trained:
        drafter_weights = make_drafter(wanted, config, target)
    elif one.config is not None:
        drafter_weights = drafter_weights_of(one.config, target)
    if one.is_restricted:
        wanted, drafter_weights = draft_vocab.restrict(wanted, drafter_weights, DRAFT_TO_TARGET)
        drafter_weights = draft_vocab.attach(drafter_weights, drafter_weights["draft_to_target"], target, config)
    if one.scorer is not None:
        found, own = scorer(one.scorer)
        wanted = RescoredConfig(wanted, found, ARCS)
        drafter_weights = {**drafter_weights, "rescorer": {**own, "alpha": jnp.full(1, ALPHA)}}
    if one.beside is not None:
        wanted = BothConfig(wanted, one.beside)
    if one.oracle is not None:
        drafter = oracle_drafter(one.oracle)
        drafter_weights = (drafter_weights or {}) | oracle_table(long_text(variant), WRONG_SHARE)
        if one.is_trained:
            drafter = steered(drafter_of(config, wanted, CHAIN_OF_4, reuse=one.reuse), drafter)
    elif one.tree is not None:
        drafter = drafter_of(config, wanted, one.tree, scheme=scheme, reuse=one.reuse)
    models = {"target": target, "drafter": drafter_weights}
    found = Setup(config, wanted, drafter, models, None)  # type: ignore
    return dataclasses.replace(found, decoder=found.decoder_with())


@functools.cache
def sampled(
    scheme: DrawScheme, tree: TreeConfig = DRAWN_BEAM, accept: str = "recursive", proposer: str = "beam"
) -> Setup:
    """The pair of a proposer with trees drawn under `scheme` and judged by the rule `accept`."""
    beam = setup("llama", proposer)
    drafter = drafter_of(beam.config, beam.drafter_config, tree, scheme=scheme)
    found = dataclasses.replace(beam, drafter=drafter)
    return dataclasses.replace(found, decoder=found.decoder_with(make_rule(accept, tree)))


def is_cached(cache: KVCache, row: int, fresh: NewKV, rtol: float = 1e-4, atol: float = 1e-5) -> bool:
    """Whether the valid slots of a row hold the keys and values of a fresh pass."""
    num = int(cache.length[row])
    pairs = zip((*cache.keys, *cache.values), (*fresh.keys, *fresh.values), strict=True)
    return all(np.allclose(one[row, :, :num], other[row, :, :num], rtol=rtol, atol=atol) for one, other in pairs)


def draft(
    one: Setup, state: DecodeState, sampling: SamplingParams, drafter: Drafter | None = None, models: Any = None
) -> tuple[DraftTree, Any]:
    """What a round drafts, with the noise of the round; `drafter` and `models` stand in for those of the setup."""
    made = drafter or one.drafter

    def drafted(models, state):
        noise = round_noise(state.keys, state.length - 1, made.max_depth, one.config.vocab_size, sampling)
        return round_lib.draft(models, made, sampling, state, noise)

    return jax.jit(drafted)(models or one.models, state)


def params_of(proposer: str, variant: str = "llama", **options: Any) -> Params:
    """A pair of the table as users have it, with `options` of `Params`."""
    one = setup(variant, proposer)
    return Params(one.models["target"], one.models["drafter"], one.config, one.drafter_config, **options)


def pair_of(proposer: str, **options: Any) -> tuple[Params, dict[str, Any]]:
    """As `params_of`, without a drafter for plain decoding; and with what settings of speculation it is used."""
    one, params = PROPOSERS[proposer], params_of(proposer, **options)
    params = params if one.tree is not None else dataclasses.replace(params, drafter_config=None)
    reuse = {} if one.reuse == NO_REUSE else {"reuse": str(one.reuse)}
    return params, {"tree": one.tree, "speculate": one.tree is not None, **reuse}


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
