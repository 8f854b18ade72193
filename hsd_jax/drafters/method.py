"""What the rest of the package asks of a kind of drafter. Read next: `table.py`, which has a row for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hsd_jax.config import NONE, TreeConfig
from hsd_jax.types import Drafter, Weights


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
    """What pictures show of a drafter's trees; no decode calls it."""

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


class Method(NamedTuple):
    """A kind of drafter. Its name is `config.kind`."""

    config: type
    """The frozen dataclass of what is static."""
    make: Callable[..., Drafter]
    """`make(target_config, config, tree, cache_dtype, scheme) -> Drafter`, and `reuse=` where `reuses` lists more
    than NONE. Raises a ValueError for trees that it cannot draft."""
    default_tree: Callable[[Any], TreeConfig]
    """`default_tree(config)`: for calls that neither ask for a tree nor let `planning/plan.py` choose."""
    max_depth: Callable[[Any], int]
    """`max_depth(config)`: the deepest chain worth trying."""
    drafting_seconds: Callable[..., float]
    """`drafting_seconds(costs, config, batch, tree)`, `costs` a `planning.costs.CostModel`."""
    grows_wide: bool = True
    """Whether trees with siblings are considered where nobody names one."""
    has_score: bool = True
    """Whether its trees carry how likely it takes each node to be accepted."""
    chains_nest: bool = True
    """Whether the beginning of one of its chains is its shorter chain."""
    ends_early: bool = False
    """Whether a chain costs it a pass a draft and may end early (`infer/chains.py`)."""
    reuses: tuple[str, ...] = (NONE,)
    """Forms of reuse of spare states (`config.REUSES`) that it can draft with."""
    init_weights: Callable[..., Weights] | None = None
    """`init_weights(key, config)`. None: it is not trained on its target's features."""
    unroll: Callable[..., Any] | None = None
    """As `models.unroll.unroll`: the states of many anchors at once, for training."""
    parse: Callable[[str], Any] | None = None
    """`parse(name)`: the configuration that a name like "lookup:4" stands for, None for any other; without weights."""
    load: Callable[..., tuple[Any, Weights] | None] | None = None
    """`load(checkpoint, target, dtype, placement, strict)`: a language model as a drafter for a `DraftedFor`, `strict`
    as in `hsd_jax.load`; None for one that it does not know."""
    distilled: Distilled | None = None
    """None: it is not trained by distillation."""
    token_information: TokenInformation | None = None
    lattice: Callable[..., Any] | None = None
    """`lattice(target_config, config, tree) -> levels`; `levels(models, state) -> (logits [B, D, C], inject, state)`:
    what `tree.token_free` grows from, for drafters whose states read no drafted token; `inject` is None where such
    tokens add nothing. None: they do."""
    stages: Callable[..., Any] | None = None
    """`stages(target_config, config, tree, scheme)`: the parts of drafting, for profiles. None: it is timed as a
    whole."""
    aged: Callable[..., Any] | None = None
    """`aged(models, target_config, config, num_states, state) -> (age -> state)`: states with spares of any age, for
    simulation. None: nothing is reused."""
    overlapped: Callable[..., Any] | None = None
    """`overlapped(target_config, config, tree, scheme, rule, mesh, drafter_mesh, cache_dtype, precision)`: a `Decoder`
    in which both models run at once, each on its own devices. None: one program runs both."""
    pictures: Callable[..., Pictures] | None = None
    """`pictures(target_config, config, tree, reuse)`. None: it knows no probabilities of its nodes."""
