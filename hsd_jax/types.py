"""Every pytree and protocol that crosses a module border, and the dimension legend; no logic.

Read next: `infer/step.py`, where these types meet, and `config.py` for the static configuration.

Dimension legend, for shapes and docstrings of the whole package; one that is a word is explained where it is used
    B  rows of a batch           T  tokens of a buffer        P  tokens of padded prompts
    V  vocabulary                C  columns of a drafter's logits: the tokens that may be drafted
    N  nodes of a draft tree, padded, root included; or of any other pass of a model
    I  those that may have children, always the first I of the N
    D  maximum draft depth       w  nodes of one level of a growing tree, v of the level above
    K  trunk states of a round   M  nodes or positions of a call, where none of the others says how many
    X  entries of this round that a node may see: those of earlier passes, then those of its own
    S  cache slots               n  queries of a key/value head: N times the query heads that share it
    G  key/value heads           Q  query heads               E  head width
    H  hidden width              F  width of an MLP           L  layers
    r  rank of token information A  anchors of a row in training
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.axes import CACHE, ROWS, SLOTS, named

NO_PARENT = -1
"""Parent of the root and of padding nodes."""
NO_TOKEN = -1
"""Fills token slots that hold nothing, in results and in the list of end tokens."""
INVALID_TOKEN = -2
"""Ends a row in place of a token for which the target gave no distribution: NaN logits, or -inf alone. Never in
results."""

Weights = dict[str, Any]
"""Weights as a nested dict of arrays, the form every boundary of the library uses."""


class DrawScheme(enum.Enum):
    """How the children of a node were chosen, given the drafter's distribution at that node."""

    ARBITRARY = "arbitrary"
    """Any choice made before the target's draw: top-k, beams, merged trees."""
    INDEPENDENT = "independent"
    """Each child drawn from the drafter's distribution, whatever its siblings are: two may be alike."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Each child drawn from the drafter's distribution renormalised off its earlier siblings."""
    TOP_THEN_RANDOM = "top_then_random"
    """All but one of the children are the drafter's likeliest tokens; one is drawn from its distribution renormalised
    off these, and stands first among its siblings."""
    COUPLED = "coupled"
    """The largest of log q + g: q the drafter's distribution under the row's settings, g the very noise with which the
    target picks the token at that position. Lossless only where the text is a function of g and the target: under
    `match`."""


DRAWN_SCHEMES = frozenset({DrawScheme.INDEPENDENT, DrawScheme.WITHOUT_REPLACEMENT, DrawScheme.TOP_THEN_RANDOM})
"""Schemes whose trees are drawn with noise of their own and carry `DraftTree.draft_logp`; the others grow
beams."""


@flax.struct.dataclass
class KVCache:
    """Keys and values of committed tokens. Slot index equals absolute position, in a ring modulo its slots.

    One buffer a layer and not one stacked array: XLA on CPU copies a slice before a product.
    """

    keys: tuple[Float[Array, "B G S E"], ...] = flax.struct.field(metadata=named(*CACHE))
    values: tuple[Float[Array, "B G S E"], ...] = flax.struct.field(metadata=named(*CACHE))
    length: Int[Array, "B"] = flax.struct.field(metadata=named(ROWS))
    """Valid slots of each row. Invariant of the decode loop: committed tokens - 1."""
    capacity: int = flax.struct.field(pytree_node=False, default=0)
    """Tokens that a row may have. Layers with fewer slots are rings (`models/cache.py`)."""


@flax.struct.dataclass
class NewKV:
    """Keys and values computed by one pass, not yet committed to a cache."""

    keys: tuple[Float[Array, "B G N E"], ...]
    values: tuple[Float[Array, "B G N E"], ...]


@flax.struct.dataclass
class ModelOutput:
    """What one pass of a target returns; the pass never writes to the cache it reads."""

    logits: Float[Array, "B N V"]
    hidden: Float[Array, "B N H"]
    """After the final norm: what the LM head reads."""
    features: tuple[Float[Array, "B N H"], ...]
    """Residual stream after each layer that was asked for (`aux_layers`), in ascending order."""
    new_kv: NewKV


@flax.struct.dataclass
class DraftTree:
    """Padded draft trees, one a row. `parents[n] < n`; siblings are in the order in which a rule tries them."""

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    depth: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    draft_logp: Float[Array, "B I V"] | None = None
    """Log-probabilities the children of each node were drawn from; None unless the scheme is one of
    DRAWN_SCHEMES."""
    scheme: DrawScheme = flax.struct.field(pytree_node=False, default=DrawScheme.ARBITRARY)
    score: Float[Array, "B N"] | None = None
    """Log of how likely the drafter takes each node to be accepted, all its ancestors with it; 0 for the root. Falls
    along paths. None where the drafter has no opinion."""
    tip: Bool[Array, "B N"] | None = None
    """Leaves that are judged but not verified: the target has no row for them, so a path that ends there emits no token
    of the target's behind it. None: there are none."""


