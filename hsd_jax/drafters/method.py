"""The interface of a kind of drafter to the rest of the package."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from hsd_jax.config import NO_REUSE_FORM, TreeConfig
from hsd_jax.types import Drafter, Weights

CHEAP_OPERATIONS = 20
"""The number of small operations in a round of a drafter that runs no model."""


class TokenInformation(NamedTuple):
    """Token information as functions of the drafter's weights and configuration: a bias that depends on drafted tokens
    and is added to the base logits of token-free states."""

    inject: Callable[..., Any]
    """`inject(weights, config, tokens, above) -> (bias, above)`: the bias after each token, for the nodes of a level.
    The result `above` is an argument of the call for their children."""
    read_paths: Callable[..., Any]
    """`read_paths(weights, config, paths [..., K]) -> [..., K, r]`: reads all tokens of whole paths at once."""
    bias: Callable[..., Any]
    """`bias(weights, config, read [..., r]) -> [..., C]`: the bias that follows from what was read."""
    begin_from: Callable[..., Weights]
    """`begin_from(weights, embedding [V, H]) -> weights`: fresh weights, initialised from the target's embeddings."""


class Distilled(NamedTuple):
    """How a language model is trained by distillation to draft."""

    config_of: Callable[..., Any]
    """`config_of(model, target_config, target_hash, steering_layers, num_steps)`: the drafter's configuration, from
    that of a language model. Raises a ValueError if the target lacks a steering layer, or if other layers already
    steer the model."""
    logits: Callable[..., Any]
    """`logits(weights, config, tokens, features, key=None, starts=None, remat=False) -> [B, T, V]`: its logits after
    each token, given the target's states [B, T, H] in every layer that steers. Consumes the key. Without a key each
    token is read as in the first draft of a round."""
    added: Callable[..., Weights] = lambda key, config: {}
    """`added(key, config)`: fresh weights of the parts that a plain language model does not have."""
    save_added: Callable[..., None] = lambda folder, config, weights: None
    """`save_added(folder, config, weights)`: writes these parts into the folder of the model."""
    is_steered: bool = False
    """Whether it reads its target's states. Then it cannot write text alone."""


class Planning(NamedTuple):
    """Properties of a drafter that decide its tree. The defaults are for chains that cost almost nothing."""

    drafting_seconds: Callable[..., float] = lambda model, config, rows, tree: (
        CHEAP_OPERATIONS * model.rates.operation_seconds
    )
    """`drafting_seconds(model, config, rows, tree)`: seconds to draft a tree for each of `rows` rows. `model` is a
    `planning.costs.CostModel`."""
    default_tree: Callable[[Any], TreeConfig] = lambda config: TreeConfig.chain(7)
    """`default_tree(config)`: for calls that neither name a tree nor let `planning/plan.py` choose."""
    max_depth: Callable[[Any], int] = lambda config: 15
    """`max_depth(config)`: the deepest chain worth trying."""
    grows_wide: bool = False
    """Whether trees with siblings are considered when the call names no tree."""
    has_score: bool = True
    """Whether its trees have a score: how likely each node is to be accepted, as the drafter predicts it."""
    chains_nest: bool = True
    """Whether the beginning of a long chain equals a shorter chain from the same position."""
    ends_early: bool = False
    """Whether each draft of a chain costs a pass, so that chains may end early (`infer/chains.py`)."""


class Training(NamedTuple):
    """What the trainer needs from a drafter that is trained on its target's features."""

    init_weights: Callable[..., Weights]
    """`init_weights(key, config)`: fresh weights."""
    unroll: Callable[..., Any]
    """As `models.unroll.unroll`: the states of many anchors at once."""


class DraftingMethod(NamedTuple):
    """A kind of drafter. Its name is `config.kind`."""

    config: type
    """The frozen dataclass of its static configuration."""
    make: Callable[..., Drafter]
    """`make(target_config, config, tree, cache_dtype, scheme) -> Drafter`, and `reuse` if `reuses` has several forms.
    Raises a ValueError for trees that it cannot draft."""
    planning: Planning = Planning()
    training: Training | None = None
    """None: it is not trained on its target's features."""
    parts: Callable[..., Any] | None = None
    """`parts(target_config, config, tree, scheme)`: the parts of drafting, to time each. None: only all of drafting
    can be timed. No decode uses it."""
    parse: Callable[[str], Any] | None = None
    """`parse(name)`: for drafters without weights, the configuration that a name such as "lookup:4" means; None for any
    other name."""
    load: Callable[..., tuple[Any, Weights] | None] | None = None
    """`load(checkpoint, target, dtype, placement, strict)`: loads a language model as a drafter for a `DraftedFor`;
    `strict` as in `hsd_jax.load`. Returns None if the checkpoint is of another kind."""
    distilled: Distilled | None = None
    """None: it is not trained by distillation."""
    is_language_model: bool = False
    """Whether it is a plain language model, which can write text alone, draft ahead, and have a drafter of its own."""
    has_weights_of_base: bool = False
    """Whether its weights are those of the drafter `config.base`, and nothing else."""
    token_information: TokenInformation | None = None
    reuses: tuple[str, ...] = (NO_REUSE_FORM,)
    """The forms of reuse of spare states that it allows (`config.REUSES`)."""
    lattice: Callable[..., Any] | None = None
    """`lattice(target_config, config, tree, models, state) -> (logits [B, D, C], inject, state)`, for drafters whose
    states read no drafted token: the arguments of `tree.token_free`. `inject` is None if drafted tokens add nothing to
    the logits. `lattice` is None if the drafter's states read drafted tokens."""
    overlapped: Callable[..., Any] | None = None
    """`overlapped(target_config, config, tree, scheme, rule, drafter_mesh, cache_dtype, program)`: a `Decoder`
    in which both models run at the same time, each on its own devices. None: one program runs both."""


def planning_of_trained(drafting_seconds: Callable[..., float], has_score: bool = True) -> Planning:
    """The planning of a drafter that is trained for a number of steps. By default it drafts at most 7 tokens."""
    default_tree = lambda config: TreeConfig.chain(min(7, config.num_steps))  # noqa: E731
    return Planning(drafting_seconds, default_tree, lambda config: config.num_steps, True, has_score)


DRAFTING_METHODS: dict[str, DraftingMethod] = {}
"""The table of drafters by name, which `table.py` fills."""


def method_of(config: Any) -> DraftingMethod:
    """The entry for a drafter's configuration."""
    return DRAFTING_METHODS[config.kind]


class Based:
    """The properties of every trained drafter, for the configuration of a drafter that extends another, its `base`."""

    num_steps = property(attrgetter("base.num_steps"))
    draft_vocab_size = property(attrgetter("base.draft_vocab_size"))
    vocab_size = property(attrgetter("base.vocab_size"))
    profile = property(attrgetter("base.profile"))  # we assume that the extension does not lower it
    sampled_profile = property(attrgetter("base.sampled_profile"))


def planning_on_base(more_seconds: Callable[..., float], chains_nest: bool = True) -> Planning:
    """The planning of a drafter with a base. `more_seconds` are seconds of drafting in addition to the base."""

    def of(config: Any) -> Planning:
        return method_of(config.base).planning

    def drafting_seconds(model: Any, config: Any, rows: int, tree: TreeConfig) -> float:
        own = of(config).drafting_seconds(model, config.base, rows, tree)
        return own + more_seconds(model, config, rows, tree)

    return Planning(
        drafting_seconds,
        lambda config: of(config).default_tree(config.base),
        lambda config: of(config).max_depth(config.base),
        grows_wide=True,
        chains_nest=chains_nest,
    )
