"""Defines the pytrees and protocols that modules share, and the legend of dimensions. It holds no logic.

Legend of dimensions, for shapes and docstrings of the whole package. A dimension that is a word is explained where it
is used.
    B  rows of a batch           T  tokens of a buffer        P  tokens of padded prompts
    V  vocabulary                C  columns of a drafter's logits: the tokens that may be drafted
    N  nodes of a draft tree, padded, root included; or positions of any other pass of a model
    I  nodes that may have children, always the first I of the N
    D  maximum draft depth       w  nodes of one level of a growing tree, v of the level above
    K  trunk states of a round   M  nodes or positions of a call, if no other letter fits
    X  entries of this round that a node may see: those of earlier passes, then those of its own pass
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
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.axes import CACHE, ROWS, SLOTS, named

NO_PARENT = -1
"""Parent of the root and of padding nodes."""
NO_TOKEN = -1
"""Fills empty token slots, in results and in the list of end tokens."""
INVALID_TOKEN = -2
"""Ends a row if the target gave no distribution for its next token: NaN logits, or only -inf. It never occurs in
results."""

Weights = dict[str, Any]
"""Weights as a nested dict of arrays. All modules exchange weights in this form."""


class DrawScheme(enum.Enum):
    """How the children of a node were chosen, given the drafter's distribution at that node."""

    ARBITRARY = "arbitrary"
    """Any choice that is made before the target's draw: top-k, beams, merged trees."""
    INDEPENDENT = "independent"
    """Each child is drawn from the drafter's distribution independently of its siblings. Two siblings may be equal."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Each child is drawn from the drafter's distribution, renormalised without its earlier siblings."""
    TOP_THEN_RANDOM = "top_then_random"
    """All children but one are the drafter's likeliest tokens. One child is drawn from its distribution, renormalised
    without these tokens. It is the first among its siblings."""
    COUPLED = "coupled"
    """The children are the tokens with the largest log q + g. Here q is the drafter's distribution under the row's
    settings, and g is the same noise with which the target draws the token at that position. This is lossless only if
    the text is a function of g and the target, that is under `match`."""


DRAWN_SCHEMES = frozenset({DrawScheme.INDEPENDENT, DrawScheme.WITHOUT_REPLACEMENT, DrawScheme.TOP_THEN_RANDOM})
"""Schemes whose trees are drawn with noise of their own and carry `DraftTree.draft_logp`. The other schemes choose
children without noise of their own."""


@flax.struct.dataclass
class KVCache:
    """Keys and values of committed tokens.

    The index of a slot is the absolute position, modulo the number of slots in a ring. Each layer has its own buffer
    instead of a slice of one stacked array, because XLA on CPU copies a slice before a product.
    """

    keys: tuple[Float[Array, "B G S E"], ...] = flax.struct.field(metadata=named(*CACHE))
    values: tuple[Float[Array, "B G S E"], ...] = flax.struct.field(metadata=named(*CACHE))
    length: Int[Array, "B"]
    """The number of valid slots of each row. In the decode loop it is always the number of committed tokens - 1."""
    capacity: int = flax.struct.field(pytree_node=False, default=0)
    """The largest number of tokens of a row. Layers with fewer slots are rings (`models/cache.py`)."""


@flax.struct.dataclass
class NewKV:
    """Keys and values that one pass computed and that are not yet committed to a cache."""

    keys: tuple[Float[Array, "B G N E"], ...]
    values: tuple[Float[Array, "B G N E"], ...]


@flax.struct.dataclass
class ModelOutput:
    """The output of one pass of a target. The pass never writes to the cache that it reads."""

    logits: Float[Array, "B N V"]
    hidden: Float[Array, "B N H"]
    """Hidden states after the final norm, which the LM head reads."""
    features: tuple[Float[Array, "B N H"], ...]
    """The residual stream after each of the requested layers (`feature_layers`), in ascending order."""
    new_kv: NewKV


@flax.struct.dataclass
class DraftTree:
    """Padded draft trees, one per row. `parents[n] < n`. Siblings are in the order in which a rule judges them."""

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    depth: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    draft_logp: Float[Array, "B I V"] | None = None
    """The log-probabilities from which the children of each node were drawn. None unless the scheme is one of
    DRAWN_SCHEMES."""
    scheme: DrawScheme = flax.struct.field(pytree_node=False, default=DrawScheme.ARBITRARY)
    score: Float[Array, "B N"] | None = None
    """The log of the drafter's estimate that a node and all its ancestors are accepted. It is 0 for the root and
    falls along each path. None if the drafter gives no estimate."""
    tip: Bool[Array, "B N"] | None = None
    """Leaves that the rule judges and the target's pass leaves out, so there are no logits after them. A path that ends
    at such a leaf emits no token of the target after it. None: the tree has no such leaves."""


