"""The interface of a kind of drafter to the rest of the package, and the checks that several kinds share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from hsd_jax.config import NO_REUSE_FORM, DrafterConfig, ModelConfig, TreeConfig
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.types import DRAWN_SCHEMES, Drafter, DrawScheme, Weights

CHEAP_OPERATIONS = 20
"""The number of small operations in a round of a drafter that runs no model."""


class DraftedFor(NamedTuple):
    """A model for which a drafter is loaded."""

    config: ModelConfig
    hash: str
    """The fingerprint of the weights in its files, before any quantization."""
    tokenizer: Tokenizer | None

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary in its files, for which drafters are trained."""
        return self.config.stored_vocab_size or self.config.vocab_size

    @property
    def vocabulary_hash(self) -> str:
        """The hash of its tokenizer's vocabulary; empty without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.vocabulary_hash

    def check_weights(self, trained_for: str, target_hash: str, vocabulary_hash: str, strict: bool) -> None:
        """Warns of a drafter that was trained for other weights of the right sizes, as those of a fine-tune.

        Its guesses change only the speed. A drafter for another vocabulary is refused. `strict` refuses any other
        weights. `trained_for` is text for messages. Nothing is checked if `target_hash` is empty.
        """
        if target_hash in ("", self.hash):
            return
        other = f"{trained_for}; this target is {self.hash[:12]}, same sizes but other weights"
        own = self.vocabulary_hash
        if vocabulary_hash and own and vocabulary_hash != own:
            other += f", and another vocabulary ({vocabulary_hash[:12]} there, {own[:12]} here)"
        elif not strict:
            doubt = "" if vocabulary_hash and own else ", and the vocabularies could not be compared"
            warnings.warn(f"{other}{doubt}: fewer drafts may be accepted; strict=True refuses it", stacklevel=2)
            return
        raise ValueError(other)


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


def all_levels(config: Any, tree: TreeConfig) -> TreeConfig:
    """`Planning.grown` of a drafter that grows every level of a tree."""
    return tree


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
    grown: Callable[[Any, TreeConfig], TreeConfig] = all_levels
    """`grown(config, tree)`: the levels of a tree that it grows. Deeper ones are copies, which cost nothing."""
    ends_early: bool = False
    """Whether each draft of a chain costs a pass, so that chains may end early (`infer/chains.py`)."""


class Training(NamedTuple):
    """What the trainer needs from a drafter that is trained on its target's features."""

    init_weights: Callable[..., Weights]
    """`init_weights(key, config)`: fresh weights."""
    unroll: Callable[..., Any]
    """As `models.unroll.unroll`: the states of many anchors at once."""


class PublishedKind(NamedTuple):
    """How drafters of this kind are read from the files of others (`published.py`)."""

    parse: Callable[..., Any]
    """`parse(published, target_config)`: the configuration that the files of a `Published` mean. Raises a ValueError of
    one line for what is not drafted."""
    init_weights: Callable[..., Weights]
    """`init_weights(key, config)`: fresh weights, whose names and shapes a file must have. They lack
    `draft_to_target`."""
    named: Callable[[str, Any], str]
    """`named(path, config)`: the name in the files of one of these weights, given by its dotted path."""
    by_column: tuple[str, ...] = ("head",)
    """The paths of weights with a row for each token that may be drafted."""


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
    published: PublishedKind | None = None
    """None: it is not read from the files of others."""
    lattice: Callable[..., Any] | None = None
    """`lattice(target_config, config, tree, models, state) -> (logits [B, D, C], inject, state)`, for drafters whose
    states read no drafted token: the arguments of `tree.token_free`. `inject` is None if drafted tokens add nothing to
    the logits. `lattice` is None if the drafter's states read drafted tokens."""
    products: tuple[str, ...] = ()
    """The names of its matrices that only products read (the last parts of their paths). They may be held in 8 bits."""
    takes_predictions: bool = False
    """Whether it drafts from a row's prediction of its text (`Drafter.predict`)."""
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


def planning_on_base(
    more_seconds: Callable[..., float], chains_nest: bool = True, grown: Callable[..., TreeConfig] = all_levels
) -> Planning:
    """The planning of a drafter with a base. `more_seconds` are seconds of drafting in addition to the base."""

    def of(config: Any) -> Planning:
        return method_of(config.base).planning

    def drafting_seconds(model: Any, config: Any, rows: int, tree: TreeConfig) -> float:
        own = of(config).drafting_seconds(model, config.base, rows, grown(config, tree))
        return own + more_seconds(model, config, rows, tree)

    return Planning(
        drafting_seconds,
        lambda config: of(config).default_tree(config.base),
        lambda config: of(config).max_depth(config.base),
        grows_wide=True,
        chains_nest=chains_nest,
        grown=grown,
    )


def check_tree(target_config: ModelConfig, config: DrafterConfig, tree: TreeConfig, scheme: DrawScheme) -> None:
    """Raises a ValueError if a trained drafter cannot draft such trees, or cannot draft for this target."""
    config.check_feature_layers(target_config.num_layers)
    check_depth(tree, config.num_steps)
    whole = "vocabulary" if config.reduced_vocab_size is None else "reduced draft vocabulary"
    check_shape(tree, scheme, config.draft_vocab_size, whole)


def check_depth(tree: TreeConfig, num_steps: int) -> None:
    """Raises a ValueError for a tree that is deeper than the drafter was trained for."""
    if tree.depth > num_steps:
        raise ValueError(f"TreeConfig.depth={tree.depth}: this drafter was trained for 1 to {num_steps} steps")


def check_shape(tree: TreeConfig, scheme: DrawScheme, draft_vocab_size: int, whole: str = "vocabulary") -> None:
    """Raises a ValueError for a tree without a layout, or with more children of a node than tokens to draft."""
    if scheme in DRAWN_SCHEMES:
        tree.level_widths()  # raises here, before anything compiles
    if tree.width > draft_vocab_size:
        asked = f"width={tree.width}" if tree.branching is None else f"branching={tree.branching}"
        raise ValueError(f"TreeConfig.{asked}: allowed are 1 to {draft_vocab_size}, the size of the {whole}")


def check_chain(tree: TreeConfig, who: str) -> None:
    """Raises a ValueError for a tree that is no chain."""
    if tree.width != 1:
        raise ValueError(f"TreeConfig.width={tree.width}: {who} chains, allowed is 1")


def check_vocabulary(config: ModelConfig, target_config: ModelConfig, what: str) -> None:
    """Raises a ValueError if a model that drafts has another vocabulary size than the target."""
    if config.vocab_size != target_config.vocab_size:
        raise ValueError(f"{what} has vocab_size={config.vocab_size}, the target {target_config.vocab_size}")