@flax.struct.dataclass
class Verdict:
    """The outcome of one verification.

    `emitted[:, :num_accepted + 1]` are the accepted draft tokens followed by `next_token`; what follows
    is meaningless.
    """

    path: Int[Array, "B D+1"]
    num_accepted: Int[Array, "B"]
    next_token: Int[Array, "B"]
    emitted: Int[Array, "B D+1"]


@flax.struct.dataclass
class SamplingParams:
    """Per-row sampling settings, all traced: changing one never compiles anything.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch a filter off.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    all_greedy: bool = flax.struct.field(pytree_node=False, default=False)
    """Promises that every temperature is 0: the program then has no branch for draws. Static, so only for devices where
    a branch costs more than a second program."""


@flax.struct.dataclass
class Limits:
    """Where rows end, all traced."""

    max_length: Int[Array, "B"]
    """Committed tokens at which a row stops, prompt included."""
    eos: Int[Array, "B num_eos"]
    """End tokens of each row, padded with NO_TOKEN."""


@flax.struct.dataclass
class DecodeStats:
    """Counts per row, in integers."""

    num_target_passes: Int[Array, "B"]
    accepted_histogram: Int[Array, "B D+1"]
    num_drafted: Int[Array, "B"]
    """Passes that verified at least one draft of the row."""


@flax.struct.dataclass
class Costs:
    """What passes should cost on this machine, traced: `infer/worth.py` weighs drafts by it."""

    pass_seconds: Float[Array, "B*N+1"]
    """Seconds to verify 0, 1, ... nodes, all rows of the batch together, without attention to the cache."""
    plain_seconds: Float[Array, "B+1"]
    """Seconds of a plain pass over 0, 1, ... rows."""
    draft_seconds: Float[Array, "B+1"]
    """Seconds to draft full trees for 0, 1, ... rows, however many of their nodes are verified."""
    slot_seconds: Float[Array, ""]
    """Seconds that the attention of one node takes for each cache slot it sees."""
    window: Float[Array, ""]
    """Slots that layers with a sliding window see at most."""
    windowed_share: Float[Array, ""]
    """The fraction of the layers that have a sliding window."""
    first_trust: Float[Array, ""]
    """The chance that a draft of which the drafter is certain is accepted, before any was tried."""
    level_seconds: Float[Array, "B+1"] | None = None
    """Seconds to draft one level for 0, 1, ... rows; None: chains grow to their full depth."""
    worth_trying: Bool[Array, "B+1"] | None = None
    """Whether 0, 1, ... rows that go on should draft at all, by the plans of greedy batches; None: always."""


@flax.struct.dataclass
class Control:
    """What a decode has learned about its drafts, in sums over the rounds so far: each row its own share.

    A row may leave a running batch, or enter it (`worth.joined`); whether drafts pay is decided by the rows that are
    not done, together. The first four decay exponentially: each round multiplies them by `worth.MEMORY` before its own
    numbers are added. A row that is done keeps its numbers.
    """

    accepted: Float[Array, "B"]
    """Drafts that were accepted."""
    predicted: Float[Array, "B"]
    """How many the drafter expected: the sum of its own probabilities of the drafts that were tried."""
    tokens: Float[Array, "B"]
    """Tokens that rounds with drafts committed."""
    plain: Float[Array, "B"]
    """Tokens that plain rounds would have given in the time that `Costs` predicts for these rounds. Unlike seconds,
    this number compares rounds of many rows with rounds of few."""
    rounds: Int[Array, "B"]
    """Rounds with drafts since these were last given up; does not decay. This and what follows is the same in all rows
    that are not done."""
    wait: Int[Array, "B"]
    """Plain rounds before drafts are tried again; 0: rounds have drafts."""
    backoff: Int[Array, "B"]
    """The next `wait` if drafts do not pay, in blocks of D + 1 plain rounds."""
    drafts: Int[Array, "B 2"] | None = None
    """Drafts that were made, and those verified; none of them decays. None unless chains may end early."""


@flax.struct.dataclass
class DecodeState:
    """The carry of the decode loop. Every array of it, the drafter's own included, has rows as its first axis: so a row
    can come and go (`infer/rows.py`)."""

    tokens: Int[Array, "B T"] = flax.struct.field(metadata=named(ROWS, SLOTS))
    length: Int[Array, "B"]
    done: Bool[Array, "B"]
    cache: KVCache
    drafter: Any
    keys: jax.Array
    """One typed random key a row; folded with the absolute position, never consumed."""
    stats: DecodeStats
    control: Control | None = None
    """None where the tree was asked for: it is then verified whole in every round."""


@flax.struct.dataclass
class Stop:
    """When a chain ends before its full depth, traced: `infer/chains.py`."""

    log_trust: Float[Array, "B"]
    """Log of what an edge is worth that the drafter is sure of."""
    live: Bool[Array, "B"]
    """Rows that go on."""
    price: Float[Array, ""]
    """Accepted drafts, all rows together, that a further level must promise."""


@flax.struct.dataclass
class RoundInputs:
    """What a round starts from, for drafters."""

    root: Int[Array, "B"]
    """The last committed token of each row."""
    position: Int[Array, "B"]
    """Its absolute position."""
    keys: jax.Array
    """The row keys; what a drafter draws, it draws with `sampling.place_keys`, never with these themselves."""
    sampling: SamplingParams
    noise: Float[Array, "B M V"] | None = None
    """The target's own noise at the next positions, `sampling.round_noise`: COUPLED drafts alone read it, and compute
    it where it is None."""
    stop: Stop | None = None
    """None: chains grow to their full depth."""
    live: Bool[Array, "B"] | None = None
    """Rows that go on; what is drafted for the others has no meaning. None: all."""


class Candidates(NamedTuple):
    """What a drafter says after the nodes of a level, and of which tokens."""

    logits: Float[Array, "B w C"]
    tokens: Int[Array, "C"] | Int[Array, "B w C"] | None
    """The token of each column, of all nodes or of each, ascending: of equals trees take the first. None: columns are
    tokens."""


Inject = Callable[[Int[Array, "B w"], Any], tuple[Float[Array, "B w C"], Any]]
"""`inject(tokens, above) -> (added, read)`: what drafted tokens add to the base logits after them.

