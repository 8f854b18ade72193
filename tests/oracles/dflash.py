"""DFlash and DSpark in plain loops and float64, from the names of their published tensors; without jax.

No cache, no tree, one block at a time: every block is computed from the features of the whole text before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rotated(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """A head turned to its position: element i together with element i + half."""
    half = len(x) // 2
    angle = position * theta ** (-np.arange(half) / half)
    first, second = x[:half], x[half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
    )


class Block:
    """One block of a draft: `config` has the keys of the file, flat.

    Args:
      features: of the positions before the anchor, [anchor's position, layers * width].
      embedding: of the target, or the draft's own.
      head: that of the target's rows that may be drafted, or the draft's own.
    """

    def __init__(self, tensors: Tensors, config: Mapping[str, Any], features: np.ndarray, anchor: int, embedding, head):
        self.tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        self.config, self.anchor, self.head = config, anchor, np.asarray(head, np.float64)
        t, eps = self.tensors, config["rms_norm_eps"]
        context = rms(np.asarray(features, np.float64) @ t["fc.weight"].T, t["hidden_norm.weight"], eps)
        tokens = [anchor] + [config["mask_token_id"]] * (config["block_size"] - 1)
        x = np.asarray(embedding, np.float64)[tokens]
        for layer in range(config["num_hidden_layers"]):
            x = self.layer(layer, x, context)
        self.hidden = rms(x, t["norm.weight"], eps)
        self.first = 0 if config["sample_from_anchor"] else 1
        self.num_drafts = config["block_size"] - self.first

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def layer(self, layer: int, x: np.ndarray, context: np.ndarray) -> np.ndarray:
        c, t, own = self.config, self.tensors, f"layers.{layer}"
        eps, width, before = c["rms_norm_eps"], c["head_dim"], len(context)

        def heads(name: str, x: np.ndarray, normed: bool, first: int | None) -> np.ndarray:
            y = self.linear(f"{own}.self_attn.{name}_proj", x).reshape(len(x), -1, width)
            if normed:
                y = rms(y, t[f"{own}.self_attn.{name}_norm.weight"], eps)
            if first is not None:
                y = np.array([[rotated(head, first + i, c["rope_theta"]) for head in row] for i, row in enumerate(y)])
            return y

        normed = rms(x, t[f"{own}.input_layernorm.weight"], eps)
        both = np.concatenate([context, normed])
        query, key = heads("q", normed, True, before), heads("k", both, True, 0)
        value = heads("v", both, False, None)
        out = np.zeros_like(query)
        for slot, head in np.ndindex(*query.shape[:2]):
            group = head * key.shape[1] // query.shape[1]
            sees = [place for place in range(len(both)) if self.sees(layer, slot, place, before)]
            scores = key[sees, group] @ query[slot, head] / np.sqrt(width)
            shares = np.exp(scores - scores.max())
            out[slot, head] = shares @ value[sees, group] / shares.sum()
        x = x + self.linear(f"{own}.self_attn.o_proj", out.reshape(len(x), -1))
        normed = rms(x, t[f"{own}.post_attention_layernorm.weight"], eps)
        gate = self.linear(f"{own}.mlp.gate_proj", normed)
        return x + self.linear(f"{own}.mlp.down_proj", gate * sigmoid(gate) * self.linear(f"{own}.mlp.up_proj", normed))

    def sees(self, layer: int, slot: int, place: int, before: int) -> bool:
        """Whether a slot sees a place: of the context, or of the block after it."""
        if self.config["layer_types"][layer] != "sliding_attention":
            return True
        if place < before:
            return place >= before - self.config["sliding_window"]
        return self.config["sliding_window_non_causal"] or place - before <= slot

    def previous(self, path: Sequence[int]) -> list[int]:
        """The token before each slot's, for slots up to that after a path that starts with the anchor."""
        return [self.anchor] * self.first + list(path)

    def logits(self, path: Sequence[int]) -> np.ndarray:
        """Of the token after a path of drafted tokens, which starts with the anchor."""
        slot = self.first + len(path) - 1
        return self.hidden[slot] @ self.head.T + self.bias(path)

    def bias(self, path: Sequence[int]) -> np.ndarray:
        """What the Markov head adds."""
        t, kind = self.tensors, self.config["markov_head_type"]
        if "markov_head.markov_w1.weight" not in t:
            return np.zeros(len(self.head))
        tokens = self.previous(path)
        rows = t["markov_head.markov_w1.weight"][tokens]
        hidden, memory, out = self.hidden[: len(tokens)], np.zeros(rows.shape[1]), rows[-1]
        if kind == "gated":
            out = sigmoid(self.linear("markov_head.gate_proj", np.concatenate([hidden[-1], rows[-1]]))) * rows[-1]
        if kind == "rnn":
            for state, row in zip(hidden, rows, strict=True):
                read = self.linear("markov_head.joint_proj", np.concatenate([memory, row, state]))
                gate, candidate, last = np.split(read, 3)
                memory = sigmoid(gate) * memory + (1 - sigmoid(gate)) * np.tanh(candidate)
                out = np.tanh(last)
        return t["markov_head.markov_w2.weight"] @ out

    def confidence(self, path: Sequence[int]) -> float:
        """The logit that the token after a path is accepted."""
        read = self.hidden[self.first + len(path) - 1]
        if self.config["confidence_head_with_markov"]:
            read = np.concatenate([read, self.tensors["markov_head.markov_w1.weight"][path[-1]]])
        return float(self.linear("confidence_head.proj", read)[0])

    def chain(self, ids: np.ndarray | None = None) -> list[int]:
        """The likeliest drafts, each after those before. `ids` are the tokens of the head's rows."""
        path = [self.anchor]
        for _ in range(self.num_drafts):
            best = int(np.argmax(self.logits(path)))
            path.append(best if ids is None else int(ids[best]))
        return path[1:]
