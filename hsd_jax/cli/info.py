"""`hsd info`: shows what a target or drafter holds, or measures how fast this processor is."""

from __future__ import annotations

import argparse

from hsd_jax.cli import options
from hsd_jax.settings import LoadSettings


def add_parser(commands) -> None:
    """Declares `hsd info`."""
    parser = options.add_command(
        commands,
        "info",
        run,
        "show what a checkpoint or drafter holds, or measure this processor",
        "Print configuration, parameter count, end tokens, tokenizer and fingerprint of a target (a name, a\n"
        "Hugging Face folder or a GGUF file) or of a drafter. All weights are read and checked. With --rates:\n"
        "measure this processor for two seconds and keep the rates. Draft trees are chosen by them.",
        """
hsd info smollm2
hsd info runs/demo-target
hsd info runs/demo/drafter
hsd info --rates
""",
    )
    what = "a target, as --target of hsd generate; or a folder written by `hsd train drafter`"
    parser.add_argument("target", metavar="NAME", nargs="?", help=what)
    parser.add_argument("--rates", action="store_true", help="measure, keep and show the rates of this processor")
    options.add_record(parser, LoadSettings, "revision")


def run(args: argparse.Namespace) -> int:
    """Prints the facts of one model, or of this processor, one per line."""
    if (args.target is None) == (not args.rates):
        raise ValueError("hsd info takes one of NAME and --rates")
    from hsd_jax.lab.bench.facts import facts_of

    facts = _rates() if args.rates else facts_of(options.source_of(args))
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    return 0


def _rates() -> dict[str, str]:
    """Measures the rates of this processor and returns them beside the shipped ones."""
    from hsd_jax.kernels import native
    from hsd_jax.planning import rates

    isa = rates.isa_here(True)
    if isa == native.OFF:
        raise ValueError(
            "--rates: the CPU kernels do not run on this processor, so it is not measured; the shipped rates are used"
        )
    found = rates.renewed(isa)
    ours, theirs = found.rates(isa), rates.shipped(isa)
    path = rates.kept_path(isa)
    return {
        "processor": found.device,
        "reads weights": f"{ours.bytes_per_second / 1e9:.0f} GB/s (shipped {theirs.bytes_per_second / 1e9:.0f})",
        "keeps in its cache": f"{ours.cached_bytes / 1e6:.0f} MB of the weights",
        "multiplies": f"{ours.flops_per_second / 1e9:.0f} GFLOP/s (shipped {theirs.flops_per_second / 1e9:.0f})",
        "with bfloat16 weights": f"{ours.narrow:.2f} times that (shipped {theirs.narrow:.2f})",
        "with int8 weights": f"{ours.integer:.2f} times that (shipped {theirs.integer:.2f})",
        "kept in": "nowhere: HSD_RATES is off" if path is None else str(path),
    }
