"""Decides inside the loop which drafts pay, and whether drafting pays, from the costs of passes on this machine.

A plan (`planning/plan.py`) gives the largest tree of a call. The rows of a batch verify only the nodes of a grown tree
whose expected tokens are worth their time. If drafting does not pay, the loop decodes plainly for a while and tries
again later. Neither decision changes a text under `match`, which is lossless for any tree that is chosen before the
target's draw. Neither compiles anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.types import DRAWN_SCHEMES, Control, Costs, DecodeState, Drafts, DraftTree, Stop, Verdict

DECAY = 0.97
"""The factor by which each round reduces the weight of earlier rounds in every average."""
PRIOR_DRAFTS = 4.0
"""The first estimate counts as much as this number of drafts."""
STOP_MARGIN = 0.6
"""Drafting stops if it is slower than plain decoding by more than the fraction STOP_MARGIN / sqrt(n), because few
rounds are a small sample: n is the number of remembered rounds times the number of unfinished rows."""
SHARE_OF_PRICE = 0.6
"""Verified nodes have to earn this share of the price of a longer pass. At 1 too many drafts were left out where they
are accepted more often than their drafter says. No number is best everywhere (docs/history.md)."""
FEWEST_ROUNDS = 6
"""The number of rounds with drafts before their speed is judged."""
FIRST_WAIT, LONGEST_WAIT = 2, 32
"""The number of blocks of plain rounds after drafts that did not pay: the first number, and the largest. It doubles
each time."""
FREE_NODES = 4
"""Attention takes as long for this number of nodes of a row as for one: a vector of the kernel holds their queries."""


def first_control(batch: int, counts_drafts: bool = False) -> Control:
    """The control before any round. `counts_drafts`: as for chains that may end early."""
    rows, count = jnp.zeros(batch), jnp.zeros(batch, jnp.int32)
    drafts = jnp.zeros((batch, 2), jnp.int32) if counts_drafts else None
    return Control(rows, rows, rows, rows, count, count, count + FIRST_WAIT, drafts)


def after_admission(control: Control, live: Bool[Array, "B"], slot_mask: Bool[Array, "B"]) -> Control:
    """The control after new rows have entered a running batch.

    Nothing is known of the drafts of new rows. New rows take over the batch's decision whether drafting pays, so that
    a batch does not try drafts again that did not pay. `slot_mask` marks the new rows, which `live` does not count.
    """
    others = live & ~slot_mask
    num = jnp.sum(others).astype(jnp.float32)
    fresh = first_control(len(live), control.drafts is not None)
    of_batch = {name: _sum(getattr(control, name), others) / jnp.maximum(num, 1.0) for name in ("tokens", "plain")}
    of_batch |= {name: _most(getattr(control, name), others) for name in ("rounds", "wait", "backoff")}
    of_new = {name: jnp.where(num > 0, value, getattr(fresh, name)) for name, value in of_batch.items()}
    return _in_rows(slot_mask, dataclasses.replace(fresh, **of_new), control)


def _control(state: DecodeState) -> Control:
    assert state.control is not None, "a decode with costs begins with a control"
    return state.control


def is_waiting(state: DecodeState, costs: Costs, num_rounds: Array | int = 0) -> Bool[Array, ""]:
    """Whether the next round is plain, after `num_rounds` plain ones that `Control.wait` does not know of."""
    drafts, has_to_wait = _drafts(state, costs), _most(_control(state).wait, ~state.done) > num_rounds
    return (drafts == Drafts.NEVER) | ((drafts == Drafts.IF_THEY_PAY) & has_to_wait)


def with_drafts(costs: Costs, always: bool) -> Costs:
    """Costs with which all rounds have drafts, or none."""
    drafts = np.full(costs.drafts.shape, Drafts.ALWAYS if always else Drafts.NEVER, np.int8)
    return dataclasses.replace(costs, drafts=jax.device_put(drafts))


def mean_ratio(before: float, after: float, num_rounds: int) -> float:
    """The mean of what rounds with drafts have added to `Control.plain`, from its values before and after them."""
    weight = DECAY**num_rounds
    return (after - before * weight) / ((1 - weight) / (1 - DECAY))


def _drafts(state: DecodeState, costs: Costs) -> Int[Array, ""]:
    return costs.drafts[jnp.sum(~state.done)]


def after_plain_rounds(state: DecodeState, num_rounds: Int[Array, ""]) -> DecodeState:
    """The state with the control after `num_rounds` plain rounds. A call of the loop may be shorter than a block."""
    control = _control(state)
    return dataclasses.replace(
        state, control=dataclasses.replace(control, wait=jnp.maximum(control.wait - num_rounds, 0))
    )


def _sum(x: Float[Array, "B"], rows: Bool[Array, "B"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(rows, x, 0.0))


def _most(x: Int[Array, "B"], rows: Bool[Array, "B"]) -> Int[Array, ""]:
    return jnp.max(jnp.where(rows, x, 0))


def _num_live(done: Bool[Array, "B"]) -> Float[Array, ""]:
    """The number of rows that are not done, at least 1, because it is a divisor."""
    return jnp.maximum(jnp.sum(~done), 1).astype(jnp.float32)


def _in_rows(rows: Bool[Array, "B"], new: Control, old: Control) -> Control:
    """`new` in these rows, `old` in the others."""
    return jax.tree.map(lambda a, b: jnp.where(rows.reshape(-1, *[1] * (b.ndim - 1)), a, b), new, old)


def first_trust(has_score: bool) -> float:
    """`Costs.first_trust`: 1 for a drafter that scores its nodes, less for a drafter without scores."""
    return 1.0 if has_score else 0.6


def log_share(accepted: Array, num: Array, first: Array | float) -> Array:
    """The log of the share of `num` expected drafts that was accepted, at most 0.

    PRIOR_DRAFTS further expected drafts are added, of which the share `first` was accepted.
    """
    return jnp.log(jnp.clip((accepted + PRIOR_DRAFTS * first) / (num + PRIOR_DRAFTS), 1e-3, 1.0))


def log_trust(control: Control, costs: Costs) -> Float[Array, "B"]:
    """The log of each row's trust in its drafter: accepted drafts divided by expected drafts so far."""
    return log_share(control.accepted, control.predicted, costs.first_trust)


