"""Which drafts are worth a check, and whether drafting is: decided inside the loop, from what passes cost here.

A plan (`planning/plan.py`) gives the largest tree of a call. Of the tree that a drafter grew, the rows of a batch
verify the nodes that promise more tokens a second than they cost; where drafting as a whole does not pay, the loop
decodes plainly for a while and tries again later. Neither changes a text under `match`: it is lossless for any tree
chosen before the target's draw. Neither compiles anything. Read first: `step.py`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.types import DRAWN_SCHEMES, Control, Costs, DraftTree, Stop, Verdict

MEMORY = 0.97
"""What a round leaves of the weight of those before it, in every average."""
PRIOR = 4.0
"""Weight of the first estimate, in expected drafts."""
DOUBT = 0.6
"""Rounds are a sample. Drafts stop once they trail plain decoding by the fraction DOUBT / sqrt(n), where n counts the
remembered rounds times the live rows."""
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
    rows, count = jnp.zeros(batch), jnp.zeros(batch, jnp.int32)
    drafts = jnp.zeros((batch, 2), jnp.int32) if counts_drafts else None
    return Control(rows, rows, rows, rows, count, count, count + FIRST_WAIT, drafts)


def joined(control: Control, live: Bool[Array, "B"], slot_mask: Bool[Array, "B"]) -> Control:
    """The control after new rows have come into a running batch.

    Of their own drafts nothing is known. Whether drafting pays they take over from the rows that go on, so that a batch
    does not try drafts anew that were found not to pay.

    Args:
      live: rows that are not done; the new ones among them do not count.
      slot_mask: the new rows.
    """
    others = live & ~slot_mask
    num = jnp.sum(others).astype(jnp.float32)
    fresh = first_control(len(live), control.drafts is not None)
    known = {name: _sum(getattr(control, name), others) / jnp.maximum(num, 1.0) for name in ("tokens", "plain")}
    known |= {name: _most(getattr(control, name), others) for name in ("rounds", "wait", "backoff")}
    known = {name: jnp.where(num > 0, value, getattr(fresh, name)) for name, value in known.items()}
    return _in_rows(slot_mask, dataclasses.replace(fresh, **known), control)


def waits(control: Control, costs: Costs, done: Bool[Array, "B"]) -> Bool[Array, ""]:
    """Whether the next round is plain."""
    is_waiting = _most(control.wait, ~done) > 0
    return is_waiting if costs.worth_trying is None else is_waiting | ~costs.worth_trying[jnp.sum(~done)]


def waited(control: Control, num_rounds: Int[Array, ""]) -> Control:
    """After so many plain rounds: calls of the loop may be shorter than a block."""
    return dataclasses.replace(control, wait=jnp.maximum(control.wait - num_rounds, 0))


def _sum(x: Float[Array, "B"], rows: Bool[Array, "B"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(rows, x, 0.0))


def _most(x: Int[Array, "B"], rows: Bool[Array, "B"]) -> Int[Array, ""]:
    return jnp.max(jnp.where(rows, x, 0))


def _num_live(done: Bool[Array, "B"]) -> Float[Array, ""]:
    """Rows that go on, at least 1: it divides."""
    return jnp.maximum(jnp.sum(~done), 1).astype(jnp.float32)


def _in_rows(rows: Bool[Array, "B"], new: Control, old: Control) -> Control:
    """`new` in these rows, `old` in the others."""
    return jax.tree.map(lambda a, b: jnp.where(rows.reshape(-1, *[1] * (b.ndim - 1)), a, b), new, old)


def first_trust(has_score: bool) -> float:
    """`Costs.first_trust`: 1 for a drafter that scores its nodes, less for one to which all are equally sure."""
    return 1.0 if has_score else 0.6


def log_share(accepted: Array, num: Array, first: Array | float) -> Array:
    """The log of the share of `num` expected drafts that was accepted, as if PRIOR more had been expected and the share
    `first` of them accepted; at most 0."""
    return jnp.log(jnp.clip((accepted + PRIOR * first) / (num + PRIOR), 1e-3, 1.0))


def log_trust(control: Control, costs: Costs) -> Float[Array, "B"]:
    """Log of how far each row trusts its drafter: accepted over expected drafts so far."""
    return log_share(control.accepted, control.predicted, costs.first_trust)


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
    node = _node_seconds(costs, num_nodes, done) * jnp.sum(~done).astype(jnp.float32)
    price = tokens_a_second(control, costs, length, done) * (costs.level_seconds[jnp.sum(~done)] + node)
    return Stop(log_trust(control, costs), ~done, price)


def tokens_a_second(
    control: Control, costs: Costs, length: Int[Array, "B"], done: Bool[Array, "B"]
) -> Float[Array, ""]:
    """Expected tokens a second of drafting: plain speed times the gain so far, smoothed by one plain round a row."""
    num = _num_live(done)
    gain = (_sum(control.tokens, ~done) + num) / (_sum(control.plain, ~done) + num)
    return gain * num / plain_seconds(costs, length, done)


def _node_seconds(costs: Costs, num_nodes: int, done: Bool[Array, "B"]) -> Float[Array, ""]:
    """Of one more node, where every row that goes on has a root and at most `num_nodes` nodes."""
    num = jnp.maximum(jnp.sum(~done), 1)
    all_of_them = costs.pass_seconds[num * num_nodes] - costs.pass_seconds[num]
    return all_of_them / (_num_live(done) * (num_nodes - 1))


def _score(tree: DraftTree) -> Float[Array, "B N"]:
    """The drafter's own estimate of each node, in logs; a drafter that says nothing is sure."""
    return jnp.zeros(tree.tokens.shape) if tree.score is None else tree.score