@flax.struct.dataclass
class Verdict:
    """What a rule decided about a tree: the accepted path, and the tokens that are emitted.

    `emitted[:, :num_accepted + 1]` holds the accepted draft tokens and then `next_token`. The rest has no meaning.
    """

    path: Int[Array, "B D+1"]
    num_accepted: Int[Array, "B"]
    emitted: Int[Array, "B D+1"]

    @property
    def next_token(self) -> Int[Array, "B"]:
        return jnp.take_along_axis(self.emitted, self.num_accepted[:, None], 1)[:, 0]


@flax.struct.dataclass
class Controls:
    """What changes the target's logits before temperature, per row (`infer/controls.py`), and what is told of them."""

    is_used: Bool[Array, "B"]
    """Rows whose logits change. Those of the others keep their bits."""
    bias: Float[Array, "B V"]
    """Added to the logits; -inf for single tokens that are forbidden."""
    bad_words: Int[Array, "B 64 8"]
    """Forbidden sequences of 2 to 8 tokens, right-aligned, padded with NO_TOKEN."""
    prompt: Bool[Array, "B V"]
    """Tokens of the prompt."""
    prompt_length: Int[Array, "B"]
    min_length: Int[Array, "B"]
    """The number of tokens, prompt included, before which no end token may come."""
    repetition: Float[Array, "B"]
    frequency: Float[Array, "B"]
    presence: Float[Array, "B"]
    min_p: Float[Array, "B"]
    num_logprobs: Int[Array, "B"]
    """How many of the likeliest tokens a row wants to know; -1: it wants no log-probabilities at all."""
    processed: Bool[Array, "B"]
    """Whether log-probabilities are those of the distribution from which the row draws."""


@flax.struct.dataclass
class SamplingParams:
    """Sampling settings per row. The arrays are traced, so a changed value compiles nothing.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch a filter off.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    all_greedy: bool = flax.struct.field(pytree_node=False, default=False)
    """True states that every temperature is 0, and the program then has no branch for draws. The field is static, so it
    is set only on devices where a branch costs more than a second program."""
    unfiltered: bool = flax.struct.field(pytree_node=False, default=False)
    """True states that no sampled row has top-k or top-p. The field is static, as `all_greedy` is."""
    controls: Controls | None = None
    """None: no row has any, and the program has no code for them."""


@flax.struct.dataclass
class Limits:
    """Where rows end. All fields are traced."""

    max_length: Int[Array, "B"]
    """The number of committed tokens at which a row stops, prompt included."""
    eos: Int[Array, "B num_eos"]
    """End tokens of each row, padded with NO_TOKEN."""


@flax.struct.dataclass
class DecodeStats:
    """Integer counts per row."""

    num_target_passes: Int[Array, "B"]
    accepted_histogram: Int[Array, "B D+1"]
    num_drafted: Int[Array, "B"]
    """The number of passes that verified at least one draft of the row."""


class Drafts(enum.IntEnum):
    """Whether rounds have drafts."""

    NEVER = 0
    IF_THEY_PAY = 1
    ALWAYS = 2


@flax.struct.dataclass
class Costs:
    """Predicted costs of passes on this machine, traced. `infer/adapt.py` decides by them which drafts pay."""

    pass_seconds: Float[Array, "B*N+1"]
    """Seconds to verify 0, 1, ... nodes of all rows together, without attention to the cache."""
    plain_seconds: Float[Array, "B+1"]
    """Seconds of a plain pass over 0, 1, ... rows."""
    draft_seconds: Float[Array, "B+1"]
    """Seconds to draft full trees for 0, 1, ... rows. This does not depend on how many of their nodes are verified."""
    slot_seconds: Float[Array, ""]
    """Seconds that the attention of one node takes for each cache slot that it sees."""
    windowed_share: Float[Array, ""]
    """The fraction of the layers that have a sliding window."""
    window: Float[Array, ""]
    """The largest number of slots that a layer with a sliding window sees."""
    first_trust: Float[Array, ""]
    """The assumed probability, before any draft was tried, that a draft of which the drafter is certain is accepted."""
    correction: Float[Array, ""]
    """How many times as long as predicted rounds with drafts take, compared with plain rounds: what a race has measured
    (`planning/race.py`). 1: nothing was measured."""
    drafts: Int[Array, "B+1"]
    """The `Drafts` of 0, 1, ... running rows."""
    level_seconds: Float[Array, "B+1"] | None = None
    """Seconds to draft one level for 0, 1, ... rows. None: chains grow to their full depth."""


@flax.struct.dataclass
class Control:
    """What a decode has measured of its drafts so far, one value per row.

    A row may leave a running batch or enter it (`adapt.after_admission`). The rows that are not done decide together
    whether drafts pay. The first four fields are sums over rounds that decay exponentially: each round multiplies them
    by `adapt.DECAY` before it adds its own numbers. A row that is done keeps its numbers.
    """

    accepted: Float[Array, "B"]
    """The number of accepted drafts."""
    predicted: Float[Array, "B"]
    """The number of accepted drafts that the drafter expected: the sum of its own probabilities, each given the parent,
    over the drafts whose parent was accepted."""
    tokens: Float[Array, "B"]
    """The number of tokens that rounds with drafts committed."""
    plain: Float[Array, "B"]
    """The number of tokens that plain rounds would have given in the time that `Costs` predicts for these rounds.
    Unlike seconds, this number compares rounds of many rows with rounds of few rows."""
    rounds: Int[Array, "B"]
    """The number of rounds with drafts since drafting was last stopped. It does not decay. This field and the next two
    are the same in all rows that are not done."""
    wait: Int[Array, "B"]
    """The number of plain rounds before drafts are tried again. 0: rounds have drafts."""
    backoff: Int[Array, "B"]
    """The next `wait` if drafts do not pay, in blocks of D + 1 plain rounds."""
    drafts: Int[Array, "B 2"] | None = None
    """The number of drafts made, and of those verified. Neither decays. None unless chains may end early."""


@flax.struct.dataclass
class Logprobs:
    """Log-probabilities of the tokens of a row's text. Those of the prompt have no meaning."""

    chosen: Float[Array, "B T"] = flax.struct.field(metadata=named(ROWS, SLOTS))
    """That of each token."""
    tokens: Int[Array, "B T _"] = flax.struct.field(metadata=named(ROWS, SLOTS, None))
    """The likeliest tokens in its place, likeliest first."""
    values: Float[Array, "B T _"] = flax.struct.field(metadata=named(ROWS, SLOTS, None))


