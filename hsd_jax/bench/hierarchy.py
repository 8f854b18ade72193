"""Which of several models should draft for which on this machine: measured, planned, and the plan measured.

c_i(T), the seconds of a pass of model i over T drafts, is timed here, and what a round of it takes besides; a_ij, the
chance that model j accepts a token of model i, is 1 - E[TV] over text that model j writes. `hsd_jax/hierarchy.py` makes
a plan of them; the best stack, the best single drafter and plain decoding then decode the prompts in turns. A single
drafter may win, or none.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax import hierarchy
from hsd_jax.api import decode
from hsd_jax.arguments import encode, sampling_of_row
from hsd_jax.bench.machine import hardware
from hsd_jax.bench.measure import Mode, Runs, Workload, mode_record, time_modes
from hsd_jax.bench.tables import make_console, make_table, say
from hsd_jax.config import ModelConfig, TreeConfig, model_of
from hsd_jax.distributed import fetch
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.drafters.table import parse
from hsd_jax.infer.decode import traced_with
from hsd_jax.infer.sampling import target_distribution
from hsd_jax.kernels import ops
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import causal_mask, forward, forward_sequence
from hsd_jax.params import Params, stack
from hsd_jax.train.evaluate import Texts, write_texts
from hsd_jax.types import SamplingParams

TIMED_DRAFTS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Drafts of the passes that are timed; between them costs are taken to lie on lines."""
PASSES, TIMES = 20, 9
"""Passes of a timing, one after another, and timings of each kind of pass."""
CALIBRATION, CALIBRATIONS = 2, 3
"""Drafts of the rounds that tell what a round takes besides passes, and decodes of which the fastest counts."""
PLAIN, SINGLE, STACK = "plain decoding", "best single drafter", "best stack"


def stacked(params: Params, levels: Sequence[str]) -> Params:
    """Models with stacks as --stack names them, the largest first: "DIR" or "DIR@T", T tokens a round.

    Raises:
      FileNotFoundError, ValueError: as `stack`, and for a T that is no number.
    """
    for level in levels:
        where, at, length = level.rpartition("@")
        if at and not length.isdigit():
            raise ValueError(f"--stack {level}: expected DRAFTER or DRAFTER@T, T tokens a round, for example lookup@7")
        params = stack(params, where if at else level, int(length) if at else None)
    return params


def as_target(params: Params) -> Params:
    """The small model that drafts, as the target of a pair without a drafter."""
    config = params.drafter_config
    assert params.drafter is not None, "checked by `measure`"
    own = model_of(config)
    dtype = jnp.dtype(params.drafter["embedding"].dtype).name
    return dataclasses.replace(
        params, target=params.drafter, drafter=None, target_config=own, drafter_config=None, pair=None, dtype=dtype
    )