def stop_rule(state: DecodeState, costs: Costs, num_nodes: int) -> Stop | None:
    """The condition under which chains of at most `num_nodes` nodes end early. None if they do not.

    A further level costs a pass of the drafter and one node per row. It must promise as many tokens as the rounds so
    far gave in that time.
    """
    if costs.level_seconds is None:
        return None
    live = ~state.done
    num_live = jnp.sum(live)
    some = jnp.maximum(num_live, 1)
    # One more node, averaged over trees of 1 to `num_nodes` nodes in every unfinished row.
    all_of_them = costs.pass_seconds[some * num_nodes] - costs.pass_seconds[some]
    node = all_of_them / (_num_live(state.done) * (num_nodes - 1)) * num_live.astype(jnp.float32)
    price = speed_so_far(state, costs) * (costs.level_seconds[num_live] + node)
    return Stop(log_trust(_control(state), costs), price)


def speed_so_far(state: DecodeState, costs: Costs) -> Float[Array, ""]:
    """The expected tokens per second with drafts: plain speed times the gain so far, smoothed by a plain round."""
    num, control, live = _num_live(state.done), _control(state), ~state.done
    gain = (_sum(control.tokens, live) + num) / (_sum(control.plain, live) + num)
    return gain * num / plain_seconds(state, costs)


def _score(tree: DraftTree) -> Float[Array, "B N"]:
    """The drafter's own estimate of each node, as a log. A drafter without estimates counts as certain."""
    return jnp.zeros(tree.tokens.shape) if tree.score is None else tree.score


