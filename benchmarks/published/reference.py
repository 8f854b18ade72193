"""Writes small targets and random drafters with `speculators`, and what those drafters compute.

    python benchmarks/published/reference.py OUT [NAME ...]

It needs torch, transformers and speculators 0.9.0, not this package. drafters.yaml lists the targets and drafters,
README.md says what the files hold. OUT/targets gets the targets, OUT/NAME a drafter with `reference.npz` beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.dspark import core as dspark_core
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

SEQUENCES, TOKENS, DEPTHS, CONTEXTS = 4, 64, 5, 50
"""Texts of random tokens, their length, drafted depths of an eagle3 chain, contexts of each text."""
VOCABULARY, DRAFT_VOCABULARY, LAYERS, WIDTH, BLOCK = 300, 120, 8, 64, 6
DEFAULT_TAPS = [2, LAYERS // 2, LAYERS - 3]
"""The layers whose inputs speculators taps unless a file names others."""
KINDS = {
    "eagle3": (Eagle3DraftModel, Eagle3SpeculatorConfig),
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
    "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
    "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights that keep the size of a state, norms away from 1 and logits with a spread of about 2."""
    random = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        if "norm." in name:
            value = 0.5 + torch.rand(weight.shape, generator=random)
        elif weight.ndim == 1:
            value = 0.3 * torch.randn(weight.shape, generator=random)
        elif "embed" in name or "codebook" in name:
            value = 0.5 * torch.randn(weight.shape, generator=random)
        else:
            gain = 2.0 if "lm_head" in name else 1.0
            value = gain * torch.randn(weight.shape, generator=random) / weight.shape[-1] ** 0.5
        weight.data.copy_(value)


def layer_config(heads: str, **keys: Any) -> LlamaConfig | Qwen3Config:
    """The configuration of a small transformer; Qwen3 has a head size that is not width / heads."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "attn_implementation": "eager",
        "pad_token_id": None,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    return Qwen3Config(**sizes | {"head_dim": 32} | keys) if heads == "qwen3" else LlamaConfig(**sizes | keys)


def residuals(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """S(0) ... S(layers), [layers + 1, B, T, width], and the logits of a target of transformers."""
    taps: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: taps.append(args[0]))
        for layer in (*model.model.layers, model.model.norm)
    ]
    with torch.no_grad():
        logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    return torch.stack(taps), logits


class Target:
    """A random target that transformers wrote, with its texts and states."""

    def __init__(self, folder: Path, seed: int, heads: str = "llama", **keys: Any) -> None:
        kind = Qwen3ForCausalLM if heads == "qwen3" else LlamaForCausalLM
        self.model: Any = kind(layer_config(heads, num_hidden_layers=LAYERS, **keys)).eval()
        randomise(self.model, seed)
        self.model.tie_weights()
        self.model.save_pretrained(folder)
        self.name, self.architecture = folder.name, kind.__name__
        self.ids = torch.randint(0, VOCABULARY - 1, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(seed))
        self.states, logits = residuals(self.model, self.ids)
        np.savez(folder / "states.npz", ids=self.ids, states=self.states, logits=logits)


def contexts() -> list[tuple[int, int]]:
    """Text and number of its tokens that ran through the target."""
    return [(text, int(n)) for text in range(SEQUENCES) for n in np.linspace(1, TOKENS - 10, CONTEXTS).round()]


def to_target(model: Any, draft_ids: torch.Tensor) -> torch.Tensor:
    """Draft ids as ids of the target: `d2t` holds offsets."""
    return draft_ids if model.d2t is None else draft_ids + model.d2t[draft_ids]


def eagle3_chain(model: Any, ids: torch.Tensor, features: torch.Tensor, n: int) -> dict[str, torch.Tensor]:
    """The greedy chain after n tokens ran and token n was emitted, by the model's own forward over its own tokens.

    ids [> n], features [>= n, taps * width]. Pair t is feature t with token t + 1. The forward feeds step k of pair t
    the token of pair t + k, so appending the chain makes it feed the chain.
    """
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda *call: seen.append(call[2]))
    chain: list[int] = []
    with torch.no_grad():
        for depth in range(DEPTHS):
            tokens = torch.cat([ids[1 : n + 1], torch.tensor(chain, dtype=ids.dtype)])[None]
            rows = torch.cat([features[:n], features.new_zeros(len(chain), features.shape[1])])[None]
            seen.clear()
            model(hidden_states=rows, input_ids=tokens, document_ids=torch.zeros_like(tokens), ttt_steps=depth + 1)
            chain.append(int(to_target(model, seen[depth][0, n - 1].argmax())))
    hook.remove()
    return {"logits": torch.stack([step[0, n - 1] for step in seen]), "chain": torch.tensor(chain)}


def dspark_forward(model: Any, **call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [slots, Vd] and confidence [slots] that its whole forward hands to its loss, which is not computed."""
    kept: list[Any] = []
    compute = dspark_core.compute_metrics
    dspark_core.compute_metrics = lambda *args, **_: (kept.extend(args[:3]), None)
    model(**call)
    dspark_core.compute_metrics = compute
    return kept[0][0], None if kept[2] is None else kept[2][0]


