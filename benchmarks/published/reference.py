"""Writes small targets and random drafters with `speculators`, and what those drafters compute.

    python benchmarks/published/reference.py OUT [--only eagle3|dflash]

It needs torch, transformers and speculators 0.9.0, not this package: README.md says what the files hold.
OUT/targets gets the targets, OUT/NAME a drafter with `reference.npz` beside it, OUT/INDEX.md a line for each.
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
VOCABULARY, DRAFT_VOCABULARY, LAYERS, WIDTH = 300, 120, 8, 64
DEFAULT = [2, LAYERS // 2, LAYERS - 3]
"""The layers whose inputs speculators taps unless a file names others."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights that keep the size of a state, norms away from 1 and logits with a spread of about 2."""
    random = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        if name.endswith("norm.weight") or "norm." in name:
            value = 0.5 + torch.rand(weight.shape, generator=random)
        elif weight.ndim == 1:
            value = 0.3 * torch.randn(weight.shape, generator=random)
        elif "embed" in name or "codebook" in name:
            value = 0.5 * torch.randn(weight.shape, generator=random)
        else:
            gain = 2.0 if "lm_head" in name else 1.0
            value = gain * torch.randn(weight.shape, generator=random) / weight.shape[-1] ** 0.5
        weight.data.copy_(value)


def layer_config(kind: str, layers: int, width: int = WIDTH, **keys: Any) -> LlamaConfig | Qwen3Config:
    """The configuration of a small transformer; Qwen3 has a head size that is not width / heads."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "attn_implementation": "eager",
        "pad_token_id": None,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    if kind == "qwen3":
        return Qwen3Config(**(sizes | {"head_dim": 32, "num_attention_heads": 4} | keys))
    return LlamaConfig(**(sizes | keys))


class Target:
    """A random target that transformers wrote, its texts and the residual before each layer and after the last."""

    def __init__(self, out: Path, kind: str, seed: int, width: int = WIDTH, **keys: Any) -> None:
        name = kind if width == WIDTH else f"{kind}_{width}"
        config = layer_config(kind, LAYERS, width, **keys)
        self.architecture = "Qwen3ForCausalLM" if kind == "qwen3" else "LlamaForCausalLM"
        self.model = (Qwen3ForCausalLM if kind == "qwen3" else LlamaForCausalLM)(config).eval()
        randomise(self.model, seed)
        self.model.tie_weights()
        self.name = name
        self.model.save_pretrained(out / "targets" / name)
        self.ids = torch.randint(0, VOCABULARY - 1, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(seed))
        taps: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, kw: taps.append(args[0]), with_kwargs=True)
            for layer in self.model.model.layers
        ]
        hooks.append(self.model.model.norm.register_forward_pre_hook(lambda _, args: taps.append(args[0])))
        with torch.no_grad():
            logits = self.model(self.ids).logits
        for hook in hooks:
            hook.remove()
        self.states = torch.stack(taps)  # [LAYERS + 1, SEQUENCES, TOKENS, width]
        np.savez(out / "targets" / name / "states.npz", ids=self.ids, states=self.states, logits=logits)

    def features(self, layers: list[int]) -> torch.Tensor:
        """[SEQUENCES, TOKENS, taps, width]: the inputs of these layers; LAYERS is the last residual."""
        return torch.stack([self.states[layer] for layer in layers], dim=2)


def about(target: Target, algorithm: str, tokens: int) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[target.architecture]),
    )


def share(model: Any, target: Target, seed: int, own: Iterable[str] = ()) -> None:
    """Random weights; the target's embedding and head where `own` does not name them; a random draft vocabulary."""
    randomise(model, seed)
    table = target.model.get_input_embeddings().weight.data
    head = target.model.get_output_embeddings().weight.data
    if "embed_tokens" not in own:
        model.embed_tokens.weight.data.copy_(table)
    if model.use_draft_vocab:
        random = torch.Generator().manual_seed(seed)
        kept = torch.randperm(VOCABULARY - 1, generator=random)[:DRAFT_VOCABULARY].sort().values
        t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
        t2d[kept] = True
        model.load_vocab_mappings(t2d, kept - torch.arange(DRAFT_VOCABULARY))
    elif "lm_head" not in own:
        model.lm_head.weight.data.copy_(head)
    model.eval()