def survival(tree: DraftTree, control: Control, costs: Costs) -> Float[Array, "B N"]:
    """The estimated probability that each node is accepted: 1 for roots, 0 for nodes that are not valid.

    It is the drafter's own estimate, corrected for every edge by the row's acceptance so far.
    """
    of_edges = tree.depth.astype(jnp.float32) * log_trust(control, costs)[:, None]
    likely = jnp.exp(jnp.fmin(_score(tree), 0.0) + of_edges)
    return jnp.where(tree.valid, jnp.where(tree.depth == 0, 1.0, likely), 0.0)


def select_nodes(tree: DraftTree, state: DecodeState, costs: Costs) -> Bool[Array, "B N"]:
    """The nodes to verify.

    A second is worth the tokens that the rounds so far gave in one (Dinkelbach 1967). The value of a node is its chance
    to be accepted, less the seconds of its attention. The nodes of all rows are ranked by it. The best ones are kept,
    as many as give the largest sum of values, less SHARE_OF_PRICE times the price of a longer pass. With a share of 1
    the choice approaches the best ratio of tokens to seconds from round to round. A node is never likelier or cheaper
    than its parent and comes after it, so the kept nodes include all their ancestors.
    """
    num_nodes = tree.tokens.shape[1]
    speed, num_live = speed_so_far(state, costs), jnp.sum(~state.done)
    # Nodes are counted in their order. Parents come first, so a node costs no less than its parent.
    attention = jnp.diff(_attention(costs, state.length[:, None], jnp.arange(num_nodes + 1)))
    is_root = tree.depth == 0
    value = survival(tree, _control(state), costs) - speed * attention
    value = jnp.where(tree.valid & ~state.done[:, None] & ~is_root, value, -jnp.inf).ravel()
    place = jnp.arange(len(value))
    # Compared all with all, because a sort is many launches on a GPU. Of equal nodes the first one is better, so a
    # parent is before its children.
    is_before = (value[:, None] > value) | ((value[:, None] == value) & (place[:, None] < place))
    rank = jnp.sum(is_before, 0)
    up_to_here = jnp.sum(jnp.where(is_before, value[:, None], 0.0), 0) + value
    seconds = costs.pass_seconds[jnp.minimum(num_live + rank + 1, len(value))]
    gain = up_to_here - SHARE_OF_PRICE * speed * (seconds - costs.pass_seconds[num_live])
    best = jnp.maximum(jnp.max(gain), 0.0)
    # Of equally good numbers the largest. A compiler may compute `gain` twice and round it in two ways.
    pays = (rank <= jnp.max(jnp.where(gain >= best - 1e-5, rank, -1))).reshape(tree.valid.shape)
    # To drop a drawn node because of its own token would bias the text (methods.md 0.5).
    return tree.valid & (is_root | pays | (tree.scheme in DRAWN_SCHEMES))


def round_seconds(drafted: DraftTree, kept: Bool[Array, "B N"], state: DecodeState, costs: Costs) -> Float[Array, ""]:
    """The predicted seconds of a round that drafts a tree and verifies the nodes `kept`."""
    counts, num_live = kept & ~state.done[:, None], jnp.sum(~state.done)
    attending = _sum(_attention(costs, state.length, jnp.sum(counts, 1)), ~state.done)
    drafting = costs.draft_seconds[num_live]
    if costs.level_seconds is not None:
        num_levels = jnp.max(jnp.where(drafted.valid, drafted.depth, 0)).astype(jnp.float32)
        num_left_out = drafted.tokens.shape[1] - 1 - num_levels
        drafting -= costs.level_seconds[num_live] * num_left_out  # the noise of all levels is drawn in any case
    return drafting + costs.pass_seconds[jnp.sum(counts)] + attending


def plain_seconds(state: DecodeState, costs: Costs) -> Float[Array, ""]:
    """The seconds of a plain pass over the unfinished rows, on the scale of the predicted `round_seconds`."""
    attending = _sum(_attention(costs, state.length, jnp.ones(())), ~state.done)
    return (costs.plain_seconds[jnp.sum(~state.done)] + attending) / costs.correction


