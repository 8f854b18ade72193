"""Compares our decoding with transformers' `generate` or llama.cpp: same checkpoint, prompts and machine.

    pip install 'hsd_jax[peers]'
    python benchmarks/peers.py --demo --prompts dev.jsonl --half report --limit 20 --assistant runs/demo-small \\
        --trees 8x5x2,7x6x1 --json peers.json
    python -m venv peers && peers/bin/pip install llama-cpp-python  # compiles llama.cpp for this machine
    python benchmarks/peers.py --demo --llama-cpp --peer-python peers/bin/python --prompts dev.jsonl --half report
    python benchmarks/peers.py --target smollm2 --llama-cpp --llama-dtypes bfloat16 Q8_0 Q4_1 --llama-lookup 4 10 \\
        --peer-python peers/bin/python --spec-bench question.jsonl --repeats 1 --json peers.json

Each framework has a process of its own (`peer_worker.py`), so two thread pools never share the cores. Only one of them
works at a time. For each prompt the methods take turns, in an order that rotates. All runs use batch 1, greedy
decoding, end tokens, and token ids as input and output. The first pass over the prompts warms up and is not timed.
There are two clocks:

* decode: from the end of the pass that reads the prompt to the end of the text. Tokens that this pass gave do not
  count. Our prefill leaves out the prompt's last token, so all our tokens come from later passes. The first pass of
  transformers gives one token, or more with drafts; that of llama.cpp gives one. So the clock divides tokens by the
  time of exactly the passes that gave them.
* whole call: from ids to ids, prefill included. All tokens count.

llama.cpp reads the target's weights from GGUF files, one for each of --llama-dtypes. This process writes them. It is
driven by its C functions, greedy sampler included. In GGUF a Mistral is a Llama without a sliding window, so prompts
and texts are kept within the target's window. Its bfloat16 and float16 also round activations to that type; its float32
keeps keys and values in float32. Q8_0 and Q4_1 store all matrices in that type, by llama.cpp's rounding without an
importance matrix. A GGUF target whose matrices already have the type is used unchanged. Products of these types round
activations to 8 bits, so such texts are compared only with plain texts of the same type. `--llama-lookup` drafts by the
prompt lookup of llama.cpp's Python package.

With --spec-bench the prompts are those of `hsd bench --spec-bench`, and a table per clock shows each task. If no peer
runs in float32, ours does not either.

Greedy text must be the same everywhere. Each difference is printed, with how far each side prefers its own token to the
other's. A gap as small as the noise of the arithmetic is a tie, a larger gap is a mistake. The exit status is 1 for a
mistake in float32. Texts are compared with the peer's plain texts in float32, or, if these are not measured, with those
of its first plain method.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf_writer import architecture, save_gguf

import hsd_jax
from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, add_value
from hsd_jax.config import ModelConfig
from hsd_jax.lab.bench.experiment import repeated_ngram_share
from hsd_jax.lab.bench.identity import first_difference
from hsd_jax.lab.bench.prompts import BenchPrompt, Workload, short_enough, spec_bench
from hsd_jax.lab.bench.tables import Table, print_tables
from hsd_jax.measure.speeds import FEWEST_BATCHES, bootstrap_ratio, parse_trees, spread
from hsd_jax.models.checkpoint import find
from hsd_jax.models.gguf_header import Header
from hsd_jax.tokenizer import Tokenizer

WORKER = Path(__file__).with_name("peer_worker.py")
CLOCKS = {"decode": ("decode_tokens", "decode_seconds"), "whole_call": ("num_tokens", "seconds")}
NEAR_TIE = 1e-3
"""Largest gap that counts as a tie. Logits of two float32 programs for one prefix may differ by about 1e-4."""
LLAMA_DTYPES = ("bfloat16", "float32", "float16")
LLAMA_QUANTIZED = ("Q8_0", "Q4_1")
QUANTIZED = (*LLAMA_QUANTIZED, "int8")
LOOKUP_NGRAM = 3
"""Longest n-gram that the lookup for llama.cpp searches for."""
SETTLE_SECONDS = 0.02
"""Pause before another process works, because the idle threads of a pool spin for some milliseconds."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the arguments. Prompts and trees are given as for `hsd bench`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("models")
    which = group.add_mutually_exclusive_group(required=True)
    which.add_argument("--demo", action="store_true", help="the bundled target and drafter")
    what = "as for `hsd`: a folder with a tokenizer; with --llama-cpp also a GGUF file"
    add_value(which, "--target DIR", str, what)
    add_value(group, "--drafter DIR", str, "of `hsd train drafter`; without it ours only decodes plainly")
    what = "a smaller model with the same vocabulary, for example one of configs/demo_small_lm.yaml"
    add_value(group, "--assistant DIR", str, what)
    options.add_prompt_arguments(parser)
    what = "its question.jsonl in place of --prompts: six tasks, --limit prompts of each"
    add_value(parser, "--spec-bench FILE", str, what)
    add_value(parser, "--max-new-tokens N", COUNT, "per prompt", 128)
    add_value(parser, "--repeats R", COUNT, "timed passes", 3)
    group = parser.add_argument_group("methods")
    add_value(group, "--trees NxDxW,...", str, "of our drafter, besides the tree that `decode` chooses")
    group.add_argument("--llama-cpp", action="store_true", help="compare with llama.cpp instead of transformers")
    what = "types of its weights; speeds are ratios to the plain speed of the first"
    kinds = (*LLAMA_DTYPES, *LLAMA_QUANTIZED)
    add_value(group, "--llama-dtypes", str, what, list(LLAMA_DTYPES), "the floats", choices=kinds, nargs="+")
    kinds = ("float32", "bfloat16")
    add_value(group, "--torch-dtypes", str, what, ["float32"], "float32", choices=kinds, nargs="+")
    what = "also measure llama.cpp with N tokens of llama-cpp-python's prompt lookup, for each N"
    add_value(group, "--llama-lookup N", COUNT, what, [], "none", nargs="+")
    what = "also measure ours with the target's matrices in 8 bits, as --quantize of `hsd`"
    add_value(group, "--quantize", str, what, choices=("int8",))
    what = "also measure ours with the assistant and with prompt lookup"
    group.add_argument("--same-methods", action="store_true", help=what)
    what = "also measure these constant draft lengths of transformers' assistant"
    add_value(group, "--assistant-tokens N", COUNT, what, [], "only its own schedule", nargs="+")
    add_value(group, "--lookup-tokens N", COUNT, "prompt_lookup_num_tokens of transformers", [10], "10", nargs="+")
    what = "threads of the peer (default: the number of cores, as for ours)"
    group.add_argument("--threads", "--torch-threads", type=COUNT, default=_cores(), metavar="N", help=what)
    what = "a Python with torch and transformers, or with llama_cpp"
    add_value(parser, "--peer-python PYTHON", str, what, sys.executable, "this one")
    add_value(parser, "--json OUT", str, "write every figure to this file")
    return parser


