"""Measures what token-free drafting saves: a trunk and one head, compared with K steps that have a head after each.

A token-conditioned recurrence must choose a token before its next step. It needs K passes of its layer over one state,
each followed by the head, a top-k and an embedding. A token-free trunk first computes its K states, one after another
or all in one pass, and then all logits in one product. All are timed in one process, in turns, each in a compiled loop
with the shapes of a real round. Weights are random, because their values do not change the time.

    python benchmarks/drafting.py --demo
    python benchmarks/drafting.py --demo --steps 6 8 --width 4 --dtype float32

`whole` is the whole of drafting: trunk, head, token information and the choice of a chain of K tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
from jax import lax

import hsd_jax
from hsd_jax.config import PARALLEL, RECURRENT, DrafterConfig, TreeConfig
from hsd_jax.drafters.hidden.schedule import trunk_states
from hsd_jax.drafters.table import init_drafter, make_drafter
from hsd_jax.drafters.trunk_state import TrunkState
from hsd_jax.kernels.ops import argmax
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import causal_mask
from hsd_jax.models.trunk import base_logits, embed_committed, trunk_pass
from hsd_jax.planning.timing import interleaved_medians, loop_timer
from hsd_jax.types import RoundInputs, SamplingParams

CACHED = 200
"""Number of committed tokens of the row, in a cache of 512 slots."""


def recurrence(models, target_config, config: DrafterConfig, steps: int, width: int, state: TrunkState):
    """K steps of the trunk's layer, each reading the token drafted before it, as an EAGLE-style chain does."""
    weights, cache = models["drafter"], state.cache
    batch, num = state.pending.shape[:2]
    embeddings = embed_committed(models["target"], target_config, config, state.next_tokens)
    positions = cache.length[:, None] + jnp.arange(num)
    last = (state.num_pending - 1)[:, None]
    is_feature = (jnp.arange(num) < state.num_pending[:, None])[:, None]
    out, kv = trunk_pass(
        weights, config, state.pending, embeddings, positions, causal_mask(batch, num), cache, asking=last
    )
    tokens, earlier = [], kv
    for step in range(steps):
        logits = base_logits(weights, config, models["target"], target_config, out)
        best = argmax(logits) if width == 1 else lax.top_k(logits, width)[1][..., 0]
        tokens.append(best)
        if step + 1 < steps:
            embeddings = embed_committed(models["target"], target_config, config, best)
            position = (cache.length + state.num_pending + step)[:, None]
            sees = jnp.concatenate([is_feature, jnp.ones((batch, 1, step + 1), bool)], -1)
            out, own = trunk_pass(weights, config, out, embeddings, position, sees, cache, earlier)
            earlier = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 2), earlier, own)
    cache = cache_lib.commit(cache, kv, None, state.num_pending, after=tokens[-1])
    return jnp.stack(tokens, 1), cache


def stages(params: hsd_jax.Params, steps: int, width: int) -> dict:
    """Timers of both trunks and of the recurrence by name, for K = `steps`."""
    target_config, timers, dtype = params.target_config, {}, params.target["embedding"].dtype
    row = jnp.zeros(1, jnp.int32)
    greedy, keys = SamplingParams(jnp.zeros(1), row, jnp.ones(1)), jax.random.split(jax.random.key(0), 1)

    def restored(state: TrunkState, cache) -> TrunkState:
        return dataclasses.replace(state, cache=dataclasses.replace(cache, length=state.cache.length))

    for trunk in (PARALLEL, RECURRENT):
        config = dataclasses.replace(params.drafter_config, trunk=trunk, num_steps=steps, reduced_vocab_size=None)
        drafter = jax.tree.map(lambda x: x.astype(dtype), init_drafter(jax.random.key(0), config))
        models = {"target": params.target, "drafter": drafter}
        cache = cache_lib.empty_cache(
            config.num_layers, 1, config.num_kv_heads, 512, config.head_dim, cache_lib.cache_dtype(dtype)
        )
        cache = dataclasses.replace(cache, length=row + CACHED)
        pending = jax.random.normal(jax.random.key(1), (1, steps + 1, config.hidden_size))
        state = TrunkState(cache, pending, jnp.zeros((1, steps + 1), jnp.int32), row + steps - 1)
        tree = TreeConfig(nodes=steps + 1, depth=steps, width=1)
        drafting = make_drafter(target_config, config, tree, cache.keys[0].dtype)

        def free(models, state, config=config):
            states, cache = trunk_states(models, target_config, config, steps, state)
            logits = base_logits(models["drafter"], config, models["target"], target_config, states)
            return logits, restored(state, cache)

        def whole(models, state, drafting=drafting):
            tree, after = drafting.draft(models, state, RoundInputs(row, row + CACHED + steps, keys, greedy))
            return tree, restored(state, after.cache)

        def conditioned(models, state, config=config):
            tokens, cache = recurrence(models, target_config, config, steps, width, state)
            return tokens, restored(state, cache)

        runs = {f"{trunk} trunk and head": free, f"{trunk}, whole": whole}
        if trunk == RECURRENT:
            runs["token-conditioned recurrence"] = conditioned
        timers |= {name: loop_timer(run, models, state, 50, None, True) for name, run in runs.items()}
    return timers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--demo", action="store_true")
    where.add_argument("--target", metavar="DIR")
    parser.add_argument("--drafter", metavar="DIR", help="drafter whose sizes are timed, with random weights")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 6, 8], help="numbers of drafted tokens, K")
    parser.add_argument("--width", type=int, default=1, help="tokens that the recurrence selects after a step (top-k)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", metavar="OUT")
    args = parser.parse_args()
    if args.target and not args.drafter:
        parser.error("--target needs a --drafter, whose sizes are timed")
    folders = ("demo",) if args.demo else ()
    params = hsd_jax.load(*folders, target=args.target, drafter=args.drafter, dtype=args.dtype)
    print(json.dumps(hardware()), f"weights in {params.target['embedding'].dtype}")
    found = {}
    for steps in args.steps:
        medians = interleaved_medians(stages(params, steps, args.width), args.repeats)
        against = medians["token-conditioned recurrence"]
        found[steps] = medians
        for name, seconds in medians.items():
            print(f"K={steps:2d}  {name:32s} {1e6 * seconds:8.0f} us  {1 - seconds / against:+.0%} less")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"hardware": hardware(), "width": args.width, "seconds": found}, file, indent=1)


if __name__ == "__main__":
    main()
