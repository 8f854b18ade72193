"""Reads the drafters of `reference.py` and `train.py`, and compares what they draft with speculators' own forward.

    python benchmarks/published/compare.py OUT [NAME ...] [--target FOLDER] [--decode]

Per drafter: in how many contexts the greedy chain is that of the reference, and how many accept as much. `--decode`
also decodes the texts of a trained drafter with chains and with a tree of 16 nodes, and compares the tokens per pass.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.table import make_drafter
from hsd_jax.infer.sampling import row_keys
from hsd_jax.models.target import forward_sequence
from hsd_jax.types import RoundInputs, SamplingParams

ROWS, NEW_TOKENS = 64, 96


def chains(params: Any, texts: np.ndarray, contexts: np.ndarray, depth: int) -> np.ndarray:
    """The greedy chain of each context (text, n): tokens 0..n-1 have run through the target, token n is the root."""
    target, config = params.target_config, params.drafter_config
    drafter, models = make_drafter(target, config, TreeConfig.chain(depth)), {"target": params.target}
    length, models = texts.shape[1], models | {"drafter": params.drafter}

    @jax.jit
    def drafted(models, tokens, root):
        rows = len(root)
        output = forward_sequence(models["target"], target, tokens, feature_layers=config.feature_layers)
        state = drafter.init(tokens, root + 1, length + 2 * depth)
        following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        state = drafter.read(models, state, output, tokens, following, 0, root + 1)
        greedy = SamplingParams(jnp.zeros(rows), jnp.zeros(rows, jnp.int32), jnp.ones(rows))
        keys, noise = row_keys([(0, row) for row in range(rows)]), jnp.zeros((rows, depth + 1, target.vocab_size))
        inputs = RoundInputs(tokens[jnp.arange(rows), root], root, keys, greedy, noise, jnp.ones(rows, bool))
        return drafter.draft(models, state, inputs)[0].tokens[:, 1:]

    found = []
    for start in range(0, len(contexts), ROWS):
        text, root = np.resize(contexts[start : start + ROWS], (ROWS, 2)).T  # the last rows are filled up
        found.append(drafted(models, jnp.asarray(texts[text]), jnp.asarray(root, jnp.int32)))
    return np.concatenate(found)[: len(contexts)]


def compare(folder: Path, target: Path, decodes: bool) -> None:
    """Prints a line for the drafter in a folder, or a few."""
    reference = np.load(folder / "reference.npz")
    try:
        params = hsd_jax.load(target, drafter=folder, dtype="float32", precision="exact", probe=False)
    except (OSError, ValueError) as error:
        return print(f"refused: {error}")
    texts = np.maximum(reference["texts" if "texts" in reference else "ids"], 0).astype(np.int32)
    contexts, of_chain = reference["contexts"], reference.get("chain_contexts", reference["contexts"])
    depth = min(reference["chain"].shape[1], params.drafter_config.num_steps)
    same = (chains(params, texts, of_chain, depth) == reference["chain"][:, :depth]).all(1)
    line = f"{folder.name} ({params.drafter_config.kind}): {same.sum()} of {len(same)} chains of {depth} equal"
    if "accepted" in reference:
        ours = chains(params, texts, contexts, depth)
        true = np.stack([texts[text, root + 1 : root + 1 + depth] for text, root in contexts])
        accepted = np.cumprod(ours == true, 1).sum(1)
        depths = " ".join(f"{(accepted > d).mean():.3f}" for d in range(depth))
        line += f"; accepted equal in {(accepted == reference['accepted']).sum()} of {len(contexts)}, by depth {depths}"
    print(line, flush=True)
    if decodes and "accepted" in reference:
        prompts = [text[:n].tolist() for text, n in zip(texts, reference["prompt_lengths"], strict=True)]
        trees_over_chains(params, prompts)


def trees_over_chains(params: Any, prompts: list[list[int]]) -> None:
    """tau of chains and of trees of 16 nodes, one row, greedy, and the 95 % interval of the ratio over prompts."""
    most, passes = params.drafter_config.num_steps, {}
    plain = [hsd_jax.decode(params, [prompt], NEW_TOKENS, speculate=False).text for prompt in prompts]
    for tree in (TreeConfig.chain(min(most, 7)), TreeConfig(16, min(most, 6), 3)):
        found = [hsd_jax.decode(params, [prompt], NEW_TOKENS, tree=tree, adaptive=False) for prompt in prompts]
        num_same = sum(one.text == text for one, text in zip(found, plain, strict=True))
        num = np.array([one.stats.num_target_passes for one in found])
        passes[tree.name] = num * [one.stats.tau for one in found], num
        tau = passes[tree.name][0].sum() / num.sum()
        print(f"  {tree.name}: tau {tau:.2f}, {num_same} of {len(prompts)} texts plain", flush=True)
    draws = np.random.default_rng(0).integers(len(prompts), size=(4000, len(prompts)))
    chain, tree = (tokens[draws].sum(1) / num[draws].sum(1) for tokens, num in passes.values())
    low, high = np.percentile(tree / chain, [2.5, 97.5])
    print(f"  tree over chain: {(tree / chain).mean():.2f} [{low:.2f}, {high:.2f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="default: all folders with a reference.npz")
    parser.add_argument("--target", type=Path, help="of trained drafters; default: OUT/targets/demo")
    parser.add_argument("--decode", action="store_true")
    asked = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    for name in asked.names or sorted(path.parent.name for path in asked.out.glob("*/reference.npz")):
        reference = np.load(asked.out / name / "reference.npz")
        own = asked.out / "targets" / str(reference["target"]) if "target" in reference else None
        compare(asked.out / name, own or asked.target or asked.out / "targets" / "demo", asked.decode)


if __name__ == "__main__":
    main()