@flax.struct.dataclass
class Controlled:
    """What the decode of a program with `Controls` remembers of each row."""

    counts: Int[Array, "B V"]
    """How often each token is among the new ones."""
    logprobs: Logprobs


@flax.struct.dataclass
class DecodeState:
    """The carry of the decode loop. The first axis of every array is rows, also in the drafter's own state."""

    tokens: Int[Array, "B T"] = flax.struct.field(metadata=named(ROWS, SLOTS))
    length: Int[Array, "B"]
    done: Bool[Array, "B"]
    cache: KVCache
    drafter: Any
    keys: jax.Array
    """One typed random key per row. It is folded with the absolute position and never consumed."""
    stats: DecodeStats
    control: Control | None = None
    """None if all nodes of the tree are verified in every round."""
    controlled: Controlled | None = None
    """None unless the settings of sampling have `controls`."""


Processor = Callable[[Any, Any, Any, Any], Any]
"""`f(logits [B, N, V], tokens [B, T], length [B], path [B, N, D]) -> logits` (`settings.Processing`)."""


@flax.struct.dataclass
class Past:
    """What is known of each row when the logits of a round are changed."""

    tokens: Int[Array, "B T"]
    length: Int[Array, "B"]
    counts: Int[Array, "B V"]
    eos: Int[Array, "B num_eos"]
    process: Processor | None = flax.struct.field(pytree_node=False, default=None)
    """The caller's function of the logits."""


@flax.struct.dataclass
class Stop:
    """The condition under which a chain ends before its full depth, traced (`infer/chains.py`)."""

    log_trust: Float[Array, "B"]
    """The log of the acceptance probability of a draft of which the drafter is certain."""
    price: Float[Array, ""]
    """The price of a further level, a number of tokens: its seconds times the tokens per second so far. The level must
    promise as many accepted drafts, over all rows."""


@flax.struct.dataclass
class RoundInputs:
    """The inputs of a drafter in a round."""

    root: Int[Array, "B"]
    """The last committed token of each row."""
    position: Int[Array, "B"]
    """Its absolute position."""
    keys: jax.Array
    """The keys of the rows. A drafter draws with `sampling.place_keys` and never with these keys directly."""
    sampling: SamplingParams
    noise: Float[Array, "B M V"]
    """The target's own noise at the next positions (`sampling.round_noise`). Only COUPLED drafts may use it."""
    live: Bool[Array, "B"]
    """Rows that are not done. Drafts of other rows have no meaning."""
    stop: Stop | None = None
    """None: chains grow to their full depth."""
    past: Past | None = None
    """What the rows' `Controls` read, so that drafts are made for the same distribution. None: they are not applied."""


