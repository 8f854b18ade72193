"""Which drafts are worth a check, and whether drafting is: decided inside the loop, from what passes cost here.

A plan (`hsd_jax/plan.py`) gives the largest tree of a call. Of the tree that a drafter grew, the rows of a batch verify
the nodes that promise more tokens a second than they cost; where drafting as a whole does not pay, the loop decodes
plainly for a while and tries again later. Neither changes a text under `match`, which is lossless for any tree chosen
before the target's draw, nor compiles anything. Read first: `step.py`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.types import DRAWN_SCHEMES, Control, Costs, DraftTree, Stop, Verdict

MEMORY = 0.97
"""What a round leaves of the weight of those before it, in every average."""
PRIOR = 4.0
"""Predicted tokens that a row's first estimate counts for."""
DOUBT = 0.6
"""The tokens of rounds are a sample: drafts are kept until they fall behind plain decoding by this share, divided by
the root of the rounds remembered, counted a row."""
DISCOUNT, FEW_NODES = 0.6, 16
"""The price of a node is lowered by the fraction DISCOUNT where all trees of the batch have at most FEW_NODES nodes
together, and by DISCOUNT * FEW_NODES / nodes where they have more. The kernels take rows in tiles, so to leave out the
last nodes of a tile saves no time, but loses their tokens."""
FEWEST_ROUNDS = 6
"""Rounds with drafts before their speed is judged."""
FIRST_WAIT, LONGEST_WAIT = 2, 32
"""Blocks of plain rounds after drafts that did not pay; twice as many each time."""
FREE_DEPTH = 3
"""Drafts of a row whose attention costs nothing: the kernel's vectors hold the queries of a few nodes at once."""


def first_control(batch: int, counts_drafts: bool = False) -> Control:
    """Nothing is known of any row.

    Args:
      counts_drafts: where chains may end early.
    """
    rows, zero = jnp.zeros(batch), jnp.zeros(())
    count = jnp.zeros((), jnp.int32)
    drafts = jnp.zeros((batch, 2), jnp.int32) if counts_drafts else None
    return Control(rows, rows, zero, zero, count, count, count + FIRST_WAIT, drafts)


def trust(control: Control, costs: Costs) -> Float[Array, "B"]:
    """What an edge of each row is worth that the drafter is sure of, by how its edges fared so far."""
    return (control.accepted + PRIOR * costs.first_trust) / (control.predicted + PRIOR)


def log_trust(control: Control, costs: Costs) -> Float[Array, "B"]:
    """The log of `trust`, which no edge lets rise above 1."""
    return jnp.log(jnp.clip(trust(control, costs), 1e-3, 1.0))


def stop_rule(
    control: Control, costs: Costs, num_nodes: int, length: Int[Array, "B"], done: Bool[Array, "B"]
) -> Stop | None:
    """When chains end early: a further level costs a pass of the drafter and a node a row, and must promise as many
    tokens as the rounds so far gave in that time. None: they do not.

    Args:
      num_nodes: of a whole tree, root included.
      length: committed tokens.
    """
    if costs.level_seconds is None:
        return None
    node = _node_seconds(costs, len(done), num_nodes) * jnp.sum(~done).astype(jnp.float32)
    price = tokens_a_second(control, costs, length, done) * (costs.level_seconds + node)
    return Stop(log_trust(control, costs), ~done, price)


def tokens_a_second(
    control: Control, costs: Costs, length: Int[Array, "B"], done: Bool[Array, "B"]
) -> Float[Array, ""]:
    """Of the rounds so far, as if one more was plain."""
    num_live = jnp.sum(~done).astype(jnp.float32)
    return (control.tokens + num_live) / (control.seconds + plain_seconds(costs, length, done))


def _node_seconds(costs: Costs, batch: int, num_nodes: int) -> Float[Array, ""]:
    return (costs.pass_seconds[-1] - costs.pass_seconds[batch]) / (batch * num_nodes - batch)


def survival(tree: DraftTree, control: Control, costs: Costs) -> Float[Array, "B N"]:
    """How likely each node is to be accepted; 1 for roots, 0 for nodes that are not valid.

    The drafter's own estimate, corrected for every edge by how a row's edges fared so far.
    """
    score = jnp.zeros(tree.tokens.shape) if tree.score is None else tree.score
    of_edges = tree.depth.astype(jnp.float32) * log_trust(control, costs)[:, None]
    likely = jnp.exp(jnp.fmin(score, 0.0) + of_edges)
    return jnp.where(tree.valid, jnp.where(tree.depth == 0, 1.0, likely), 0.0)