def to_target(model: Any, draft_ids: torch.Tensor) -> torch.Tensor:
    """Draft ids as ids of the target: `d2t` holds offsets."""
    return draft_ids if model.d2t is None else draft_ids + model.d2t[draft_ids]


def contexts() -> list[tuple[int, int]]:
    """Text and number of its tokens that ran through the target."""
    return [(text, int(n)) for text in range(SEQUENCES) for n in np.linspace(1, TOKENS - 10, CONTEXTS).round()]


def eagle3_chain(model: Eagle3DraftModel, ids: torch.Tensor, features: torch.Tensor, n: int, depths: int = DEPTHS) -> tuple[torch.Tensor, list[int]]:
    """The greedy chain after n tokens ran and token n was emitted, by the model's own forward over its own tokens.

    ids [> n], features [>= n, taps * width]. Pair t is feature t with token t + 1. The forward feeds step k of pair t
    the token of pair t + k, so appending the chain makes it feed the chain.
    """
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda *call: seen.append(call[2]))
    chain: list[int] = []
    with torch.no_grad():
        for depth in range(depths):
            tokens = torch.cat([ids[1 : n + 1], torch.tensor(chain, dtype=ids.dtype)])[None]
            rows = torch.cat([features[:n], features.new_zeros(len(chain), features.shape[1])])[None]
            seen.clear()
            model(hidden_states=rows, input_ids=tokens, document_ids=torch.zeros_like(tokens), ttt_steps=depth + 1)
            chain.append(int(to_target(model, seen[depth][0, n - 1].argmax())))
    hook.remove()
    return torch.stack([step[0, n - 1] for step in seen]), chain


def eagle3(out: Path, name: str, target: Target, seed: int, layer: dict[str, Any] | None = None, own: Iterable[str] = (), draft_vocab: int = DRAFT_VOCABULARY, kind: str = "llama", layers: int = 1, **switches: Any) -> Eagle3DraftModel:
    """Writes one eagle3 drafter and its reference."""
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(kind, layers, **(layer or {})),
        draft_vocab_size=draft_vocab,
        speculators_config=about(target, "eagle3", DEPTHS),
        embed_requires_grad="embed_tokens" in own,
        **switches,
    )
    model = Eagle3DraftModel(config)
    ids = switches.get("eagle_aux_hidden_state_layer_ids") or DEFAULT
    features = target.features(ids)
    if features.shape[-1] != WIDTH:  # speculators has one width for both; other formats do not
        model.fc = torch.nn.Linear(len(ids) * features.shape[-1], WIDTH, bias=False)
    share(model, target, seed, own)
    model.save_pretrained(out / name)
    chains = [eagle3_chain(model, target.ids[text], features[text].flatten(1), n) for text, n in contexts()]
    write(out / name, target, ids, features, torch.stack([logits for logits, _ in chains]), [chain for _, chain in chains])
    return model


def write(folder: Path, target: Target, ids: list[int], features: torch.Tensor, logits: torch.Tensor, chains: list[list[int]], **more: Any) -> None:
    best = logits.topk(2, dim=-1).values
    print(f"{folder.name}: smallest gap of a greedy choice {float((best[..., 0] - best[..., 1]).min()):.1e}")
    np.savez(
        folder / "reference.npz",
        target=target.name,
        layer_ids=np.array(ids),
        ids=target.ids,
        features=features,
        contexts=np.array(contexts()),
        logits=logits,
        chain=np.array(chains),
        **more,
    )