class Candidates(NamedTuple):
    """The drafter's logits for the children of a level's nodes, and the tokens of their columns."""

    logits: Float[Array, "B w C"]
    tokens: Int[Array, "C"] | Int[Array, "B w C"] | None = None
    """The token of each column, for all nodes or for each node. Tokens ascend, because trees take the first column on a
    tie. None: column c is token c."""


Inject = Callable[[Int[Array, "B w"], Any], tuple[Float[Array, "B w C"], Any]]
"""`inject(tokens, above) -> (added, read)`: `added` is what drafted tokens add to the base logits after them.

`read` [B, w, ...] belongs to the drafter. Each child gets its parent's entry as `above`. At the root `above` is None.
"""
Expand = Callable[[Any, Int[Array, "B w"], Int[Array, "B w"], Any], tuple[Candidates, Any]]
"""`expand(level, tokens, parents, carry) -> (candidates, carry)`: the drafter's logits after the nodes of a level.

A tree drafts only tokens of these columns, and its cost depends on their number. `expand` is called once per level,
from the root (level 0) down. `parents` are the indices of the nodes' parents among the nodes of the previous call, 0
for the root. `carry` belongs to the drafter, for example the keys and values of the nodes so far. If a chain may end
early, `level` is traced from 1 on, and the shapes of the carry stay the same.
"""


class Drafter(NamedTuple):
    """A drafter as pure functions.

    `models` holds the weights of both models, "target" and "drafter". `state` is the drafter's own pytree. No other
    code reads its fields.
    """

    init: Callable[..., Any]
    """`init(tokens, length, capacity) -> state`, before the prompts [B, P] are read."""
    read: Callable[..., Any]
    """`read(models, state, output, tokens, following, start, length) -> state`: reads a chunk of the prompts. `tokens`
    [B, chunk] begin at position `start`, `following` are the tokens after each, and `output` is the target's output
    for them. Chunks come in order."""
    draft: Callable[..., tuple[DraftTree, Any]]
    """`draft(models, state, inputs: RoundInputs) -> (tree, state)`."""
    commit: Callable[..., Any]
    """`commit(models, state, verdict, output, num_committed) -> state`. A row that committed no token gets its old
    state back, also after `follow`."""
    scheme: DrawScheme
    max_depth: int
    feature_layers: tuple[int, ...] = ()
    """Inner layers of the target whose residual streams `read`, `commit` and `follow` find in
    `ModelOutput.features`."""
    lookahead: int = 0
    """The number of slots after the committed tokens that a round may write in the drafter's own cache, if it exceeds
    `max_depth`."""
    ready: Callable[..., Any] | None = None
    """`ready(models, state) -> state`, called whenever the prefill has read a part of the prompt. What it adds to the
    state is used for drafting and not by further calls of `read`. None: nothing is left to do."""
    follow: Callable[..., Any] | None = None
    """`follow(models, state, verdict, output, num_committed) -> state`, called after up to max_depth + 1 plain passes
    without drafts. The path of the verdict lists the nodes of these passes in order. None: the drafter must draft in
    every round."""
    reads_on: bool = True
    """Whether `read` may begin at any chunk, if only the `KVCache`s of the state hold the tokens before it."""
    drafts_ahead: bool = False
    """Whether a round drafts tokens that later rounds verify. Rules that judge jointly cannot judge such drafts."""
    counts: Callable[[Any], dict[str, Int[Array, "B"]]] | None = None
    """`counts(state)`: the drafter's own counts of every row, by name, for statistics. None: it counts nothing."""
    predict: Callable[..., Any] | None = None
    """`predict(state, tokens [B, Q], length [B]) -> state`: gives each row a prediction of its text, of no tokens if it
    has none. A state that has predictions keeps them, with room for Q tokens each. None: it reads no predictions."""

    @property
    def most_written(self) -> int:
        """The number of slots after the committed tokens that a round may write, in any cache."""
        return max(self.max_depth, self.lookahead)


class AcceptRule(NamedTuple):
    """A rule that judges trees, and the draw schemes for which it is lossless."""

    name: str
    schemes: frozenset[DrawScheme]
    judge: Callable[..., Verdict]
    """`judge(keys [B], tree, logits [B, N, V], sampling, root_position [B], noise [B, D + 1, V]) -> Verdict`. The noise
    is that of `sampling.round_noise`."""
    emits_argmax: bool = False
    """Whether every token it emits comes from `ops.argmax`, which on a mesh itself returns INVALID_TOKEN."""
    judges_jointly: bool = False
    """Whether its verdict on a draft depends on later drafts of the path. Noise after a rejection was then used, so the
    keys of drafts and coins depend on the round and not only on the position (`sampling.place_keys`)."""