def survival(tree: DraftTree, control: Control, costs: Costs) -> Float[Array, "B N"]:
    """How likely each node is to be accepted; 1 for roots, 0 for nodes that are not valid.

    The drafter's own estimate, corrected for every edge by how a row's edges fared so far.
    """
    of_edges = tree.depth.astype(jnp.float32) * log_trust(control, costs)[:, None]
    likely = jnp.exp(jnp.fmin(_score(tree), 0.0) + of_edges)
    return jnp.where(tree.valid, jnp.where(tree.depth == 0, 1.0, likely), 0.0)


def select_nodes(
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
    num_nodes = tree.tokens.shape[1]
    rate, node = tokens_a_second(control, costs, length, done), _node_seconds(costs, num_nodes, done)
    reading = costs.slot_seconds * slots_seen(costs, length)
    attention = jnp.where(tree.depth > FREE_DEPTH, reading[:, None], 0.0)
    share = 1 - DISCOUNT * jnp.minimum(1.0, FEW_NODES / (_num_live(done) * num_nodes))
    pays = survival(tree, control, costs) >= share * rate * (node + attention)
    # A drawn node that is dropped for its own token would bias the text (methods.md 0.5).
    kept = tree.valid & ((tree.depth == 0) | pays | (tree.scheme in DRAWN_SCHEMES))
    counts = kept & ~done[:, None]
    attending = jnp.sum(jnp.where(counts, attention, 0.0)) + _attention_of_all(costs, length, done)
    drafting = costs.draft_seconds[jnp.sum(~done)]
    if costs.level_seconds is not None:
        num_levels = jnp.max(jnp.where(tree.valid, tree.depth, 0)).astype(jnp.float32)
        drafting = costs.level_seconds[jnp.sum(~done)] * num_levels
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


def expected(tree: DraftTree, on_path: Bool[Array, "B N"]) -> Float[Array, "B"]:
    """How many drafts the drafter takes to be accepted of those that were tried: the valid children of a path.

    Args:
      on_path: the nodes of the path, the root included.
    """
    parent = jnp.maximum(tree.parents, 0)
    was_tried = jnp.take_along_axis(on_path, parent, 1) & tree.valid & (tree.depth > 0)
    score = _score(tree)
    step = jnp.exp(jnp.fmin(score - jnp.take_along_axis(score, parent, 1), 0.0))
    return jnp.sum(jnp.where(was_tried, step, 0.0), 1)


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
    """What a round with drafts has shown, in the rows that were not done before it.

    Args:
      tree: of which the nodes that were verified are valid.
      num_made: drafts, verified or not.
      length, done: before the round.
      seconds: what the round should have taken.
    """
    num = tree.tokens.shape[1]
    is_at = jnp.arange(num) == verdict.path[:, :, None]
    on_path = jnp.any(is_at & (jnp.arange(verdict.path.shape[1]) <= verdict.num_accepted[:, None])[:, :, None], 1)
    predicted = expected(tree, on_path)
    rounds, backoff = _most(control.rounds, ~done) + 1, _most(control.backoff, ~done)
    tokens = MEMORY * control.tokens + num_committed.astype(jnp.float32)
    plain = MEMORY * control.plain + seconds / plain_seconds(costs, length, done)  # in which each row gains a token
    sample = _num_live(done) * jnp.minimum(rounds.astype(jnp.float32), 1 / (1 - MEMORY))
    is_behind = _sum(tokens, ~done) < _sum(plain, ~done) * (1 - DOUBT / jnp.sqrt(sample))
    is_poor = (rounds >= FEWEST_ROUNDS) & is_behind
    is_good = rounds >= 4 * FEWEST_ROUNDS
    drafts = control.drafts
    if drafts is not None:
        drafts += jnp.stack([num_made, jnp.sum(tree.valid & (tree.depth > 0), 1)], 1)
    now = Control(
        accepted=MEMORY * control.accepted + verdict.num_accepted.astype(jnp.float32),
        predicted=MEMORY * control.predicted + predicted,
        tokens=jnp.where(is_poor, 0.0, tokens),
        plain=jnp.where(is_poor, 0.0, plain),
        rounds=jnp.where(is_poor, 0, rounds),
        wait=jnp.where(is_poor, backoff * verdict.path.shape[1], 0),  # a block has a round for each depth, and one
        backoff=jnp.where(is_poor, jnp.minimum(2 * backoff, LONGEST_WAIT), jnp.where(is_good, FIRST_WAIT, backoff)),
        drafts=drafts,
    )
    return _in_rows(~done, now, control)