`read` [B, w, ...] is the proposer's own, handed on to the children as `above`, one a child; None at the root.
"""
Expand = Callable[[int, Int[Array, "B w"], Int[Array, "B w"], Any], tuple[Float[Array, "B w C"] | Candidates, Any]]
"""`expand(level, tokens, parents, carry) -> (logits, carry)`: what the drafter says after the nodes of a level.

Logits alone are of the tokens that may be drafted. `Candidates` say of which tokens they are; a tree costs what these
cost, and its beam drafts no others.
Called once a level, from the root (level 0) down. `parents` are the places of the nodes' parents among the nodes of the
call before, 0 for the root; `carry` is the drafter's own, for example the keys and values of the nodes so far. Where a
chain may end early, `level` is traced from 1 on, and the carry keeps its shapes.
"""
ExpandNamed = Callable[[Any, Int[Array, "B w"], Int[Array, "B w"], Any], tuple[Candidates, Any]]
"""An `Expand` that always says of which tokens its logits are: `tree.named`."""


class Drafter(NamedTuple):
    """A proposer as pure functions.

    `models` holds the weights of both models, "target" and "drafter"; `state` is the drafter's own pytree and opaque to
    everybody else.
    """

    init: Callable[..., Any]
    """`init(tokens, length, capacity) -> state`, before any of the prompts [B, P] is read."""
    read: Callable[..., Any]
    """`read(models, state, output, tokens, following, start, length) -> state`: a chunk of the prompt's tokens
    [B, chunk] from position `start` on, the token after each, and what the target said of them. Chunks come in order.
    """
    draft: Callable[..., tuple[DraftTree, Any]]
    """`draft(models, state, inputs: RoundInputs) -> (tree, state)`."""
    commit: Callable[..., Any]
    """`commit(models, state, verdict, output, num_committed) -> state`."""
    resize: Callable[..., Any]
    """`resize(state, capacity) -> state`, when the decode loop moves to a larger cache."""
    scheme: DrawScheme
    max_depth: int
    aux_layers: tuple[int, ...] = ()
    """Layers whose residual streams `read`, `commit` and `follow` find in `ModelOutput.features`."""
    lookahead: int = 0
    """Slots after the committed tokens that a round may write in the drafter's own cache, if more than `max_depth`."""
    ready: Callable[..., Any] | None = None
    """`ready(models, state) -> state`, whenever prefill has read some of the prompt; what it adds to the state
    counts for drafting, not for reading on. None: nothing is left to do."""
    follow: Callable[..., Any] | None = None
    """`follow(models, state, verdict, output, num_committed) -> state`: after up to max_depth + 1 plain passes, for
    which nothing was drafted; the verdict's path are their nodes in order. Rows that committed none keep their state.
    None: the drafter must draft in every round."""
    drafts_ahead: bool = False
    """Whether a round drafts what later rounds verify: rules that look ahead cannot judge such drafts."""
    counts: Callable[[Any], dict[str, Int[Array, "B"]]] | None = None
    """`counts(state)`: what it has counted of its own for every row, by name, for statistics. None: nothing."""


class AcceptRule(NamedTuple):
    """A judge of trees, and the draw schemes for which it is lossless."""

    name: str
    schemes: frozenset[DrawScheme]
    verify: Callable[..., Verdict]
    """`verify(keys, tree, ancestors, logits, sampling, root_position, noise=None) -> Verdict`; `noise` is that of
    `sampling.round_noise` for one position more than the tree is deep, computed where it is None and needed."""
    draws: bool = False
    """Whether every token it emits is an `ops.argmax`, which on a mesh says itself where there is none."""
    looks_ahead: bool = False
    """Whether its verdict on a draft depends on drafts behind it. Noise behind a rejection then was used, so drafts and
    coins are keyed by the round and not by position alone (`sampling.place_keys`)."""