def raw(out: Path, name: str, source: str, config: dict[str, Any], rename: dict[str, str], drop: Iterable[str] = (), is_pickle: bool = False, copies: Target | None = None) -> None:
    """Writes the weights of OUT/source in another layout: a config without speculators' keys, other names."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for tensor, value in load_file(out / source / "model.safetensors").items():
        if tensor.removesuffix(".weight") not in drop:
            for old, new in rename.items():
                tensor = tensor.replace(old, new, 1) if tensor.startswith(old) else tensor
            weights[tensor] = value
    if copies is not None:  # frozen copies of the target's tables
        weights["embed_tokens.weight"] = copies.model.get_input_embeddings().weight.data.clone()
        weights["lm_head.weight"] = copies.model.get_output_embeddings().weight.data.clone()
    if is_pickle:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    layer = json.loads((out / source / "config.json").read_text())["transformer_layer_config"]
    layer.pop("transformers_version", None)
    rope = layer.pop("rope_parameters", {"rope_theta": 10_000.0})
    layer["rope_theta"] = rope.pop("rope_theta")
    layer["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    text = json.dumps(layer | {"dtype": "float32", "tie_word_embeddings": False} | config, indent=2)
    (folder / "config.json").write_text(text + "\n")
    shutil.copy(out / source / "reference.npz", folder / "reference.npz")


MIDLAYER = {"layers.0.": "midlayer."}


def write_eagle3(out: Path, targets: dict[str, Target]) -> None:
    llama, qwen3, wide = targets["llama"], targets["qwen3"], targets["llama_96"]
    eagle3(out, "eagle3_plain", llama, 1)
    eagle3(out, "eagle3_full_vocabulary", llama, 2, draft_vocab=VOCABULARY, own=["lm_head"])
    eagle3(out, "eagle3_norm_before_residual", llama, 3, norm_before_residual=True)
    eagle3(out, "eagle3_norm_before_fc", llama, 4, norm_before_fc=True)
    eagle3(out, "eagle3_fc_norm", llama, 5, fc_norm=True)
    eagle3(out, "eagle3_norm_output", llama, 6, norm_output=True)
    eagle3(out, "eagle3_all_norms", qwen3, 7, kind="qwen3", fc_norm=True, norm_output=True, norm_before_residual=True)
    eagle3(out, "eagle3_qwen3", qwen3, 8, kind="qwen3")
    eagle3(out, "eagle3_own_embedding", llama, 9, own=["embed_tokens"])
    eagle3(out, "eagle3_two_layers", llama, 10, layers=2)
    eagle3(out, "eagle3_two_layers_qwen3", llama, 11, kind="qwen3", layers=2, norm_output=True)
    eagle3(out, "eagle3_rope_theta", qwen3, 12, layer={"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}})
    eagle3(out, "eagle3_rope_llama3", qwen3, 13, layer={"rope_parameters": LLAMA3})
    eagle3(out, "eagle3_head_dim", llama, 14, layer={"head_dim": 24})
    eagle3(out, "eagle3_layer_ids", llama, 15, eagle_aux_hidden_state_layer_ids=[0, 3, LAYERS])
    eagle3(out, "eagle3_five_taps", qwen3, 16, fc_norm=True, eagle_aux_hidden_state_layer_ids=[1, 3, 4, 6, 7])
    eagle3(out, "eagle3_bias", llama, 17, layer={"attention_bias": True})

    raw_keys = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": DRAFT_VOCABULARY}
    raw(out, "specforge_eagle3", "eagle3_plain", raw_keys, MIDLAYER, ["embed_tokens"])
    taps = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in DEFAULT], "use_aux_hidden_state": True}
    raw(out, "specforge_eagle3_ids", "eagle3_plain", raw_keys | {"eagle_config": taps}, MIDLAYER, ["embed_tokens"])
    raw(out, "specforge_eagle3_fc_norm", "eagle3_fc_norm", raw_keys | {"fc_norm": True}, MIDLAYER, ["embed_tokens"])
    aux = {f"fc_norm.{index}.": f"aux_norm_{tap}." for index, tap in enumerate(("low", "mid", "high"))}
    raw(out, "sglang_eagle3_aux_norm", "eagle3_fc_norm", raw_keys | {"use_aux_norm": True}, MIDLAYER | aux, ["embed_tokens"])
    raw(out, "sglang_eagle3_full", "eagle3_full_vocabulary", raw_keys | {"draft_vocab_size": None}, MIDLAYER, ["embed_tokens"])
    eagle3(out, "wide.tmp", wide, 18, own=["embed_tokens"])
    raw(out, "specforge_eagle3_wide_target", "wide.tmp", raw_keys | {"target_hidden_size": wide.states.shape[-1]}, MIDLAYER)
    shutil.rmtree(out / "wide.tmp")
    named = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCABULARY, "num_hidden_layers": 1}
    raw(out, "eagle_eagle3", "eagle3_own_embedding", named, MIDLAYER)
    raw(out, "eagle_eagle3_pickle", "eagle3_own_embedding", named, MIDLAYER, is_pickle=True)
    five = eagle3(out, "five.tmp", qwen3, 19, kind="qwen3", draft_vocab=VOCABULARY, own=["embed_tokens", "lm_head"], eagle_aux_hidden_state_layer_ids=[1, 3, 4, 6, 8])
    deepspec = {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [layer - 1 for layer in five.target_layer_ids]}
    raw(out, "deepspec_eagle3", "five.tmp", deepspec | {"num_target_layers": LAYERS}, {})
    shutil.rmtree(out / "five.tmp")


def dflash_blocks(model: DFlashDraftModel, ids: torch.Tensor, features: torch.Tensor, n: int) -> dict[str, torch.Tensor]:
    """One block anchored at token n, which was emitted and has not run; the features before n are its context.

    Logits of every slot before and after the Markov head, along the greedy chain, and logits of the confidence head.
    """
    size = model.block_size
    tokens = torch.cat([ids[: n + 1], ids.new_full((2 * size,), model.mask_token_id)])[None]
    rows = torch.cat([features[:n], features.new_zeros(tokens.shape[1] - n, features.shape[1])])[None]
    anchors = torch.zeros_like(tokens)
    anchors[0, n] = 1  # the forward takes its anchors from the mask of the loss
    call = {
        "hidden_states": rows,
        "loss_mask": anchors,
        "verifier_last_hidden_states": rows[..., : model.hidden_size],
        "document_ids": torch.zeros_like(tokens),
        "max_anchors": 1,
    }
    with torch.no_grad():
        hidden, before, *_ = model._backbone_forward(input_ids=tokens, **call)
        found = {"hidden": hidden[0], "before": before[0]}
        first = 0 if model.config.sample_from_anchor else 1
        head = getattr(model, "markov_head", None)
        chain: list[int] = []
        for slot in range(first, size):
            logits = before[0, slot]
            if head is not None:
                previous = [int(ids[n])] * (1 + first) + chain
                past = torch.tensor(previous + [0] * (size - len(previous)))[None]
                logits = logits + head.block_bias(prev_token_ids=past, hidden_states=hidden)[0, slot]
            chain.append(int(to_target(model, logits.argmax())))
        found["chain"] = torch.tensor(chain)
        if isinstance(model, DSparkDraftModel):  # its whole forward over the chain gives what it says at once
            tokens[0, n + 1 : n + 1 + len(chain)] = found["chain"]
            kept: list[torch.Tensor] = []
            compute = dspark_core.compute_metrics
            dspark_core.compute_metrics = lambda *args, **_: (kept.extend(args[:3]), None)
            model(input_ids=tokens, **call)
            dspark_core.compute_metrics = compute
            found["after"] = kept[0][0]
            if kept[2] is not None:
                found["confidence"] = kept[2][0]
            assert found["chain"].tolist() == to_target(model, found["after"][first:].argmax(-1)).tolist()
    return found


def dflash(out: Path, name: str, target: Target, seed: int, kind: str = "dflash", layers: int = 1, layer: dict[str, Any] | None = None, draft_vocab: int = VOCABULARY, taps: list[int] = DEFAULT, block: int = 6, **switches: Any) -> None:
    """Writes one drafter of the DFlash family and its reference."""
    configs = {"dflash": DFlashSpeculatorConfig, "dspark": DSparkSpeculatorConfig, "dflash2": DFlash2SpeculatorConfig}
    models = {"dflash": DFlashDraftModel, "dspark": DSparkDraftModel, "dflash2": DFlash2DraftModel}
    config = configs[kind](
        transformer_layer_config=layer_config("qwen3", layers, **(layer or {})),
        draft_vocab_size=draft_vocab,
        block_size=block,
        aux_hidden_state_layer_ids=taps,
        mask_token_id=VOCABULARY - 1,
        speculators_config=about(target, kind, block - 1),
        **switches,
    )
    model = models[kind](config)
    share(model, target, seed)
    model.save_pretrained(out / name)
    features = target.features(taps)
    found = [dflash_blocks(model, target.ids[text], features[text].flatten(1), n) for text, n in contexts()]
    columns = {key: torch.stack([block[key] for block in found]) for key in found[0]}
    chains = columns.pop("chain").tolist()
    logits = columns.pop("after", columns["before"])
    if kind != "dflash2":  # its candidate selector is not run
        write(out / name, target, taps, features, logits[:, -len(chains[0]) :], chains, **columns, after=logits)


def write_dflash(out: Path, targets: dict[str, Target]) -> None:
    llama, qwen3 = targets["llama"], targets["qwen3"]
    sliding = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
    mixed = sliding | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    dflash(out, "dflash_plain", llama, 31)
    dflash(out, "dflash_from_anchor", qwen3, 32, sample_from_anchor=True)
    dflash(out, "dflash_reduced", llama, 133, draft_vocab=DRAFT_VOCABULARY)
    dflash(out, "dflash_three_layers", qwen3, 34, layers=3, taps=[1, 2, 4, 6, LAYERS])
    dflash(out, "dflash_one_tap", llama, 35, taps=[4], layer={"rope_parameters": LLAMA3})
    dflash(out, "dflash_sliding", qwen3, 36, layers=3, layer=mixed)
    dflash(out, "dflash_sliding_non_causal", qwen3, 37, layers=3, layer=mixed, sliding_window_non_causal=True)
    for index, head in enumerate(("vanilla", "gated", "rnn")):
        keys = {"kind": "dspark", "markov_rank": 16, "markov_head_type": head}
        dflash(out, f"dspark_{head}", (llama, qwen3)[index % 2], 40 + index, layers=2, **keys)
        dflash(out, f"dspark_{head}_reduced", llama, 50 + index, draft_vocab=DRAFT_VOCABULARY, confidence_head_with_markov=False, **keys)
        dflash(out, f"dspark_{head}_masks_only", llama, 60 + index, sample_from_anchor=False, **keys)
    dflash(out, "dspark_no_confidence", llama, 70, kind="dspark", markov_rank=16, enable_confidence_head=False)
    dflash(out, "dspark_no_markov", llama, 71, kind="dspark", markov_rank=0, confidence_head_with_markov=False)
    dflash(out, "dflash2", llama, 72, kind="dflash2", block=8, conv_group_size=16, selector_rank=16, selector_top_k=8)

    def keys(source: str, nested: bool, **more: Any) -> dict[str, Any]:
        config = json.loads((out / source / "config.json").read_text())
        heads = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
        names = {"mask_token_id": config["mask_token_id"]} | {name: config[name] for name in heads if name in config}
        names["target_layer_ids"] = [layer - 1 for layer in config["aux_hidden_state_layer_ids"]]
        return {"num_target_layers": LAYERS, "block_size": config["block_size"], "model_type": "qwen3"} | (
            {"dflash_config": names | more} if nested else names | more
        )

    raw(out, "zlab_dflash", "dflash_three_layers", {"architectures": ["DFlashDraftModel"]} | keys("dflash_three_layers", True), {})
    inside = keys("dflash_plain", True)
    inside["dflash_config"]["block_size"] = inside.pop("block_size")
    raw(out, "zlab_dflash_block_inside", "dflash_plain", {"architectures": ["DFlashDraftModel"]} | inside, {})
    dspark = keys("dspark_vanilla", True, projector_type="dspark", confidence_head_alpha=1.0)
    raw(out, "specforge_dspark", "dspark_vanilla", {"architectures": ["DSparkDraftModel"]} | dspark, {})
    for name in ("vanilla", "gated", "rnn"):
        deepspec = {"architectures": ["Qwen3DSparkModel"]} | keys(f"dspark_{name}", False, num_anchors=512)
        raw(out, f"deepspec_dspark_{name}", f"dspark_{name}", deepspec, {}, copies=targets[("qwen3" if name == "gated" else "llama")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder of all that is written")
    parser.add_argument("--only", choices=("eagle3", "dflash"), help="one family")
    args = parser.parse_args()
    targets = {
        target.name: target
        for target in (
            Target(args.out, "llama", 101),
            Target(args.out, "qwen3", 102, tie_word_embeddings=True),
            Target(args.out, "llama", 103, width=96),
        )
    }
    if args.only != "dflash":
        write_eagle3(args.out, targets)
    if args.only != "eagle3":
        write_dflash(args.out, targets)


if __name__ == "__main__":
    main()