def block_chain(model: Any, ids: torch.Tensor, features: torch.Tensor, n: int) -> dict[str, torch.Tensor]:
    """One block anchored at token n, which was emitted and has not run; the features before n are its context.

    Logits of every slot before and after the Markov head, along the greedy chain, and logits of the confidence head.
    """
    size, first = model.block_size, 0 if model.config.sample_from_anchor else 1
    tokens = torch.cat([ids[: n + 1], ids.new_full((2 * size,), model.mask_token_id)])[None]
    rows = torch.cat([features[:n], features.new_zeros(tokens.shape[1] - n, features.shape[1])])[None]
    call = {
        "input_ids": tokens,
        "hidden_states": rows,
        "loss_mask": (torch.arange(tokens.shape[1]) == n).long()[None],  # the forward takes its anchors from it
        "verifier_last_hidden_states": rows[..., : model.hidden_size],
        "document_ids": torch.zeros_like(tokens),
        "max_anchors": 1,
    }
    with torch.no_grad():
        hidden, before, *_ = model._backbone_forward(**call)
        found = {"hidden": hidden[0], "before": before[0], "after": before[0]}
        if isinstance(
            model, DSparkDraftModel
        ):  # its forward is fed the text's tokens: slot by slot, those of the chain
            for slot in range(first, size):
                found["after"], confidence = dspark_forward(model, **call)
                tokens[0, n + 1 + slot - first] = to_target(model, found["after"][slot].argmax())
            found |= {} if confidence is None else {"confidence": confidence}
    return found | {"logits": found["after"][first:], "chain": to_target(model, found["after"][first:].argmax(-1))}