def choose(
    tree: DraftTree, control: Control, costs: Costs, length: Int[Array, "B"], done: Bool[Array, "B"]
) -> tuple[Bool[Array, "B N"], Float[Array, ""]]:
    """The nodes to verify, and the seconds that this should take.

    A node is kept if the probability that it is accepted is at least its price: the seconds that it takes, times the
    tokens per second of the rounds so far. A ratio of tokens to seconds rises by what is added at a higher ratio
    (Dinkelbach 1967), so from round to round the choice approaches the best one. A node is never likelier than its
    parent, nor cheaper, so the nodes that are kept are closed under ancestors.

    Args:
      length: committed tokens.
    """
    rate, node = tokens_a_second(control, costs, length, done), _node_seconds(costs, *tree.tokens.shape)
    reading = costs.slot_seconds * slots_seen(costs, length)
    attention = jnp.where(tree.depth > FREE_DEPTH, reading[:, None], 0.0)
    share = 1 - DISCOUNT * min(1.0, FEW_NODES / tree.tokens.size)
    pays = survival(tree, control, costs) >= share * rate * (node + attention)
    # A drawn node that is dropped for its own token would bias the text (methods.md 0.5).
    kept = tree.valid & ((tree.depth == 0) | pays | (tree.scheme in DRAWN_SCHEMES))
    counts = kept & ~done[:, None]
    attending = jnp.sum(jnp.where(counts, attention, 0.0)) + _attention_of_all(costs, length, done)
    drafting = costs.draft_seconds
    if costs.level_seconds is not None:
        drafting = costs.level_seconds * jnp.max(jnp.where(tree.valid, tree.depth, 0)).astype(jnp.float32)
    return kept, drafting + costs.pass_seconds[jnp.sum(counts)] + attending


def plain_seconds(costs: Costs, length: Int[Array, "B"], done: Bool[Array, "B"]) -> Float[Array, ""]:
    """What a plain pass over the rows that go on should take."""
    return costs.plain_seconds[jnp.sum(~done)] + _attention_of_all(costs, length, done)


def slots_seen(costs: Costs, length: Int[Array, "B"]) -> Float[Array, "B"]:
    """Slots that a layer reads on average for a node of each row."""
    slots = length.astype(jnp.float32)
    return (1 - costs.windowed_share) * slots + costs.windowed_share * jnp.minimum(slots, costs.window)


def _attention_of_all(costs: Costs, length: Int[Array, "B"], done: Bool[Array, "B"]) -> Float[Array, ""]:
    """Of every pass, plain or not: a row's first nodes read its cache together."""
    reading = jnp.where(done, 0.0, slots_seen(costs, length))
    return (FREE_DEPTH + 1) * costs.slot_seconds * jnp.sum(reading)


def learned(
    control: Control,
    costs: Costs,
    tree: DraftTree,
    num_made: Int[Array, "B"],
    verdict: Verdict,
    num_committed: Int[Array, "B"],
    length: Int[Array, "B"],
    done: Bool[Array, "B"],
    seconds: Float[Array, ""],
) -> Control:
    """What a round with drafts has shown.

    Args:
      tree: of which the nodes that were verified are valid.
      num_made: drafts, verified or not.
      length, done: before the round.
      seconds: what the round should have taken.
    """
    num = tree.tokens.shape[1]
    is_at = jnp.arange(num) == verdict.path[:, :, None]
    on_path = jnp.any(is_at & (jnp.arange(verdict.path.shape[1]) <= verdict.num_accepted[:, None])[:, :, None], 1)
    parent = jnp.maximum(tree.parents, 0)
    was_tried = jnp.take_along_axis(on_path, parent, 1) & tree.valid & (tree.depth > 0)
    score = jnp.zeros(tree.tokens.shape) if tree.score is None else tree.score
    step = jnp.exp(jnp.fmin(score - jnp.take_along_axis(score, parent, 1), 0.0))
    predicted = jnp.sum(jnp.where(was_tried, step, 0.0), 1)
    accepted = jnp.where(done, 0.0, verdict.num_accepted.astype(jnp.float32))
    rounds = control.rounds + 1
    tokens = MEMORY * control.tokens + jnp.sum(num_committed).astype(jnp.float32)
    spent = MEMORY * control.seconds + seconds
    num_live = jnp.sum(~done).astype(jnp.float32)
    plain_tokens = spent * num_live / plain_seconds(costs, length, done)
    sample = num_live * jnp.minimum(rounds.astype(jnp.float32), 1 / (1 - MEMORY))
    is_poor = (rounds >= FEWEST_ROUNDS) & (tokens < plain_tokens * (1 - DOUBT / jnp.sqrt(jnp.maximum(sample, 1.0))))
    is_good = rounds >= 4 * FEWEST_ROUNDS
    drafts = control.drafts
    if drafts is not None:
        verified = jnp.sum(tree.valid & (tree.depth > 0), 1)
        drafts += jnp.where(done[:, None], 0, jnp.stack([num_made, verified], 1))
    return Control(
        accepted=MEMORY * control.accepted + accepted,
        predicted=MEMORY * control.predicted + jnp.where(done, 0.0, predicted),
        tokens=jnp.where(is_poor, 0.0, tokens),
        seconds=jnp.where(is_poor, 0.0, spent),
        rounds=jnp.where(is_poor, 0, rounds),
        wait=jnp.where(is_poor, control.backoff, 0),
        backoff=jnp.where(
            is_poor, jnp.minimum(2 * control.backoff, LONGEST_WAIT), jnp.where(is_good, FIRST_WAIT, control.backoff)
        ),
        drafts=drafts,
    )