def timed_passes(model: Params, drafts: int, context: int) -> Callable[[], float]:
    """Compiled: seconds of a pass over a root and so many drafts behind `context` tokens, of choosing their tokens and
    of committing them."""
    config, num = model.target_config, drafts + 1
    capacity = -(-(context + num) // 256) * 256

    def passes(weights: Any, nodes: Int[Array, "B N"], cache: Any):
        def one(_: Array, carry: Any):
            nodes, cache = carry
            positions = cache.length[:, None] + jnp.arange(num)
            output = forward(weights, config, nodes, positions, causal_mask(1, num), cache)
            chosen = ops.argmax(output.logits)
            return chosen, cache_lib.commit(cache, output.new_kv, None, jnp.zeros(1, jnp.int32), after=chosen)

        return lax.fori_loop(0, PASSES, one, (nodes, cache))

    dtype = cache_lib.fastest_dtype(jax.tree.leaves(model.target["embedding"])[0].dtype)
    slots = cache_lib.layer_slots(config, capacity)
    cache = cache_lib.empty_cache(slots, 1, config.num_kv_heads, config.head_dim, dtype, capacity)
    cache = dataclasses.replace(cache, length=jnp.full(1, context, jnp.int32))
    precision = "highest" if model.precision == "exact" else None
    run = jax.jit(traced_with(precision, True, model.mesh, passes))
    arguments = model.target, jnp.ones((1, num), jnp.int32), cache
    jax.block_until_ready(run(*arguments))

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        return (time.perf_counter() - start) / PASSES

    return seconds


def cost_tables(models: Sequence[Params], context: int, most: int) -> list[list[float]]:
    """Seconds of passes of each model over 0, 1, ... `most` drafts: the least of timings that take turns, as what else
    runs on the machine can only add."""
    drafts = [n for n in TIMED_DRAFTS if n < most] + [most]
    timed = [[timed_passes(model, n, context) for n in drafts] for model in models]
    seconds = np.array([[[one() for one in row] for row in timed] for _ in range(TIMES)]).min(0)
    return [np.interp(np.arange(most + 1), drafts, row).tolist() for row in seconds]


def round_seconds(small: Params, large: Params, prompt: np.ndarray, num_tokens: int) -> float:
    """Seconds of a round of `large` with a chain of CALIBRATION drafts of `small`: the least of a few decodes."""
    pair = dataclasses.replace(
        large, drafter=small.target, drafter_config=SmallLMConfig(**vars(small.target_config)), tokenizer=None
    )
    tree, found = TreeConfig.chain(CALIBRATION), []
    for _ in range(1 + CALIBRATIONS):
        stats = decode(pair, [prompt], num_tokens, tree=tree, eos=()).stats
        found.append(stats.decode_seconds / stats.num_target_passes)
    return min(found[1:])  # the first one compiles


def with_rounds(costs: Sequence[Sequence[float]], rounds: Sequence[float]) -> list[list[float]]:
    """The same costs, a pass that verifies drafts with what its round takes besides passes.

    Args:
      rounds: seconds of a round of each model but the smallest with CALIBRATION drafts of the one below it.
    """
    found = [list(costs[0])]
    for (small, large), seconds in zip(itertools.pairwise(costs), rounds, strict=True):
        besides = max(seconds - large[CALIBRATION] - CALIBRATION * small[0], 0.0)
        found.append([large[0], *(cost + besides for cost in large[1:])])
    return found


@functools.partial(jax.jit, static_argnames="configs")
def overlap(
    weights: tuple[Any, Any],
    configs: tuple[ModelConfig, ModelConfig],
    tokens: Int[Array, "B T"],
    sampling: SamplingParams,
) -> Float[Array, "B T"]:
    """1 - TV of two models behind every token of some text."""
    one, other = (
        jnp.exp(target_distribution(forward_sequence(w, config, tokens).logits, sampling))
        for w, config in zip(weights, configs, strict=True)
    )
    return jnp.minimum(one, other).sum(-1)


def acceptance_of(models: Sequence[Params], texts: Sequence[Texts], temperature: float) -> np.ndarray:
    """1 - E[TV] of every pair of models [K + 1, K + 1], on the text of the larger one; 1 on the diagonal, 0 below.

    Args:
      texts: of each model but the first.
    """
    found = np.eye(len(models))
    for (i, small), (j, large) in itertools.combinations(enumerate(models), 2):
        own, sums = texts[j - 1], np.zeros(2)
        sampling = sampling_of_row(temperature)
        for row in range(len(own.length)):
            configs, weights = (small.target_config, large.target_config), (small.target, large.target)
            values = fetch(overlap(weights, configs, jnp.asarray(own.tokens[row : row + 1]), sampling))[0]
            written = values[own.prompt_length[row] - 1 : own.length[row] - 1]
            sums += written.sum(), len(written)
        found[i, j] = sums[0] / max(sums[1], 1)
    return found


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to decode: models by number, the smallest first, and tokens a level; seconds a token by the formula."""

    chain: tuple[int, ...]
    lengths: tuple[int, ...]
    predicted: float

    @property
    def tree(self) -> TreeConfig | None:
        """What goes up at most: what the level below the target collects, and what overshoots."""
        return None if not self.lengths else TreeConfig.chain(sum(self.lengths[-2:]))


def predicted(costs: Sequence[Sequence[float]], acceptance: np.ndarray, chain: Sequence[int], lengths: Sequence[int]):
    """A way with its prediction: all that was accumulated goes up, as in `drafters/stack`."""
    own = acceptance[np.ix_(chain, chain)]
    seconds = hierarchy.hierarchy_latency([costs[i] for i in chain], own, lengths, buffered=False)
    return Way(tuple(chain), tuple(lengths), seconds)


def ways(costs: Sequence[Sequence[float]], acceptance: np.ndarray, max_length: int) -> dict[str, Way]:
    """Plain decoding, and of single drafters and of stacks those of the least predicted time."""
    last = len(costs) - 1
    found = {PLAIN: predicted(costs, acceptance, (last,), ())}
    numbers = range(1, max_length + 1)
    singles = itertools.product(range(last), numbers)
    found[SINGLE] = min(
        (predicted(costs, acceptance, (i, last), (t,)) for i, t in singles), key=lambda way: way.predicted
    )
    if last < 2:
        return found
    pairs = itertools.product(itertools.combinations(range(last), 2), itertools.product(numbers, repeat=2))
    stacks = [predicted(costs, acceptance, (*pair, last), lengths) for pair, lengths in pairs]
    plan = hierarchy.plan_hierarchy(costs, acceptance, max_length)
    if len(plan.chain) > 3:
        stacks.append(predicted(costs, acceptance, plan.chain, plan.lengths))
    found[STACK] = min(stacks, key=lambda way: way.predicted)
    return found


def mode_of(name: str, way: Way, folders: Sequence[str], load: Callable[[str], Params], params: Params) -> Mode:
    """How a way is decoded; raises what does not fit together before anything compiles."""
    if way.tree is None:
        return Mode(name, params)
    own = dataclasses.replace(load(folders[way.chain[-2]]), target=params.target)
    for model, length in reversed(list(zip(way.chain[:-2], way.lengths[:-1], strict=True))):
        own = stack(own, folders[model], length)
    mode = Mode(name, own, way.tree)
    mode.check()
    return mode


def rounds_of(runs: Runs, name: str) -> dict[str, Any]:
    """Passes of each model but the smallest, the target's first, and what a level hands up in a round, in the mean."""
    stats = [result.stats for result in runs.results[name]]
    counts = {kind: sum(one.drafter[kind] for one in stats) for kind in stats[0].drafter}  # level by level
    passes, tokens = ([n for kind, n in counts.items() if kind.startswith(what)] for what in ("passes", "tokens"))
    passes = [sum(one.num_target_passes for one in stats), *passes]
    return {"passes": passes, "handed_up": [n / max(of, 1) for n, of in zip(tokens, passes, strict=False)]}


def measure(
    params: Params,
    folders: Sequence[str],
    load: Callable[[str], Params],
    work: Workload,
    temperature: float,
    max_length: int,
) -> dict[str, Any]:
    """The whole record.

    Args:
      folders: of small language models with the target's vocabulary.
      load: the pair of the target and the model of a folder.
    Raises:
      FileNotFoundError, ValueError: naming what is wrong with models or prompts, before anything compiles.
    """
    if len(set(folders)) < len(folders):
        raise ValueError(f"--models {' '.join(folders)}: each once")
    for folder in folders:
        if parse(folder) is not None:
            raise ValueError(f"--models {folder}: expected a folder of a language model; it has no distribution")
    pairs = [load(folder) for folder in folders]
    for folder, pair in zip(folders, pairs, strict=True):
        if not isinstance(pair.drafter_config, SmallLMConfig):
            raise ValueError(f"--models {folder}: a {pair.drafter_config.kind} drafter; expected a language model")
    found = work.read(params, work.prompts)
    ids = [np.asarray(row) for row in encode(params, [prompt.text for prompt in found])]
    context, most = int(np.mean([len(row) for row in ids])) + work.max_new_tokens // 2, 2 * max_length
    say("timing passes of every model")
    small = [as_target(pair) for pair in pairs]
    costs = cost_tables([*small, params], context, most)
    order = sorted(range(len(small)), key=lambda i: costs[i][0])
    costs = [*(costs[i] for i in order), costs[-1]]
    folders, models = [folders[i] for i in order], [*(small[i] for i in order), params]
    texts = []
    for number, model in enumerate(models[1:], 1):
        say(f"text of {folders[number] if number < len(folders) else 'the target'}")
        texts.append(write_texts(model, ids, work.max_new_tokens, temperature, work.seed))
    rounds = [round_seconds(*two, ids[0], work.max_new_tokens) for two in itertools.pairwise(models)]
    pass_seconds, costs = costs, with_rounds(costs, rounds)
    acceptance = acceptance_of(models, texts, temperature)
    chosen = ways(costs, acceptance, max_length)
    modes = [mode_of(name, way, folders, load, params) for name, way in chosen.items()]
    prompts = [prompt.text for prompt in found]
    runs = time_modes(
        modes,
        prompts,
        max_new_tokens=work.max_new_tokens,
        temperature=temperature,
        seed=work.seed,
        repeats=work.repeats,
        progress=lambda what, done, of: say(f"{what}, prompt {done + 1} of {of}") if done % 5 == 0 else None,
    )
    rows = []
    for mode, way in zip(modes, chosen.values(), strict=True):
        record = mode_record(mode, runs, PLAIN)
        measured = 1.0 / record["tokens_per_second"]["median"]
        rows.append(
            {
                "way": mode.name,
                "models": [*folders, "target"],
                "chain": way.chain,
                "lengths": way.lengths,
                "tree": None if way.tree is None else way.tree.name,
                "predicted_seconds": way.predicted,
                "measured_seconds": measured,
                "tau": record["tau"],
                "same_text_as_plain": record["same_text_as_plain"],
                **rounds_of(runs, mode.name),
                "predicted_handed_up": hierarchy.mean_accumulation(
                    acceptance[np.ix_(way.chain, way.chain)], way.lengths
                ),
            }
        )
    return {
        "command": work.command_line,
        "hardware": hardware(),
        "temperature": temperature,
        "num_prompts": len(prompts),
        "context": context,
        "models": [*folders, "target"],
        "pass_seconds": pass_seconds,
        "costs": costs,
        "acceptance": acceptance.tolist(),
        "rows": rows,
        "fastest_predicted": min(rows, key=lambda row: row["predicted_seconds"])["way"],
        "fastest_measured": min(rows, key=lambda row: row["measured_seconds"])["way"],
    }


def print_record(record: dict[str, Any]) -> None:
    """Prints what `measure` returned."""
    console, names = make_console(), [f"{i}: {name}" for i, name in enumerate(record["models"])]
    title = f"{record['num_prompts']} prompts, temperature {record['temperature']:g}, {record['context']} tokens before"
    table = make_table(
        title, 1, "model", "ms alone", "ms with 4 drafts", *(f"taken by {i}" for i in range(1, len(names)))
    )
    for i, (name, cost, row) in enumerate(zip(names, record["pass_seconds"], record["acceptance"], strict=True)):
        taken = [f"{x:.3f}" if j > i else "" for j, x in enumerate(row)][1:]
        table.add_row(name, f"{1e3 * cost[0]:.3f}", f"{1e3 * cost[min(4, len(cost) - 1)]:.3f}", *taken)
    console.print(table)
    besides = [whole[1] - one[1] for whole, one in zip(record["costs"], record["pass_seconds"], strict=True)]
    shown = ", ".join(f"{1e3 * seconds:.3f}" for seconds in besides[1:])
    console.print(f"a round takes besides its passes, by the model that verifies: {shown} ms")
    columns = "models", "lengths", "tau", "ms a token", "predicted", "times plain", "predicted", "off", "same text"
    table = make_table("seconds a token, and speed over that of plain decoding", 3, "way", *columns)
    first = record["rows"][0]
    for row in record["rows"]:
        guess, seconds = row["predicted_seconds"], row["measured_seconds"]
        chain, lengths = (" ".join(map(str, row[key])) for key in ("chain", "lengths"))
        gain, promised = first["measured_seconds"] / seconds, first["predicted_seconds"] / guess
        cells = f"{row['tau']:.2f}", f"{1e3 * seconds:.3f}", f"{1e3 * guess:.3f}", f"{gain:.2f}", f"{promised:.2f}"
        cells = *cells, f"{promised / gain - 1:+.1%}"
        table.add_row(row["way"], chain, lengths, *cells, f"{row['same_text_as_plain']}/{record['num_prompts']}")
    console.print(table)
    for row in record["rows"]:
        if row["handed_up"]:
            calls = ", ".join(
                f"{count:,} of model {i}" for count, i in zip(row["passes"], row["chain"][::-1], strict=False)
            )
            handed = ", ".join(f"{x:.2f}" for x in row["handed_up"])
            guess = ", ".join(f"{x:.2f}" for x in row["predicted_handed_up"][:0:-1])
            console.print(f"{row['way']}: passes: {calls}; handed up a round: {handed} (predicted {guess})")
    guess, seconds = record["fastest_predicted"], record["fastest_measured"]
    console.print(f"fastest by prediction: {guess}; measured: {seconds}")
    best = next(row for row in record["rows"] if row["way"] == seconds)
    console.print(use_of(best))
    console.print(record["command"], markup=False, highlight=False)


def use_of(row: dict[str, Any]) -> str:
    """How to decode so."""
    if not row["lengths"]:
        return "decode without a drafter: none of these pays here"
    below = [row["models"][i] for i in row["chain"][:-1]]
    levels = [f" --stack {where}@{t}" for where, t in zip(below[-2::-1], row["lengths"][-2::-1], strict=True)]
    depth = int(row["tree"].split("x")[1])
    return f"decode with --drafter {below[-1]}{''.join(levels)} --nodes {depth + 1} --depth {depth} --width 1"
