"""PEARL on two sets of devices: the small model drafts on one while the target verifies on the other.

A round consists of three programs. `propose` and `look` run at the same time, because neither needs the other. `judge`
needs the results of both, and is small.

    drafter's devices    propose -> drafts ----.              propose of the next round
                                                \\            /
    target's devices     look -> logits ------- judge -> outcome
                         (root and pending)     (accept, commit; the next round's look follows)

The host only dispatches programs, rounds ahead of the devices. Drafts and `RoundOutcome` move between the devices by
`jax.device_put`, which does not block here. Once in EVERY rounds the host reads the lengths that rows had EVERY rounds
ago, so the devices have work meanwhile. A round after the end of a row does not change the row.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters import small_lm
from hsd_jax.drafters.method import DraftingMethod, Planning
from hsd_jax.drafters.pearl.draft import (
    DraftChain,
    PearlConfig,
    PearlState,
    RoundOutcome,
    first_outcome,
    halves,
    pearl_drafter,
)
from hsd_jax.drafters.small_lm import SmallLMState, read_prompt
from hsd_jax.host.distributed import fetch
from hsd_jax.infer import round as round_lib
from hsd_jax.infer import rows
from hsd_jax.infer.loop import CHUNK, UNBOUNDED, Decoder, Rows, is_full
from hsd_jax.infer.plain import make_plain_step
from hsd_jax.infer.rules.accept import check_legal
from hsd_jax.infer.sampling import round_noise
from hsd_jax.kernels.program import Program
from hsd_jax.types import AcceptRule, DecodeState, DrawScheme, Limits, ModelOutput, SamplingParams

EVERY = 2
"""The number of rounds between two reads of the rows' lengths by the host. As many rounds are in flight."""


class Seen(NamedTuple):
    """The state of the rows after `num` rounds, on the host."""

    num: int
    length: np.ndarray
    done: np.ndarray


Own = tuple[SmallLMState, RoundOutcome]
"""The state of the small model's half, which is on its devices."""
Apart = tuple[DecodeState, Own]
"""The states of both halves. The drafter's state in that of the target's half is the `Phase`."""


