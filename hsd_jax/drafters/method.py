"""What the rest of the package asks of a kind of drafter. Read next: `table.py`, which has a row for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hsd_jax.config import NONE, DrafterConfig, TreeConfig
from hsd_jax.types import Drafter, Weights

CHEAP_OPERATIONS = 20
"""Small operations that a round of a drafter takes which has no model to run."""


class TokenInformation(NamedTuple):
    """What a drafter adds to the logits of token-free states, as functions of its weights and configuration."""

    inject: Callable[..., Any]
    """`inject(weights, config, tokens, above) -> (bias, above)`: after each token, node by node of a tree."""
    read_paths: Callable[..., Any]
    """`read_paths(weights, config, paths [..., K]) -> [..., K, r]`: of whole paths at once."""
    bias: Callable[..., Any]
    """`bias(weights, config, read [..., r]) -> [..., C]`."""
    begin_from: Callable[..., Weights]
    """`begin_from(weights, embedding [V, H]) -> weights`: fresh ones that know the target's embeddings."""


class Pictures(NamedTuple):
    """What pictures show of a drafter's trees."""

    node_logp: Callable[..., Any] | None = None
    """`node_logp(models, state, tree, sampling) -> [B, N]`: the drafter's log-probability of each node given its
    parent, without the noise of COUPLED trees; 0 for the root. Of trees that grew from `state` and were not drawn."""
    node_origins: Callable[..., Any] | None = None
    """`node_origins(state, tree) -> Origins` (`drafters/hidden/reuse.py`): which nodes of such a tree reuse what
    earlier rounds left over. None: nothing is reused."""


class Distilled(NamedTuple):
    """How a language model is trained to draft, as functions of its configuration in that role."""

    config_of: Callable[..., Any]
    """`config_of(model, target_config, target_hash, steering_layers, num_steps)`: of a language model in this role.
    Raises a ValueError for layers that the target lacks, or others than steer it already."""
    logits: Callable[..., Any]
    """`logits(weights, config, tokens, output, key=None, starts=None, remat=False) -> [B, T, V]`: what it says behind
    each token, given what the target says of them all. Consumes the key, None: as for the first draft of a round."""
    added: Callable[..., Weights] = lambda key, config: {}
    """`added(key, config)`: fresh weights of the parts that a language model lacks."""
    save_added: Callable[..., None] = lambda folder, config, weights: None
    """`save_added(folder, config, weights)`: writes these parts beside the model."""
    is_steered: bool = False
    """Whether it reads its target's states, so that it writes no text alone and drafts no further than it learned."""


class Planning(NamedTuple):
    """What is asked of a drafter to choose its tree. The defaults are those of chains that cost next to nothing."""

    drafting_seconds: Callable[..., float] = lambda costs, config, batch, tree: (
        CHEAP_OPERATIONS * costs.rates.operation_seconds
    )
    """`drafting_seconds(costs, config, batch, tree)`, `costs` a `planning.costs.CostModel`."""
    default_tree: Callable[[Any], TreeConfig] = lambda config: TreeConfig.chain(7)
    """`default_tree(config)`: for calls that neither ask for a tree nor let `planning/plan.py` choose."""
    max_depth: Callable[[Any], int] = lambda config: 15
    """`max_depth(config)`: the deepest chain worth trying."""
    grows_wide: bool = False
    """Whether trees with siblings are considered where nobody names one."""
    has_score: bool = True
    """Whether its trees carry how likely it takes each node to be accepted."""
    chains_nest: bool = True
    """Whether the beginning of one of its chains is its shorter chain."""
    ends_early: bool = False
    """Whether a chain costs it a pass a draft and may end early (`infer/chains.py`)."""


class Training(NamedTuple):
    """What the trainer asks of a drafter that is trained on its target's features."""

    init_weights: Callable[..., Weights]
    """`init_weights(key, config)`."""
    unroll: Callable[..., Any]
    """As `models.unroll.unroll`: the states of many anchors at once."""


class Inspection(NamedTuple):
    """What profiles, simulation and pictures ask of a drafter; no decode does."""

    stages: Callable[..., Any] | None = None
    """`stages(target_config, config, tree, scheme)`: the parts of drafting. None: it is timed as a whole."""
    aged: Callable[..., Any] | None = None
    """`aged(models, target_config, config, num_states, state) -> (age -> state)`: states with spares of any age. None:
    nothing is reused."""
    pictures: Callable[..., Pictures] | None = None
    """`pictures(target_config, config, tree, reuse)`. None: it knows no probabilities of its nodes."""


class DraftingMethod(NamedTuple):
    """A kind of drafter. Its name is `config.kind`."""

    config: type
    """The frozen dataclass of what is static."""
    make: Callable[..., Drafter]
    """`make(target_config, config, tree, cache_dtype, scheme) -> Drafter`, and `reuse=` where `reuses` lists more
    than NONE. Raises a ValueError for trees that it cannot draft."""
    planning: Planning = Planning()
    training: Training | None = None
    """None: it is not trained on its target's features."""
    inspection: Inspection = Inspection()
    parse: Callable[[str], Any] | None = None
    """`parse(name)`: the configuration that a name like "lookup:4" stands for, None for any other; without weights."""
    load: Callable[..., tuple[Any, Weights] | None] | None = None
    """`load(checkpoint, target, dtype, placement, strict)`: a language model as a drafter for a `DraftedFor`, `strict`
    as in `hsd_jax.load`; None for one that it does not know."""
    distilled: Distilled | None = None
    """None: it is not trained by distillation."""
    is_language_model: bool = False
    """Whether it is a language model and nothing else: it can write alone, draft ahead, and be drafted for."""
    has_weights_of_base: bool = False
    """Whether its weights are those of the drafter `config.base`, and nothing else."""
    token_information: TokenInformation | None = None
    reuses: tuple[str, ...] = (NONE,)
    """Forms of reuse of spare states (`config.REUSES`) that it can draft with."""
    lattice: Callable[..., Any] | None = None
    """`lattice(target_config, config, tree) -> levels`; `levels(models, state) -> (logits [B, D, C], inject, state)`:
    what `tree.token_free` grows from, for drafters whose states read no drafted token; `inject` is None where such
    tokens add nothing. None: they do."""
    overlapped: Callable[..., Any] | None = None
    """`overlapped(target_config, config, tree, scheme, rule, mesh, drafter_mesh, cache_dtype, precision)`: a `Decoder`
    in which both models run at once, each on its own devices. None: one program runs both."""


def planning_of_trained(drafting_seconds: Callable[..., float], has_score: bool = True) -> Planning:
    """Of a drafter that is trained for so many steps: a chain as long, of at most 8 nodes, where nobody chose."""

    def default_tree(config: DrafterConfig) -> TreeConfig:
        return TreeConfig.chain(min(7, config.num_steps))

    return Planning(drafting_seconds, default_tree, lambda config: config.num_steps, True, has_score)