def _attention(costs: Costs, length: Int[Array, "..."], num_nodes: Array) -> Float[Array, "..."]:
    """Seconds of the attention of a row's nodes to its cache."""
    nodes, slots = num_nodes.astype(jnp.float32), length.astype(jnp.float32)
    return costs.slot_seconds * slots_read(nodes, slots, costs.windowed_share, costs.window)


def slots_read(num_nodes: Any, filled: Any, windowed_share: Any, window: Any) -> Any:
    """The number of cache slots that attention reads for all nodes of a row, on average over the layers.

    Both the plan and the loop use it, so the arguments are numbers, NumPy arrays or arrays of a program.
    """
    seen_by_a_node = filled - windowed_share * _positive(filled - window)
    return (FREE_NODES + _positive(num_nodes - FREE_NODES)) * seen_by_a_node


def _positive(x: Any) -> Any:
    """The positive part of a number, or of an array of NumPy or jax."""
    return (x + abs(x)) / 2


def expected_drafts(tree: DraftTree, on_path: Bool[Array, "B N"]) -> Float[Array, "B"]:
    """The number of accepted drafts that the drafter expected among the tried ones, the valid children of a path."""
    parent = jnp.maximum(tree.parents, 0)
    was_tried = jnp.take_along_axis(on_path, parent, 1) & tree.valid & (tree.depth > 0)
    score = _score(tree)
    step = jnp.exp(jnp.fmin(score - jnp.take_along_axis(score, parent, 1), 0.0))
    return jnp.sum(jnp.where(was_tried, step, 0.0), 1)


def after_round(
    before: DecodeState,
    costs: Costs,
    drafted: DraftTree,
    tree: DraftTree,
    verdict: Verdict,
    num_committed: Int[Array, "B"],
) -> Control:
    """The control after a round with drafts. Rows that were done `before` the round do not change.

    `tree` is the `drafted` one of which only the verified nodes are valid.
    """
    control, done, num = _control(before), before.done, tree.tokens.shape[1]
    is_at = jnp.arange(num) == verdict.path[:, :, None]
    on_path = jnp.any(is_at & (jnp.arange(verdict.path.shape[1]) <= verdict.num_accepted[:, None])[:, :, None], 1)
    predicted = expected_drafts(tree, on_path)
    rounds, backoff = _most(control.rounds, ~done) + 1, _most(control.backoff, ~done)
    tokens = DECAY * control.tokens + num_committed.astype(jnp.float32)
    seconds = round_seconds(drafted, tree.valid, before, costs)
    plain = DECAY * control.plain + seconds / plain_seconds(before, costs)  # in which each row gains a token
    sample = _num_live(done) * jnp.minimum(rounds.astype(jnp.float32), 1 / (1 - DECAY))
    is_behind = _sum(tokens, ~done) < _sum(plain, ~done) * (1 - STOP_MARGIN / jnp.sqrt(sample))
    is_poor = (rounds >= FEWEST_ROUNDS) & is_behind & (_drafts(before, costs) == Drafts.IF_THEY_PAY)
    is_good = rounds >= 4 * FEWEST_ROUNDS
    drafts = control.drafts
    if drafts is not None:
        drafts += jnp.stack([jnp.sum(one.valid & (one.depth > 0), 1) for one in (drafted, tree)], 1)
    now = Control(
        accepted=DECAY * control.accepted + verdict.num_accepted.astype(jnp.float32),
        predicted=DECAY * control.predicted + predicted,
        tokens=jnp.where(is_poor, 0.0, tokens),
        plain=jnp.where(is_poor, 0.0, plain),
        rounds=jnp.where(is_poor, 0, rounds),
        wait=jnp.where(is_poor, backoff * verdict.path.shape[1], 0),  # a block has D + 1 rounds
        backoff=jnp.where(is_poor, jnp.minimum(2 * backoff, LONGEST_WAIT), jnp.where(is_good, FIRST_WAIT, backoff)),
        drafts=drafts,
    )
    return _in_rows(~done, now, control)