def prompt_files(args: argparse.Namespace) -> list[str]:
    """The prompt files. Empty: the demo's own prompts."""
    return [args.spec_bench] if args.spec_bench else list(options.record_of(args, Workload).prompts)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def transformers_methods(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The methods of the worker of transformers. The first one is the reference for speeds."""
    methods = []
    for dtype in dict.fromkeys(args.torch_dtypes):

        def add(kind: str, tokens: int | None = None, shown: str = "", dtype: str = dtype, **more) -> None:
            name = f"transformers {kind}{shown} {dtype}"
            methods.append({"name": name, "kind": kind, "dtype": dtype, "tokens": tokens, **more})

        add("plain")
        for tokens in dict.fromkeys([None, *args.assistant_tokens]) if args.assistant else ():
            add("assistant", tokens, "" if tokens is None else f" {tokens}", assistant=args.assistant)
        for tokens in dict.fromkeys(args.lookup_tokens):
            add("lookup", tokens, f" {tokens}")
    return methods


def llama_methods(args: argparse.Namespace, folder: str, target: str = "") -> list[dict[str, Any]]:
    """The methods of the worker of llama.cpp. The first one is the reference for speeds.

    Args:
      folder: where `write_gguf` writes the files.
      target: a folder, or a GGUF file, which is used unchanged if its matrices have the wanted type.
    """
    methods, own = [], stored_type(target)
    for dtype in dict.fromkeys(args.llama_dtypes):
        path = target if dtype == own else str(Path(folder) / f"{dtype}.gguf")
        methods.append({"name": f"llama.cpp plain {dtype}", "dtype": dtype, "path": path})
        for num in dict.fromkeys(args.llama_lookup):
            how = {"tokens": num, "ngram": LOOKUP_NGRAM}
            name = f"llama.cpp lookup {num} {dtype}"
            methods.append({"name": name, "dtype": dtype, "path": path} | how)
    return methods


def stored_type(target: str) -> str | None:
    """The quantized type of most matrices of a GGUF file. None for a folder and for floats."""
    if not target.endswith(".gguf"):
        return None
    kinds = Counter(place.kind_name for place in Header(target).places.values() if len(place.shape) > 1)
    [(kind, _)] = kinds.most_common(1)
    return kind if kind in LLAMA_QUANTIZED else None


def as_llama_cpp_has_it(config: ModelConfig) -> ModelConfig:
    """The configuration as the GGUF files give it: a Mistral is a Llama without a window."""
    if config.model_type != "mistral":
        return config
    return dataclasses.replace(config, model_type="llama", sliding_window=None, layer_types=())


def write_gguf(args: argparse.Namespace, target: str, folder: str) -> None:
    """Writes the files of `llama_methods`."""
    jax.config.update("jax_platforms", "cpu")  # leaves a GPU's memory to the workers
    checkpoint = find(target)
    config = as_llama_cpp_has_it(checkpoint.config)
    wanted = {m["path"]: m["dtype"] for m in llama_methods(args, folder, target) if m["path"] != target}
    weights = checkpoint.weights(jnp.float32) if wanted else {}
    for path, dtype in wanted.items():
        options.say(f"writing {path}")
        save_gguf(path, config, weights, dtype)


def hsd_methods(args: argparse.Namespace, drafter: str | None) -> list[dict[str, Any]]:
    """The methods of our worker, in float32, in the fastest dtype (None) and in 8 bits.

    For a tree of "chosen" `decode` chooses the tree. None is the default tree of the kind of drafter.
    """
    trees = [t.name for t in parse_trees(args.trees)] if args.trees else []
    methods = []
    peer_dtypes = args.llama_dtypes if args.llama_cpp else args.torch_dtypes
    dtypes = [*(["float32"] if "float32" in peer_dtypes else []), None, *([args.quantize] if args.quantize else [])]
    for dtype in dtypes:
        found = [("plain", None, None)]
        if drafter is not None:
            found += [("default", drafter, "chosen"), *(("tree", drafter, tree) for tree in trees)]
        if args.same_methods:
            found += [("assistant", args.assistant, None)] if args.assistant else []
            found += [("lookup", "lookup", None)]
        methods += [{"name": f"hsd_jax {n}", "drafter": d, "tree": t, "dtype": dtype} for n, d, t in found]
    return methods


class Worker:
    """A framework in its own process. It answers one request at a time."""

    def __init__(self, name: str, command: Sequence[str], config: dict[str, Any], env: dict[str, str]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=env
        )
        try:
            self.about = self.ask(**config)
        except BaseException:
            self.close()
            raise
        self.methods = self.about.pop("methods")

    def ask(self, **request) -> dict[str, Any]:
        """The answer to one request.

        Raises:
          ValueError: if the worker answers with an error, or ends.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the worker has ended; its answer may say why
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(f"the process of {self.name} ended (status {self.process.wait()}); see its output above")
        found = json.loads(line)
        if "error" in found:
            raise ValueError(f"{self.name}: {found['error']}")
        return found

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def peer_config(args: argparse.Namespace, folder: str, context: int, target: str = "") -> dict[str, Any]:
    """The part of the peer's configuration that ours does not have. `context`: tokens of the longest row."""
    if not args.llama_cpp:
        return {"methods": transformers_methods(args), "threads": args.threads}
    return {"methods": llama_methods(args, folder, target), "threads": args.threads, "context": context}


def start_workers(
    args: argparse.Namespace, target: str, drafter: str | None, eos: Sequence[int], context: int, folder: str
) -> list[Worker]:
    """Starts the peer, then ours, which uses the same hsd_jax as this process. `folder`: as in `llama_methods`."""
    shared = {"target": target, "eos": list(eos), "max_new_tokens": args.max_new_tokens}
    # On a GPU two processes share the memory; by default jax would take three quarters of it at once.
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ours = env | {"PYTHONPATH": os.pathsep.join([str(Path(hsd_jax.__file__).parents[1]), env.get("PYTHONPATH", "")])}
    workers = []
    try:
        peer, config = (
            "llama.cpp" if args.llama_cpp else "transformers",
            shared | peer_config(args, folder, context, target),
        )
        workers.append(Worker(peer, [args.peer_python, str(WORKER), peer], config, env))
        config = shared | {"methods": hsd_methods(args, drafter)}
        workers.append(Worker("hsd_jax", [sys.executable, str(WORKER), "hsd_jax"], config, ours))
    except BaseException:
        close_all(workers)
        raise
    return workers


def close_all(workers: Sequence[Worker]) -> None:
    """Ends all processes."""
    for worker in workers:
        worker.close()


def collect(
    workers: Sequence[Worker], prompts: Sequence[Sequence[int]], repeats: int, progress: Callable[[str], None]
) -> dict[str, list[list[dict[str, Any]]]]:
    """`answers[method][pass][prompt]`; pass 0 is the warm-up. The methods take turns for each prompt."""
    turns = [(worker, method["name"]) for worker in workers for method in worker.methods]
    answers: dict[str, list[list[dict[str, Any]]]] = {name: [] for _, name in turns}
    last = None
    for number in range(1 + repeats):
        for name in answers:
            answers[name].append([])
        for i, prompt in enumerate(prompts):
            if i % 10 == 0:
                what = f"timing, pass {number} of {repeats}" if number else "warming up"
                progress(f"{what}: prompt {i + 1} of {len(prompts)}")
            first = (number + i) % len(turns)
            for worker, name in [*turns[first:], *turns[:first]]:
                if worker is not last:
                    time.sleep(SETTLE_SECONDS)
                last = worker
                found = worker.ask(op="decode", method=name, prompt=list(prompt))
                answers[name][number].append(found | {"num_tokens": len(found["tokens"])})
    return answers


def speeds(passes: Sequence[Sequence[dict[str, Any]]], clock: str) -> list[float]:
    """Tokens per second of every timed pass by one of the CLOCKS."""
    tokens, seconds = CLOCKS[clock]
    return [sum(a[tokens] for a in answers) / sum(a[seconds] for a in answers) for answers in passes]


def ratio(passes: Sequence[Sequence[dict]], rival: Sequence[Sequence[dict]], clock: str) -> dict[str, Any]:
    """Tokens per second over the rival's, with the spread of passes and a bootstrap over prompts as in `hsd bench`."""
    tokens, seconds = CLOCKS[clock]

    def middle(of: str) -> np.ndarray:
        return np.array([np.median([[a[of] for a in one] for one in who], axis=0) for who in (passes, rival)])

    counts, times = middle(tokens), middle(seconds)
    overall = counts.sum(1) / times.sum(1)
    low, high = bootstrap_ratio(counts, times) if counts.shape[1] >= FEWEST_BATCHES else (None, None)
    each = [a / b for a, b in zip(speeds(passes, clock), speeds(rival, clock), strict=True)]
    return {**spread(each), "value": float(overall[0] / overall[1]), "low": low, "high": high}


def differences(
    name: str, reference: str, answers: dict[str, list[list[dict]]], found: Sequence[BenchPrompt]
) -> list[dict]:
    """The first difference of each text from the reference's. A token of None means that the text ended."""
    parted = []
    for row, (own, other) in enumerate(zip(answers[name][0], answers[reference][0], strict=True)):
        index = first_difference(own["tokens"], other["tokens"])
        if index is not None:
            token, wanted = (a["tokens"][index] if index < a["num_tokens"] else None for a in (own, other))
            parted.append(
                {"prompt": found[row].name, "row": row, "index": index, "token": token, "reference_token": wanted}
            )
    return parted


def explain(difference: dict, prompt: Sequence[int], text: Sequence[int], own: Callable, reference: Callable) -> dict:
    """Adds to a difference its gaps: how far the logits of each side prefer its own token to the other's.

    Args:
      text: the text of either side; they agree before the difference.
      own, reference: `gap(tokens, candidates)` of the two sides.
    """
    token, wanted = difference["token"], difference["reference_token"]
    if token is None or wanted is None:  # one side did not honour an end token, or a length
        return difference | {"gap": None, "reference_gap": None, "is_tie": False}
    tokens = [*prompt, *text[: difference["index"]]]
    gap, reference_gap = own(tokens, [token, wanted]), reference(tokens, [wanted, token])
    return difference | {"gap": gap, "reference_gap": reference_gap, "is_tie": max(gap, reference_gap) < NEAR_TIE}


def text_reference(methods: Sequence[dict[str, str]]) -> dict[str, str]:
    """The reference for texts: the peer's plain method in float32, where differences are ties, else its first one.

    A peer with only quantized weights has none; then it is our float32 method, or our first one.
    """
    peer = methods[0]["name"].split()[:2]
    plain = [m for m in methods if m["name"].split()[:2] == peer and m["dtype"] not in QUANTIZED]
    plain = plain or [m for m in methods if m["name"].startswith("hsd_jax")]
    return next((m for m in plain if m["dtype"] == "float32"), plain[0])


def text_reference_of(name: str, methods: Sequence[dict[str, str]]) -> str:
    """The method whose texts this one's are compared with: for quantized weights, plain decoding of the same type."""
    dtypes = {m["name"]: m["dtype"] for m in methods}
    if dtypes[name] in QUANTIZED:
        return next(other for other, dtype in dtypes.items() if dtype == dtypes[name])
    return text_reference(methods)["name"]


def over_fastest(rows: Sequence[dict], answers: dict[str, list[list[dict]]], peers: Sequence[str]) -> dict[str, dict]:
    """For each clock the fastest method of the peer, and the speeds of our methods over it."""
    found = {}
    for clock in CLOCKS:
        medians = {row["method"]: row["tokens_per_second"][clock]["median"] for row in rows}
        best = max(peers, key=lambda name: medians[name])
        ours = [name for name in medians if name not in peers]
        over = {name: ratio(answers[name][1:], answers[best][1:], clock) for name in ours}
        found[clock] = {"method": best, "over": over}
    return found


def result_rows(
    methods: Sequence[dict[str, str]], answers: dict[str, list[list[dict]]], found: Sequence[BenchPrompt]
) -> list[dict[str, Any]]:
    """The figures of every method. Speeds are ratios to the first method, texts are compared by `text_reference_of`."""
    reference, rows = methods[0]["name"], []
    for method in methods:
        warm, *timed = answers[method["name"]]
        num_decoded = max(sum(a["decode_tokens"] for a in warm), 1)
        seconds_a_token = [sum(a["decode_seconds"] for a in p) / num_decoded for p in timed]
        text = text_reference_of(method["name"], methods)
        passes = sum(a["passes"] for a in warm)
        rows.append(
            {
                "method": method["name"],
                "dtype": method["dtype"],
                "num_tokens": sum(a["num_tokens"] for a in warm),
                "tau": sum(a["num_tokens"] for a in warm) / max(passes, 1),
                "ms_per_token": spread([1e3 * s for s in seconds_a_token]),
                "tokens_per_second": {clock: spread(speeds(timed, clock)) for clock in CLOCKS},
                "over_reference": {clock: ratio(timed, answers[reference][1:], clock) for clock in CLOCKS},
                "num_texts": len(found),
                "differences": differences(method["name"], text, answers, found),
            }
        )
    return rows


def rows_by_task(
    methods: Sequence[dict[str, str]],
    answers: dict[str, list[list[dict]]],
    found: Sequence[BenchPrompt],
    sizes: dict[str, int],
) -> dict[str, list[dict[str, Any]]]:
    """`result_rows` of each task; `sizes` says how many of the prompts are whose, in order."""
    rows, start = {}, 0
    for task, num in sizes.items():
        part = slice(start, start + num)
        own = {name: [one[part] for one in passes] for name, passes in answers.items()}
        rows[task] = result_rows(methods, own, found[part])
        start += num
    return rows


def run_methods(
    args: argparse.Namespace,
    workers: Sequence[Worker],
    found: Sequence[BenchPrompt],
    tokenizer,
    sizes: dict[str, int] | None = None,
) -> dict:
    """Runs every method on every prompt and returns the whole record; `sizes` as of `rows_by_task`."""
    prompts = [p.tokens(tokenizer) for p in found]
    answers = collect(workers, prompts, args.repeats, options.say)
    methods = [method for worker in workers for method in worker.methods]
    home = {method["name"]: worker for worker in workers for method in worker.methods}

    def gap_of(name: str) -> Callable:
        def gap(tokens: Sequence[int], candidates: Sequence[int]) -> float:
            return home[name].ask(op="gap", method=name, tokens=list(tokens), candidates=list(candidates))["gap"]

        return gap

    rows, reference = result_rows(methods, answers, found), text_reference(methods)["name"]
    tasks = rows_by_task(methods, answers, found, sizes or {})
    for row in rows:
        own, other = answers[row["method"]][0], text_reference_of(row["method"], methods)
        row["differences"] = [
            explain(d, prompts[d["row"]], own[d["row"]]["tokens"], gap_of(row["method"]), gap_of(other))
            for d in row["differences"]
        ]
    lengths = sorted(map(len, prompts))
    return {
        "command": args.command_line,
        "reference": methods[0]["name"],
        "text_reference": reference,
        "settings": {
            "batch": 1,
            "temperature": 0.0,
            "max_new_tokens": args.max_new_tokens,
            "repeats": args.repeats,
            "prompt_files": [str(p) for p in prompt_files(args) or ["the demo's own"]],
            "half": options.record_of(args, Workload).half,
            "num_prompts": len(found),
            "prompt_tokens": {"min": lengths[0], "median": statistics.median(lengths), "max": lengths[-1]},
            "clocks": {"decode": "without the pass that reads the prompt", "whole_call": "with it"},
            "kind_of_figures": "measured",
        },
        "frameworks": {worker.name: worker.about for worker in workers},
        "repeated_4gram_share": repeated_ngram_share([a["tokens"] for a in answers[reference][0]]),
        "rows": rows,
        "tasks": tasks,
        "over_fastest": over_fastest(rows, answers, [method["name"] for method in workers[0].methods]),
        "answers": answers,
    }


def status(record: dict[str, Any]) -> int:
    """1 if a float32 text differs by more than a tie from a float32 reference, else 0."""
    rows = [row for row in record["rows"] if row["dtype"] == "float32"]
    if record["text_reference"] not in [row["method"] for row in rows]:
        return 0
    return int(any(not d["is_tie"] for row in rows for d in row["differences"]))


COLUMNS = ("method", "tau", "ms/token", "tokens/s", "over reference", "whole call", "over", "same text")


def cells(row: dict[str, Any]) -> list[str]:
    """The cells of a table row."""

    def speed(clock: str) -> str:
        found = row["tokens_per_second"][clock]
        return f"{found['median']:.0f} ({found['min']:.0f}-{found['max']:.0f})"

    over = row["over_reference"]
    low, high = over["decode"]["low"], over["decode"]["high"]
    return [
        row["method"],
        f"{row['tau']:.2f}",
        f"{row['ms_per_token']['median']:.2f}",
        speed("decode"),
        f"{over['decode']['value']:.2f}" + ("" if low is None else f" [{low:.2f}, {high:.2f}]"),
        speed("whole_call"),
        f"{over['whole_call']['value']:.2f}",
        f"{row['num_texts'] - len(row['differences'])}/{row['num_texts']}",
    ]


def versions(about: dict[str, Any]) -> str:
    """The versions of the peer."""
    if "llama_cpp" in about:
        return f"llama-cpp-python {about['llama_cpp']} ({about['system'].strip()})"
    return f"torch {about['torch']} on {about['device']}, transformers {about['transformers']}"


def print_record(record: dict[str, Any]) -> None:
    """Prints the tables, the differences of texts, and the machine and versions."""
    settings = record["settings"]
    title = f"{settings['num_prompts']} prompts x {settings['max_new_tokens']} new tokens, greedy, batch 1"
    shown = [Table(f"{title}; over {record['reference']}", COLUMNS, [cells(row) for row in record["rows"]])]
    for clock in CLOCKS if record["tasks"] else ():
        heads = ["task", *(row["method"] for row in record["rows"])]
        over = lambda row, clock=clock: f"{row['over_reference'][clock]['value']:.2f}"  # noqa: E731
        rows = [[task, *map(over, own)] for task, own in record["tasks"].items()]
        shown.append(Table(f"{clock.replace('_', ' ')}, over {record['reference']}", heads, rows))
    lines = []
    for row in record["rows"]:
        for d in row["differences"]:
            gaps = "an end of text" if d["gap"] is None else f"gaps {d['gap']:.2g} and {d['reference_gap']:.2g}"
            verdict = "a tie" if d["is_tie"] else "more than a tie"
            lines.append(f"{row['method']}, {d['prompt']}: first differs at token {d['index']}, {gaps}: {verdict}")
    for clock, best in record["over_fastest"].items():
        over = ", ".join(f"{name} {found['value']:.2f}" for name, found in best["over"].items())
        lines.append(f"{clock.replace('_', ' ')}, over the peer's fastest, {best['method']}: {over}")
    (peer, theirs), (_, ours) = record["frameworks"].items()
    lines += [
        "tokens/s without and (whole call) with prefill: median (range) of the passes; [95 % interval over prompts]",
        f"tau includes the pass over the prompt for {peer}, and not for ours",
        f"texts are compared with those of {record['text_reference']} (quantized ones with plain ones of their type);"
        f" repeated 4-grams in them:"
        f" {record['repeated_4gram_share']:.1%}",
        f"{ours['cpu']}, {ours['cores']} cores; {versions(theirs)}, {theirs['threads']} threads; jax {ours['jax']} on"
        f" {ours['device']}",
        record["command"],
    ]
    print_tables(shown, lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and writes. Returns 1 if float32 texts differ, 2 for bad input."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(argv)
    args.command_line = " ".join(["python benchmarks/peers.py", *argv])
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"peers: error: {error}", file=sys.stderr)
        return 2


def check_assistant(folder: str, vocab_size: int, tokenizer: Tokenizer) -> None:
    """Checks the assistant before anything runs.

    Raises:
      ValueError: if its vocabulary differs from the target's.
      FileNotFoundError: if there is no model in the folder.
    """
    assistant = find(folder)
    own = assistant.tokenizer
    if assistant.config.vocab_size != vocab_size or (own and own.conflict_with(tokenizer)):
        raise ValueError(f"--assistant {folder}: has another vocabulary than the target")


def run(args: argparse.Namespace) -> int:
    """Runs the whole comparison and returns the exit status."""
    checkpoint = find("demo" if args.demo else args.target)
    target, config, tokenizer = str(checkpoint.path), checkpoint.config, checkpoint.tokenizer
    drafter = args.drafter or (None if checkpoint.drafter is None else str(checkpoint.drafter))
    max_len = config.max_position
    if args.llama_cpp:
        architecture(as_llama_cpp_has_it(config))  # raises if the target cannot be written as GGUF
        if args.assistant and not args.same_methods:
            raise ValueError("--assistant: llama.cpp is measured without one; use --same-methods to give it to ours")
        if config.sliding_window is not None and config.model_type == "mistral":
            max_len = min(max_len, config.sliding_window)
            options.say(f"llama.cpp has no sliding window: prompts and texts are kept within the target's {max_len}")
    # This process loads no weights: it only reads prompts and counts tokens.
    about = types.SimpleNamespace(tokenizer=tokenizer, max_len=max_len)
    sizes = None
    if args.spec_bench:
        options.refuse(args, "--spec-bench: it says what is asked", "prompts", "half", "skip_bad_lines")
        room = max_len - args.max_new_tokens
        by_task = spec_bench(args.spec_bench, options.record_of(args, Workload).limit or 20, tokenizer)
        by_task = {task: short_enough(own, tokenizer, room) for task, own in by_task.items()}
        sizes = {task: len(own) for task, own in by_task.items()}
        found = [prompt for own in by_task.values() for prompt in own]
    else:
        found = options.prompts_of(args, about)
    assert tokenizer is not None  # the readers of prompts have checked it
    if args.assistant is None and not args.llama_cpp:
        options.say("no assistant model: use --assistant DIR to measure assisted decoding too")
    elif args.assistant is not None:
        check_assistant(args.assistant, config.vocab_size, tokenizer)
    if drafter is None:
        options.say("no drafter: ours only decodes plainly; use --drafter DIR")
    eos = checkpoint.eos
    context = max(len(p.tokens(tokenizer)) for p in found) + args.max_new_tokens
    with tempfile.TemporaryDirectory() as folder:
        if args.llama_cpp:
            write_gguf(args, target, folder)
        workers = start_workers(args, target, drafter, eos, context, folder)
        try:
            record = run_methods(args, workers, found, tokenizer, sizes)
        finally:
            close_all(workers)
    print_record(record)
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        options.say(f"wrote {args.json}")
    return status(record)


if __name__ == "__main__":
    sys.exit(main())