class Overlapped(Decoder):
    """The compiled functions of PEARL on the meshes of the two models, with the interface of a `Decoder`."""

    def __init__(
        self,
        config: ModelConfig,
        drafter_config: PearlConfig,
        tree: TreeConfig,
        scheme: DrawScheme,
        rule: AcceptRule,
        drafter_mesh: Mesh,
        cache_dtype: Any,
        own: Program,
    ):
        assert own.mesh is not None
        drafter = pearl_drafter(config, drafter_config, tree, cache_dtype, scheme)
        check_legal(rule, drafter.scheme, drafter.drafts_ahead)
        both = halves(config, drafter_config, tree, cache_dtype, scheme)
        # The target's half as a drafter that drafts nothing. `commit` returns (RoundOutcome, Phase).
        half = drafter._replace(
            init=lambda tokens, length, capacity: both.first_phase(length),
            read=lambda models, state, *chunk: state,
            commit=lambda models, phase, verdict, output, num: both.after_verdict(phase, verdict, num),
        )
        # The loop of this decoder, which would be one program, is never compiled.
        self.here = Decoder(config, make_plain_step(config), half, cache_dtype, own)
        self.drafter, self.mesh, self.drafter_mesh = drafter, own.mesh, drafter_mesh
        self.max_depth, self.lookahead, self._slots = self.here.max_depth, self.here.lookahead, self.here._slots
        self.compile, self.chunk, self.controlled_vocab = self.here.compile, self.here.chunk, None

        def look(models: dict, sampling: SamplingParams, state: DecodeState) -> tuple[ModelOutput, Array]:
            """The target's pass over the root and the pending drafts, and the noise of the round.

            The tip is not known yet. Its node has an older token, which the target does not read.
            """
            noise = round_noise(state.keys, state.length - 1, half.max_depth + 1, config.vocab_size, sampling)
            tree, _ = both.chained(state.drafter, state.drafter.fresh, *round_lib.root_of(state))
            return round_lib.target_pass(models, config, half, state, tree), noise

        def judge(
            sampling: SamplingParams, limits: Limits, state: DecodeState, fresh: DraftChain, output: ModelOutput, noise
        ) -> tuple[DecodeState, RoundOutcome, Int[Array, "2 B"]]:
            """The state after the round and its outcome. The last result is for the host."""
            tree, phase = both.chained(state.drafter, fresh, *round_lib.root_of(state))
            judged = dataclasses.replace(state, drafter=phase), tree, output, noise
            after, _, _ = round_lib.judge_and_commit({}, half, rule, sampling, limits, *judged)
            outcome, phase = after.drafter
            after = rows.placed(dataclasses.replace(after, drafter=phase))
            return after, outcome, jnp.stack([after.length, after.done.astype(jnp.int32)])

        def propose(models: dict, *args: Any) -> tuple[DraftChain, SmallLMState]:
            fresh, base = both.propose(models, *args)
            return fresh, rows.placed(base)

        def read_ahead(
            models: dict,
            tokens: Int[Array, "B P"],
            length: Int[Array, "B"],
            num_chunks: Int[Array, ""],
            own: Own | None,
            *,
            capacity: int,
        ) -> Own:
            """Reads further chunks of the prompts, without their last tokens. Without weights it reads nothing."""
            chunk = min(tokens.shape[1], CHUNK)

            def one(index: Array, state: SmallLMState) -> SmallLMState:
                now = lax.dynamic_slice_in_dim(tokens, index * chunk, chunk, 1)
                return read_prompt(models["drafter"], drafter_config.base, state, now, index * chunk, length)

            base, outcome = (both.base.init(tokens, length, capacity), first_outcome(length)) if own is None else own
            if models["drafter"] is not None:
                first, last = (-(-jnp.max(num) // chunk) for num in (base.cache.length, length - 1))
                base = lax.fori_loop(first, jnp.minimum(first + num_chunks, last), one, base)
            return rows.placed((base, outcome))

        def there(function: Callable, **options) -> Callable:
            return jax.jit(dataclasses.replace(own, mesh=drafter_mesh).traced(function), **options)

        self.look, self.judge = self.compile(look), self.compile(judge, donate_argnums=2)
        self.read_ahead = there(read_ahead, static_argnames="capacity")
        self.propose = there(propose, donate_argnums=1)
        self._insert_ahead = there(rows.copied, donate_argnums=0)
        self._clear_ahead = there(rows.zeroed, donate_argnums=0)

    def begin(
        self, tokens: Array, length: Int[Array, "B"], keys, limits: Limits, costs: None, *, capacity: int
    ) -> DecodeState:
        first = {"drafter": None}, *self._across((tokens, length))
        base = self.read_ahead(*first, np.int32(0), None, capacity=capacity)
        return _joined(self.here.begin(tokens, length, keys, limits, capacity=capacity), base)

    def prefill(self, models, tokens, length, keys, limits, num_chunks=UNBOUNDED, state=None, costs=None, **sizes):
        """Both models read the prompts, each on its own devices."""
        small, target = ({name: models[name]} for name in ("drafter", "target"))
        before, own = (None, None) if state is None else _apart(state)
        across = self._across((tokens, length))
        own = self.read_ahead(small, *across, np.int32(num_chunks), own, capacity=sizes["capacity"])
        state = self.here.prefill(target, tokens, length, keys, limits, num_chunks, before, **sizes)
        return _joined(state, own)

    def insert(self, into: Rows, new: Rows, slots: Any) -> Rows:
        (here, own), (new_here, new_own) = _apart(into[0]), _apart(new[0])
        own = self._insert_ahead(own, slots[0], new_own)
        state, sampling, limits = self.here.insert((here, *into[1:]), (new_here, *new[1:]), slots)
        return _joined(state, own), sampling, limits

    def clear(self, state: DecodeState, slot: Any) -> DecodeState:
        here, own = _apart(state)
        return _joined(self.here.clear(here, slot), self._clear_ahead(own, slot))

    def _across(self, tree: Any) -> Any:
        """Copies small arrays to each of the small model's devices."""
        return jax.device_put(tree, NamedSharding(self.drafter_mesh, PartitionSpec()))

    def hold(self, models: dict) -> dict:
        """Each program takes one of the two models, so they stay a dict."""
        return models

    def dispatch(self, models, there, sampling, limits, state: DecodeState, own: Own) -> tuple[Apart, jax.Array]:
        """Dispatches a round of both halves without waiting for it.

        Returns their states, the future lengths, and whether rows are done.
        """
        fresh, base = self.propose({"drafter": models["drafter"]}, *own, *there)
        output, noise = self.look({"target": models["target"]}, sampling, state)
        fresh = jax.device_put(fresh, NamedSharding(self.mesh, PartitionSpec()))
        state, outcome, where = self.judge(sampling, limits, state, fresh, output, noise)
        outcome = self._across(outcome)
        where.copy_to_host_async()
        return (state, (base, outcome)), where

    def loop(self, models, costs, sampling, limits, num_rounds, least_live, state: DecodeState) -> DecodeState:
        """Replaces the compiled loop. Rounds that were in flight when the last row ended still run."""
        longest, there, capacity = fetch(limits.max_length), self._across((state.keys, sampling)), state.cache.capacity
        seen, flying, num = Seen(0, fetch(state.length), fetch(state.done)), deque(), 0
        apart = _apart(state)
        while True:
            if num < num_rounds and self._is_next(num, seen, longest, capacity, int(least_live)):
                (apart, where), num = self.dispatch(models, there, sampling, limits, *apart), num + 1
                if num % EVERY == 0:
                    flying.append((num, where))
                    if len(flying) > 1:
                        landed, (length, done) = flying[0][0], fetch(flying.popleft()[1])
                        seen = Seen(landed, length, done.astype(bool))
            elif seen.num < num:  # as far as the host knows, no round is needed, or one might not fit: it reads again
                seen = Seen(num, fetch(apart[0].length), fetch(apart[0].done))
                flying.clear()
            else:
                return _joined(*apart)

    def _is_next(self, num: int, seen: Seen, longest: np.ndarray, capacity: int, least_live: int) -> bool:
        """Whether a further round may be needed by enough rows, and certainly fits into the caches.

        `num` rounds were dispatched. Each gives a row 1 to gamma tokens. A row is done at its `longest` tokens.
        """
        since = num - seen.num
        may_go_on = ~seen.done & (seen.length + since < longest)
        most = np.minimum(seen.length + since * self.max_depth, longest)
        return bool(may_go_on.sum() >= max(least_live, 1)) and not is_full(most, ~may_go_on, capacity, self.lookahead)


def _joined(state: DecodeState, own: Own) -> DecodeState:
    """The state of both halves."""
    return dataclasses.replace(state, drafter=PearlState(*own, state.drafter, is_overlapped=True))


def _apart(state: DecodeState) -> Apart:
    """The two states that `_joined` joins."""
    both: PearlState = state.drafter
    return dataclasses.replace(state, drafter=both.phase), (both.base, both.outcome)


PEARL = DraftingMethod(
    PearlConfig,
    pearl_drafter,
    Planning(
        # As the small model alone, because nothing overlaps on one device.
        lambda model, config, *call: small_lm.drafting_seconds(model, config.base, *call),
        lambda config: TreeConfig.chain(config.gamma),
        lambda config: config.gamma,
        has_score=False,
    ),
    overlapped=Overlapped,
)
