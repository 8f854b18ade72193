"""Trains a small drafter with the Trainer of `speculators` on one target's own text, on a CPU, and measures it.

    python benchmarks/published/train.py TARGET PROMPTS HELD_OUT OUT --kind eagle3|dspark [--steps 400]

TARGET is a Hugging Face folder with tokenizer.json; PROMPTS and HELD_OUT have a line {"prompt": TEXT} each. OUT gets
the drafter and `reference.npz`. It needs torch, transformers and speculators 0.9.0, not this package. README.md says
what the files hold.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference import DEPTHS, block_chain, dspark_forward, eagle3_chain, residuals, to_target
from speculators.models.dspark import DSparkDraftModel
from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
from speculators.train import trainer as training
from speculators.train.data import BaseDataset
from speculators.train.dataloader import _setup_dataloader
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

PREFIX, HELD_OUT_TOKENS, CHAIN_EVERY = 256, 96, 12
"""The longest prompt, the length of a measured continuation, positions between two whole chains; in tokens."""


class Target:
    """The target in float32: what it writes and its states."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        how = {"dtype": torch.float32, "attn_implementation": "sdpa"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **how).eval()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.end = self.model.generation_config.eos_token_id
        count = self.model.config.num_hidden_layers
        self.taps = [2, count - 2, count]

    def prompts(self, path: Path) -> list[list[int]]:
        lines = path.read_text().splitlines()
        return [self.tokenizer.encode(json.loads(line)["prompt"]).ids[:PREFIX] for line in lines]

    @torch.no_grad()
    def write(self, prompts: list[list[int]], new: int, temperature: float, batch: int = 64) -> list[list[int]]:
        """Each prompt with what the target writes after it, without the end-of-text token."""
        texts: dict[int, list[int]] = {}
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        for rows in (order[first : first + batch] for first in range(0, len(order), batch)):
            width = max(len(prompts[row]) for row in rows)
            ids = torch.tensor([[self.end] * (width - len(prompts[row])) + prompts[row] for row in rows])
            mask = torch.tensor([[0] * (width - len(prompts[row])) + [1] * len(prompts[row]) for row in rows])
            how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            found = self.model.generate(ids, attention_mask=mask, max_new_tokens=new, pad_token_id=self.end, **how)
            for row, text in zip(rows, found[:, width:].tolist(), strict=True):
                texts[row] = prompts[row] + text[: text.index(self.end) if self.end in text else new]
            print(f"written {len(texts)} of {len(prompts)} texts", flush=True)
        return [texts[row] for row in range(len(prompts))]

    def states(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tapped features, [T, taps * width], and the last residual, [T, width]."""
        states = residuals(self.model, torch.tensor([ids]))[0][:, 0]
        return states[self.taps].transpose(0, 1).flatten(1), states[-1]


class Texts(BaseDataset):
    """Rows for the trainer; the states are computed when a row is read."""

    def __init__(self, target: Target, prompts: list[list[int]], texts: list[list[int]], length: int) -> None:
        self.target = target
        rows = zip(map(len, prompts), texts, strict=True)
        self.rows = [(start, text[:length]) for start, text in rows if start + 16 < min(len(text), length)]
        super().__init__(length, torch.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def _compute_approx_lengths(self) -> list[int]:
        return [len(text) for _, text in self.rows]

    def _get_raw_data(self, index: int) -> dict[str, torch.Tensor]:
        start, text = self.rows[index]
        features, last = self.target.states(text)
        return {
            "hidden_states": features,
            "input_ids": torch.tensor(text),
            "verifier_last_hidden_states": last,
            "loss_mask": (torch.arange(len(text)) >= start).long(),
        }


def build(target: Target, kind: str, texts: list[list[int]], draft_vocab: int) -> Any:
    """An untrained drafter, as the command line of speculators builds it."""
    of = target.model.config
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {key: getattr(of, key) for key in (*same, "head_dim", "max_position_embeddings", "rms_norm_eps")}
    counts = np.bincount(np.concatenate(texts), minlength=of.vocab_size)
    d2t, t2d = build_vocab_mappings_from_distribution(dict(enumerate(counts.tolist())), draft_vocab, of.vocab_size)
    how: dict[str, Any] = {"draft_vocab_size": draft_vocab, "verifier_name_or_path": str(target.folder)}
    how |= {"target_layer_ids": target.taps, "draft_attn_impl": "eager", "t2d": t2d, "d2t": d2t}
    if kind == "eagle3":
        layer = LlamaConfig(num_hidden_layers=1, **sizes)
        return Eagle3DraftModel.from_training_args(layer, norm_before_residual=True, ttt_steps=DEPTHS, **how)
    how |= {"block_size": DEPTHS + 1, "mask_token_id": of.vocab_size - 1, "markov_rank": 64}
    return DSparkDraftModel.from_training_args(Qwen3Config(num_hidden_layers=2, **sizes), **how)


def train(model: Any, kind: str, data: Texts, args: argparse.Namespace) -> None:
    """Runs the trainer of speculators, which asks for a device by number and waits for it: a CPU has neither."""
    training.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None
    preprocess = shift_batch if kind == "eagle3" else None
    loader = _setup_dataloader(data, args.length, model.hidden_size, 0, len(data.target.taps), preprocess=preprocess)
    losses = {"loss_fn": "kl_div", "loss_implementation": "eager", "max_anchors": args.length // 8}
    call, _ = model.get_trainer_kwargs(**losses, ttt_steps=DEPTHS, ttt_step_loss_decay=0.9)
    with tempfile.TemporaryDirectory() as scratch:
        config = training.TrainerConfig(
            lr=args.rate,
            num_epochs=1,
            save_path=scratch,
            train_call_kwargs=call,
            scheduler_type="cosine",
            scheduler_warmup_steps=20,
            hidden_states_dtype=torch.float32,
            max_steps=args.steps,
            log_freq=10_000,
        )
        trainer = training.Trainer(model, config, loader)
        while trainer.global_step < args.steps:
            trainer.train_epoch(trainer.current_epoch)
            trainer.current_epoch += 1
    model.eval()


@torch.no_grad()
def drafted(model: Any, kind: str, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """[T, DEPTHS] target ids drafted after token n, each depth given the text's own tokens before it.

    Up to the first that differs from the text this is the greedy chain.
    """
    if kind == "eagle3":
        pairs = {"hidden_states": features[None, :-1], "input_ids": ids[None, 1:]}
        steps = model(**pairs, document_ids=torch.zeros_like(pairs["input_ids"]), ttt_steps=DEPTHS)
        found = to_target(model, torch.stack([step[0] for step in steps], dim=1))
        return torch.cat([found.new_full((1, DEPTHS), -1), found])  # pair t drafts after token t + 1
    tokens = torch.cat([ids, ids.new_zeros(model.block_size)])[None]
    rows = torch.cat([features, features.new_zeros(model.block_size, features.shape[1])])[None]
    call = {"hidden_states": rows, "input_ids": tokens, "verifier_last_hidden_states": rows[..., : model.hidden_size]}
    call |= {"loss_mask": torch.ones_like(tokens), "document_ids": torch.zeros_like(tokens), "max_anchors": len(ids)}
    logits, _ = dspark_forward(model, **call)
    return to_target(model, logits.argmax(-1)).view(len(ids), -1)[:, :DEPTHS]


def measure(model: Any, kind: str, target: Target, prompts: list[list[int]]) -> dict[str, Any]:
    """Greedy acceptance along the target's greedy texts by the drafter's own forward, and some whole chains."""
    texts = target.write(prompts, HELD_OUT_TOKENS, 0.0)
    contexts, accepted, chained, chains = [], [], [], []
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids, (features, _) = torch.tensor(text), target.states(text)
        found = drafted(model, kind, ids, features)
        for n in range(len(prompt), len(text) - DEPTHS):
            contexts.append((row, n))
            accepted.append(int((found[n] == ids[n + 1 : n + 1 + DEPTHS]).int().cumprod(0).sum()))
            if n % CHAIN_EVERY == 0:
                chain = (eagle3_chain if kind == "eagle3" else block_chain)(model, ids, features, n)["chain"][:DEPTHS]
                chained.append((row, n))
                chains.append(chain.tolist())
                assert int((chain == ids[n + 1 : n + 1 + DEPTHS]).int().cumprod(0).sum()) == accepted[-1], (row, n)
    longest = max(map(len, texts))
    return {
        "texts": np.array([text + [-1] * (longest - len(text)) for text in texts]),
        "prompt_lengths": np.array([len(prompt) for prompt in prompts]),
        "contexts": np.array(contexts),
        "accepted": np.array(accepted),
        "by_depth": np.array([np.mean(np.array(accepted) > depth) for depth in range(DEPTHS)]),
        "chain_contexts": np.array(chained),
        "chain": np.array(chains),
        "layer_ids": np.array(target.taps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "prompts", "held_out", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--kind", choices=("eagle3", "dspark"), required=True)
    parser.add_argument("--texts", type=int, help="how many lines of PROMPTS (default: all)")
    parser.add_argument("--new", type=int, default=160, help="tokens that are written after each prompt")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--length", type=int, default=768, help="tokens of a step")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--draft-vocab", type=int, default=2048)
    args = parser.parse_args()
    torch.manual_seed(0)
    target = Target(args.target)
    kept = args.out.parent / f"texts_{args.texts}_{args.new}.json"  # both kinds train on the same texts
    if not kept.exists():
        prompts = target.prompts(args.prompts)[: args.texts]
        half = len(prompts) // 2
        texts = target.write(prompts[:half], args.new, 0.0) + target.write(prompts[half:], args.new, 0.8)
        kept.write_text(json.dumps([prompts, texts]))
    prompts, texts = json.loads(kept.read_text())
    model = build(target, args.kind, texts, args.draft_vocab)
    train(model, args.kind, Texts(target, prompts, texts, args.length), args)
    model.config.speculators_config.verifier.name_or_path = args.target.name
    model.save_pretrained(args.out)
    found = measure(model, args.kind, target, target.prompts(args.held_out))
    np.savez(args.out / "reference.npz", **found)
    print("accepted by depth", found["by_depth"].round(3), "mean", found["accepted"].mean().round(3))


if __name__ == "__main__":
    main()
