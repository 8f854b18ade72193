"""Measures how tau depends on the length of the context, and how much of that comes from the text itself.

At each length c the target continues the first c tokens of a text greedily, plainly and with a chain of drafts
(`whole`). `last` gives it only the last 100 of these tokens. Neither model then sees a long context, so a change of tau
comes from the text. There are two kinds of text. `own` is written by the target after the beginning of a dialogue,
sampled at 0.8, past end tokens. `joined` is one dialogue after another; for these the bits per byte are printed too.
`--window` and `--target-window` replace the windows of the pair's configurations ("own"); "none" removes a window.

    python benchmarks/contexts.py --demo --prompts dev.jsonl --half tune --limit 12
    python benchmarks/contexts.py --demo --prompts dev.jsonl --half tune --limit 12 --window none --target-window none
"""

from __future__ import annotations

import argparse
import dataclasses

import hsd_jax
from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, add_value
from hsd_jax.config import FULL, SLIDING, TreeConfig
from hsd_jax.lab.bench import quality
from hsd_jax.params import Params

BEGINNING, LAST, NEAR, AHEAD = 48, 100, 256, 64
"""Numbers of tokens: the beginning of a dialogue for an own text; what `last` keeps of a context; the short context of
bits per byte; and the tokens after each context whose bits per byte are measured."""


def with_windows(params: Params, window: str, target_window: str) -> Params:
    """The same weights with other windows; "own" keeps a window."""
    target, drafter = params.target_config, params.drafter_config
    if target_window != "own":
        size = None if target_window == "none" else int(target_window)
        kind = FULL if size is None else SLIDING
        target = dataclasses.replace(target, sliding_window=size, layer_types=(kind,) * target.num_layers)
    if window != "own":
        drafter = dataclasses.replace(drafter, window=None if window == "none" else int(window))
    return params.replace(target_config=target, drafter_config=drafter)


def own_texts(params: Params, dialogues: list[list[int]], length: int) -> list[list[int]]:
    """The beginning of each dialogue with the target's continuation, `length` tokens in all."""
    begun = [dialogue[:BEGINNING] for dialogue in dialogues]
    new = [length - len(text) for text in begun]
    seeds = list(range(len(begun)))
    out = hsd_jax.decode(params, begun, max_new_tokens=new, temperature=0.8, seed=seeds, eos=(), speculate=False)
    return [text + row[:num].tolist() for text, row, num in zip(begun, out.tokens, new, strict=True)]


def joined_texts(params: Params, dialogues: list[list[int]], length: int) -> list[list[int]]:
    """Dialogues joined one after another and cut at `length`; each text starts with a different dialogue."""
    num_special = len(params.tokenizer.encode(""))  # only the first dialogue keeps its start token
    line = params.tokenizer.encode("\n")[num_special:]
    texts = []
    for first in range(len(dialogues)):
        text, at = list(dialogues[first]), first
        while len(text) < length:
            at = (at + 1) % len(dialogues)
            text += line + dialogues[at][num_special:]
        texts.append(text[:length])
    return texts


def tau_behind(params: Params, contexts: list[list[int]], num_new: int) -> tuple[float, str, int]:
    """Tau and acceptance by depth of greedy decoding, and the number of tokens that differ from plain decoding."""
    drafted, plain = (hsd_jax.decode(params, contexts, num_new, eos=(), speculate=is_on) for is_on in (True, False))
    acceptance = " ".join(f"{share:.2f}" for share in drafted.stats.conditional_acceptance)
    return drafted.stats.tau, acceptance, int((drafted.tokens != plain.tokens).sum())


def bits_per_byte(params: Params, texts: list[list[int]], first: int, last: int, start: int) -> float:
    """Bits per byte of tokens `first` to `last`, given the tokens from `start` on."""
    nats, num_bytes = 0.0, 0
    for text in texts:
        nats += quality.text_nats(params.target, params.target_config, text[start:last], first - start)
        num_bytes += len(params.tokenizer.decode(text[first:last]).encode())
    return quality.bits_per_byte(nats, num_bytes)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pair = parser.add_mutually_exclusive_group(required=True)
    pair.add_argument("--demo", action="store_const", const="demo", help="the bundled pair")
    pair.add_argument("--target", help="a Hugging Face folder, with --drafter")
    parser.add_argument("--drafter", help="a folder of hsd train drafter")
    options.add_prompt_arguments(parser, 12)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 100, 256, 512, 1024, 1800], metavar="TOKENS")
    add_value(parser, "--max-new-tokens N", COUNT, "per text", 96)
    parser.add_argument("--nodes", type=int, default=8, help="nodes of the chain (default: 8)")
    parser.add_argument("--window", default="own", help="the trunk's window: a number, none, own (default: own)")
    parser.add_argument("--target-window", default="own", help="the same for every layer of the target")
    args = parser.parse_args(arguments)
    chain = TreeConfig.chain(args.nodes - 1)
    params = hsd_jax.load(args.demo, target=args.target, drafter=args.drafter, tree=chain)
    params = with_windows(params, args.window, args.target_window)
    found = options.prompts_of(args, params)
    dialogues = [prompt.tokens(params.tokenizer, with_rest=True) for prompt in found]
    length = max(args.contexts) + AHEAD
    for name, texts in (
        ("own", own_texts(params, dialogues, length)),
        ("joined", joined_texts(params, dialogues, length)),
    ):
        for context in sorted(args.contexts):
            for what, start in (("whole", 0), ("last", max(context - LAST, 0))):
                pieces = [text[start:context] for text in texts]
                tau, acceptance, num_differ = tau_behind(params, pieces, args.max_new_tokens)
                print(f"{name:6} {context:5} {what:5} tau {tau:.2f}  {acceptance}  {num_differ} differ", flush=True)
    for context in sorted(args.contexts):
        whole, near = (
            bits_per_byte(params, texts, context, context + AHEAD, start) for start in (0, max(context - NEAR, 0))
        )
        print(
            f"joined {context:5} bits per byte {whole:.2f}, {near:.2f} given the last {NEAR} tokens alone", flush=True
        )


if __name__ == "__main__":
    main()