def drafter(folder: Path, kind: str, target: Target, row: dict[str, Any]) -> None:
    """Writes one drafter and its reference. `own` names tables that are not the target's."""
    seed, own, taps = row.pop("seed"), row.pop("own", ()), row.pop("taps", None)
    heads, layer = row.pop("heads", "llama" if kind == "eagle3" else "qwen3"), row.pop("layer", {})
    if kind == "eagle3":
        defaults = {"draft_vocab_size": DRAFT_VOCABULARY, "eagle_aux_hidden_state_layer_ids": taps}
    else:
        defaults = {"draft_vocab_size": VOCABULARY, "block_size": BLOCK, "mask_token_id": VOCABULARY - 1}
        defaults |= {"aux_hidden_state_layer_ids": taps or DEFAULT_TAPS}
        defaults |= {"markov_rank": 16} if kind == "dspark" else {}
    about = SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTHS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[target.architecture]),
    )
    make, config = KINDS[kind]
    switches = {
        **defaults,
        **row,
        "transformer_layer_config": layer_config(heads, **layer),
        "speculators_config": about,
    }
    model: Any = make(config(**switches)).eval()
    features = torch.stack([target.states[tap] for tap in taps or DEFAULT_TAPS], dim=2)
    if features.shape[-1] != WIDTH:  # speculators has one width for both; other formats do not
        model.fc = torch.nn.Linear(features.shape[-2] * features.shape[-1], WIDTH, bias=False)
    randomise(model, seed)
    if "embed_tokens" not in own:
        model.embed_tokens.weight.data.copy_(target.model.get_input_embeddings().weight.data)
    if model.use_draft_vocab:
        order = torch.randperm(VOCABULARY - 1, generator=torch.Generator().manual_seed(seed))
        kept = order[:DRAFT_VOCABULARY].sort().values
        t2d = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, kept, True)
        model.load_vocab_mappings(t2d, kept - torch.arange(DRAFT_VOCABULARY))
    elif "lm_head" not in own:
        model.lm_head.weight.data.copy_(target.model.get_output_embeddings().weight.data)
    model.save_pretrained(folder)
    if kind == "dflash2":  # its candidate selector is not run
        return
    chain = eagle3_chain if kind == "eagle3" else block_chain
    found = [chain(model, target.ids[text], features[text].flatten(1), n) for text, n in contexts()]
    columns = {key: torch.stack([one[key] for one in found]) for key in found[0]}
    about_inputs = {"target": target.name, "layer_ids": taps or DEFAULT_TAPS, "ids": target.ids, "features": features}
    np.savez(folder / "reference.npz", **about_inputs, contexts=np.array(contexts()), **columns)
    best = columns["logits"].topk(2, dim=-1).values
    print(
        f"{folder.name}: smallest gap of a greedy choice {float((best[..., 0] - best[..., 1]).min()):.1e}", flush=True
    )


def raw(
    folder: Path,
    source: Path,
    keys: dict[str, Any],
    rename: dict[str, str],
    drop: Iterable[str],
    copies: Target | None,
    is_pickle: bool,
) -> None:
    """Writes the weights of a drafter in another layout: a config without speculators' keys, other names."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for tensor, value in load_file(source / "model.safetensors").items():
        if tensor.removesuffix(".weight") not in drop:
            prefix = next((old for old in rename if tensor.startswith(old)), "")
            weights[rename.get(prefix, "") + tensor.removeprefix(prefix)] = value
    if copies is not None:  # frozen copies of the target's tables
        weights["embed_tokens.weight"] = copies.model.get_input_embeddings().weight.data.clone()
        weights["lm_head.weight"] = copies.model.get_output_embeddings().weight.data.clone()
    if is_pickle:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    layer = json.loads((source / "config.json").read_text())["transformer_layer_config"]
    rope = layer.pop("rope_parameters")
    layer["rope_theta"] = rope.pop("rope_theta")
    layer["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    (folder / "config.json").write_text(json.dumps(layer | {"dtype": "float32"} | keys, indent=2) + "\n")
    shutil.copy(source / "reference.npz", folder / "reference.npz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder of all that is written")
    parser.add_argument("names", nargs="*", help="drafters of drafters.yaml; a layout needs its source (default: all)")
    args = parser.parse_args()
    table = yaml.safe_load((Path(__file__).parent / "drafters.yaml").read_text())
    targets = {name: Target(args.out / "targets" / name, **row) for name, row in table["targets"].items()}
    for kind in KINDS:
        for name, row in table[kind].items():
            if not args.names or name in args.names:
                drafter(args.out / name, kind, targets[row.pop("target", "llama")], row)
    for name, row in table["raw"].items():
        if not args.names or name in args.names:
            how = {"rename": {}, "drop": (), "is_pickle": False} | row
            copies = targets.get(how.pop("copies", ""))
            raw(args.out / name, args.out / how.pop("source"), copies=copies, **how)
    for scratch in args.out.glob("*.tmp"):
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
