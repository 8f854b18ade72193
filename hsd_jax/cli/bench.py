"""`hsd bench`: speculative against plain decoding, honestly: one process, interleaved, everything printed.

Batch 1, EOS honoured, prefill excluded. The record is built by `measure`, from the runs of `hsd_jax/measure.py`, and
shown by `cli/report.py`. Read next: `infer/metrics.py` for the stages.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from typing import Any

from hsd_jax.cli import ablate, compare, options, prompts
from hsd_jax.cli.quality import held_out_bits_per_byte, model_record, repeated_4gram_share
from hsd_jax.files import write_json
from hsd_jax.machine import hardware
from hsd_jax.measure import Mode, Runs, fastest, mode_record, speedup, time_modes

PLAIN_DTYPES = ("float32", "bfloat16")
PLAIN_PAD_ROWS = (1, 4)


def add_parser(commands) -> None:
    """Declares `hsd bench`."""
    parser = options.add_command(
        commands,
        "bench",
        run,
        "measure speculative against plain decoding",
        "Measure tau, speed and the stages of a round, batch 1, with the end token honoured and prefill excluded.\n"
        "Plain and speculative runs are interleaved in one process; speeds are medians over the repeats, with ranges.",
        """
hsd bench --demo
hsd bench --demo --prompts dev.jsonl --half report --limit 40 --plain-variants --json OUT.json --plot OUT.png
hsd bench --demo --temperature 1 --accept match recursive
hsd bench --demo --reuse none sum skip:3
hsd bench --demo --prompts dev.jsonl --half report --batches 1,2,4,8 --contexts 64,1024 --repeats 5
hsd bench --target DIR --drafter DIR --prompts questions.jsonl --trees 4x3x2,8x5x3,16x6x4 --repeats 5
""",
    )
    options.add_model_arguments(parser, is_required=False)
    add_prompt_arguments(parser)
    parser.add_argument(
        "--max-new-tokens", type=options.COUNT, default=128, metavar="N", help="per prompt (default: 128)"
    )
    parser.add_argument(
        "--temperature", type=options.TEMPERATURE, default=0.0, metavar="T", help="0 is greedy (default: 0)"
    )
    parser.add_argument("--seed", type=options.SEED, default=0, help="of prompt i: seed + i (default: 0)")
    parser.add_argument("--repeats", type=options.COUNT, default=3, metavar="R", help="timed passes (default: 3)")
    tree = options.add_tree_arguments(parser)
    tree.add_argument("--trees", metavar="NxDxW,...", help="several trees in one run, for example 4x3x2,8x5x3")
    options.add_rule_arguments(tree, nargs="+")
    options.add_tuned_argument(tree)
    parser.add_argument(
        "--plain-variants",
        action="store_true",
        help="also time plain decoding in float32 and bfloat16, with 1 row and padded to 4: the fastest is the rival",
    )
    grid = parser.add_argument_group("the defaults against plain decoding, cell by cell (no tree is named)")
    numbers = {"type": options.numbers(options.COUNT), "metavar": "N,..."}
    grid.add_argument("--batches", **numbers, help="rows decoded at once, for example 1,2,4,8,16,32")
    grid.add_argument("--contexts", **numbers, help="tokens of a prompt, for example 64,256,1024,1800")
    grid.add_argument(
        "--temperatures",
        type=options.numbers(options.TEMPERATURE),
        default=[0.0, 0.8],
        metavar="T,...",
        help="of each cell (default: 0,0.8)",
    )
    parser.add_argument("--no-stages", action="store_true", help="do not time the stages of a round")
    parser.add_argument("--json", type=options.NEW_FILE, metavar="OUT", help="write every figure to this file")
    parser.add_argument("--plot", type=options.PICTURE, metavar="OUT", help="write a PNG (needs matplotlib)")
    more = parser.add_subparsers(title="more", metavar="COMMAND", action=options.OwnOptions)
    for module in (compare, ablate):
        module.add_parser(more)


def add_prompt_arguments(parser: argparse.ArgumentParser, limit: int | None = None) -> None:
    """Declares --prompts, --limit and --half; `limit` is the default number of prompts of a file."""
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts",
        nargs="+",
        metavar="FILE",
        help="JSON lines with turns, question, prompt or text; or plain text, a prompt a line"
        " (default: the dozen of the demo)",
    )
    shown = "all" if limit is None else limit
    group.add_argument(
        "--limit", type=options.COUNT, default=limit, metavar="N", help=f"prompts of each file (default: {shown})"
    )
    group.add_argument(
        "--half", choices=prompts.HALVES, help="crc32(id) %% 2: 0 is tune, 1 is report (default: both halves)"
    )


def run(args: argparse.Namespace) -> int:
    """Measures, prints, and writes what was asked for."""
    params = options.load_params(args)
    options.need_drafter(params, "bench")
    if args.batches or args.contexts:
        return _run_grid(args, params)
    tuned = options.tuned_of(args, params)
    found = prompts.for_checkpoint(params, args.prompts, args.half, args.limit, args.max_new_tokens)
    if isinstance(tuned, bool):
        trees = options.parse_trees(args.trees) if args.trees else [options.tree_of(args, params)]
        modes = make_modes(args, params, trees, args.reuse or ["none"])
    else:
        plain = Mode(f"plain {params.dtype}", params)
        modes = [plain, *tuned_modes(args, params, tuned), *plain_variants(args, params)]
    options.say(f"{len(found)} prompts, {', '.join(m.name for m in modes)}")
    record = measure(args, params, modes, found)
    from hsd_jax.cli import report

    report.print_bench(record)
    if args.json:
        write_json(args.json, record)
        options.say(f"wrote {args.json}")
    if args.plot:
        report.plot_bench(record, args.plot)
    return 0


def _run_grid(args: argparse.Namespace, params) -> int:
    """The defaults against plain decoding over --batches, --contexts and --temperatures."""
    from hsd_jax.cli import grid

    args.batches, args.contexts = args.batches or [1], args.contexts or [64]
    longest = max(args.contexts) + args.max_new_tokens
    if longest > params.max_len:
        raise ValueError(
            f"--contexts {max(args.contexts)} and --max-new-tokens {args.max_new_tokens}: together more than"
            f" max_len={params.max_len}"
        )
    found = prompts.for_checkpoint(params, args.prompts, args.half, args.limit, args.max_new_tokens)
    record = grid.measure(args, params, found)
    for cell in record["cells"]:
        print(grid.line_of(grid.Cell(**cell)))
    if args.json:
        write_json(args.json, record)
        options.say(f"wrote {args.json}")
    return 0


def make_modes(args: argparse.Namespace, params, trees, reuses: list[str]) -> list[Mode]:
    """Plain first, then a mode for each tree, rule and form of reuse, then the other plain loops if asked for."""
    from hsd_jax.request import rule_and_law

    modes = [Mode(f"plain {params.dtype}", params)]
    rules = [rule_and_law(rule, args.draw)[0] for rule in args.accept]
    for tree, accept, reuse in dict.fromkeys(itertools.product(trees, rules, reuses)):
        name = f"tree {tree.name}" + ("" if accept == "match" else f" {accept}")
        name += "" if reuse == "none" else f" {reuse}"
        modes.append(Mode(name, params, tree, accept=accept, draw=args.draw, reuse=reuse))
    return modes + plain_variants(args, params)


def tuned_modes(args: argparse.Namespace, params, record) -> list[Mode]:
    """The ways to draft that a record of `hsd tune` names for single rows at this temperature, whatever the caches."""
    found = record.alike(1, args.temperature)
    drafting = {choice.name: choice for choice in found if choice.tree is not None}
    if not drafting:
        what = "plain decoding was the fastest" if found else "it says nothing of single rows at such a temperature"
        raise ValueError(f"--tuned {args.tuned}: {what}; there is nothing to compare plain decoding with")
    return [
        Mode(f"tree {name}", params, choice.tree, reuse=choice.reuse)
        if choice.is_whole
        else Mode(f"tree {name}", params, choice.tree, tuned=record.only(choice))
        for name, choice in drafting.items()
    ]


def plain_variants(args: argparse.Namespace, params) -> list[Mode]:
    """The other plain loops, if they are asked for."""
    own, modes = params.dtype, []
    if args.plain_variants:
        for dtype in PLAIN_DTYPES if args.precision == "fast" else ("float32",):
            loaded = params if dtype == own else options.load_params(_without_drafter(args), dtype)
            for pad_rows in PLAIN_PAD_ROWS:
                if (dtype, pad_rows) != (own, 1):
                    name = f"plain {dtype}" + (f" padded to {pad_rows}" if pad_rows > 1 else "")
                    modes.append(Mode(name, loaded, pad_rows=pad_rows))
    return modes


def _without_drafter(args: argparse.Namespace) -> argparse.Namespace:
    return args if args.demo else argparse.Namespace(**{**vars(args), "drafter": None})


def measure(args: argparse.Namespace, params, modes: list[Mode], found: list[prompts.BenchPrompt]) -> dict:
    """Runs every mode on every prompt and returns the whole record."""
    runs = time_modes(
        modes,
        [prompt.text for prompt in found],
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        repeats=args.repeats,
        progress=_progress,
    )
    plain = modes[0].name
    records = {m.name: mode_record(m, runs, plain) for m in modes}
    for mode in modes:
        if mode.tree is not None:
            records[mode.name] |= _speedups(mode, modes, runs)
            # With reuse a round may run no trunk, so stages timed one by one would not add up to it.
            is_timed = mode.reuse == "none" and not args.no_stages
            records[mode.name]["stages"] = _stages(args, mode, found[0].text) if is_timed else None
    return {
        "command": args.command_line,
        "settings": _settings(args, params, found),
        "hardware": hardware(),
        "target": model_record(params.target),
        "drafter": model_record(params.drafter),
        "bits_per_byte": held_out_bits_per_byte(params, found),
        "repeated_4gram_share": repeated_4gram_share(runs.texts(plain)),
        "modes": records,
        "prompts": _prompt_records(found, runs),
    }


def _progress(what: str, row: int, num: int) -> None:
    if row % 10 == 0:
        options.say(f"{what}: prompt {row + 1} of {num}")


def _speedups(mode: Mode, modes: list[Mode], runs: Runs) -> dict[str, dict]:
    """Against the fastest plain loop of the same dtype, and of any."""
    plain = [m for m in modes if m.tree is None]
    same_dtype = fastest([m.name for m in plain if m.dtype == mode.dtype], runs)
    return {
        "speedup_same_dtype": speedup(mode.name, same_dtype, runs),
        "speedup_fastest_plain": speedup(mode.name, fastest([m.name for m in plain], runs), runs),
    }


def _stages(args: argparse.Namespace, mode: Mode, text: str) -> dict | None:
    how = (args.temperature, mode.accept, mode.draw)
    profile = profile_mode(mode.params, mode.tree, text, args.max_new_tokens, *how)
    from hsd_jax.infer.metrics import STAGES

    return {
        "seconds": {"whole": profile.whole, **{name: getattr(profile, name) for name in STAGES}},
        "shares": profile.shares(),
    }


def profile_mode(
    params, tree, text: str, max_new_tokens: int, temperature: float = 0.0, accept="match", draw: str | None = None
):
    """Times the stages of a round at the shapes of a decode of `text`."""
    from hsd_jax.infer.metrics import profile_round
    from hsd_jax.request import Sampling, Speculation, prepare, rule_and_law

    options.say(f"timing the stages of tree {tree.name}")
    request = prepare(params, text, Sampling(max_new_tokens, temperature, eos=()), Speculation(tree, accept, draw))
    return profile_round(
        request.decoder.loop,
        request.models,
        params.target_config,
        params.drafter_config,
        tree,
        request.sampling,
        request.limits,
        request.state,
        accept=accept,
        law=rule_and_law(accept, draw)[1],
        precision="highest" if params.precision == "exact" else None,
        use_native=params.mesh is None,
    )


def _settings(args: argparse.Namespace, params, found) -> dict[str, Any]:
    lengths = sorted(len(params.tokenizer.encode(p.text)) for p in found)
    return {
        "batch": 1,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
        "repeats": args.repeats,
        "dtype": params.dtype,
        "precision": params.precision,
        "prompt_files": [str(p) for p in args.prompts or ["the demo's own"]],
        "half": args.half,
        "num_prompts": len(found),
        "prompt_tokens": {"min": lengths[0], "median": statistics.median(lengths), "max": lengths[-1]},
        "prefill": "excluded",
        "kind_of_figures": "measured",
    }


def _prompt_records(found, runs: Runs) -> list[dict]:
    return [
        {
            "name": prompt.name,
            "modes": {
                name: {
                    "num_tokens": int(results[row].num_tokens[0]),
                    "num_target_passes": results[row].stats.num_target_passes,
                    "seconds": [rows[row] for rows in runs.seconds[name]],
                }
                for name, results in runs.results.items()
            },
        }
        for row, prompt in enumerate(found)
    ]
