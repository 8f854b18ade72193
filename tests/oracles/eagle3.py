"""An EAGLE-3 head in float64 and plain loops, on the tensors of its file and the keys of its configuration.

Written from the description in arXiv:2503.01840 and from what `speculators` computes: no cache, no mask, no jax. Every
path is computed from its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def inverse_frequencies(keys: Mapping[str, Any], size: int) -> np.ndarray:
    """Plain, or scaled as Llama 3 does: slow turns by the factor, and those between two speeds partly."""
    rope = {"rope_theta": keys.get("rope_theta", 1e4)}
    rope |= keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    found = []
    for i in range(size // 2):
        speed = rope["rope_theta"] ** (-2 * i / size)
        if rope.get("rope_type", "default") == "llama3":
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            turns = rope["original_max_position_embeddings"] * speed / (2 * np.pi)
            share = min(max((turns - low) / (high - low), 0), 1)
            speed = share * speed + (1 - share) * speed / rope["factor"]
        found.append(speed)
    return np.array(found)


class Head:
    """A head whose `tensors` have the names of speculators.

    Args:
      keys: of its own transformer, and its switches.
      embedding: the target's, if it has none of its own.
    """

    def __init__(self, tensors: Mapping[str, np.ndarray], keys: Mapping[str, Any], embedding: np.ndarray | None = None):
        self.tensors = {name: x.astype(np.int64 if name == "d2t" else np.float64) for name, x in tensors.items()}
        self.keys, self.eps = keys, keys.get("rms_norm_eps", 1e-6)
        self.embedding = self.tensors.get("embed_tokens.weight", embedding)
        self.heads, self.groups = keys["num_attention_heads"], keys["num_key_value_heads"]
        self.size = keys.get("head_dim") or keys["hidden_size"] // self.heads
        self.num_layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))

    def product(self, name: str, x: np.ndarray) -> np.ndarray:
        bias = self.tensors.get(f"{name}.bias", 0)
        return self.tensors[f"{name}.weight"] @ x + bias

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return norm(x, self.tensors[f"{name}.weight"], self.eps)

    def fused(self, features: np.ndarray) -> np.ndarray:
        """The state of a position from its features [layers, H]."""
        parts = [self.norm(f"fc_norm.{i}", x) if self.keys.get("fc_norm") else x for i, x in enumerate(features)]
        whole = np.concatenate(parts)
        return self.product("fc", self.norm("input_norm", whole) if self.keys.get("norm_before_fc") else whole)

    def turned(self, x: np.ndarray, position: int) -> np.ndarray:
        """Heads [n, E]: element i turns with element i + E/2."""
        angles = position * inverse_frequencies(self.keys, self.size)
        first, second = x[:, : self.size // 2], x[:, self.size // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], 1)

    def attended(self, layer: int, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Causal attention, position by position."""
        at, out, keys, values = f"layers.{layer}.self_attn", [], [], []
        for position, x in enumerate(inputs):
            parts = [self.product(f"{at}.{name}_proj", x).reshape(-1, self.size) for name in "qkv"]
            for i, name in enumerate(("q_norm", "k_norm")):
                if f"{at}.{name}.weight" in self.tensors:
                    parts[i] = self.norm(f"{at}.{name}", parts[i])
            query = self.turned(parts[0], position)
            keys.append(self.turned(parts[1], position))
            values.append(parts[2])
            mixed = []
            for head in range(self.heads):
                group = head * self.groups // self.heads
                scores = np.array([key[group] @ query[head] for key in keys]) / np.sqrt(self.size)
                shares = np.exp(scores - scores.max())
                mixed.append(sum(s * value[group] for s, value in zip(shares / shares.sum(), values, strict=True)))
            out.append(self.product(f"{at}.o_proj", np.concatenate(mixed)))
        return out

    def states(self, states: Sequence[np.ndarray], tokens: Sequence[int]) -> list[np.ndarray]:
        """One causal pass: state i is paired with `tokens[i]`, the token behind its position."""
        x = list(states)
        for layer in range(self.num_layers):
            at = f"layers.{layer}"
            if layer == 0:
                own = [self.norm(f"{at}.hidden_norm", state) for state in x]
                beside = [self.norm(f"{at}.input_layernorm", self.embedding[token]) for token in tokens]
                inputs = [np.concatenate(pair) for pair in zip(beside, own, strict=True)]
                x = own if self.keys.get("norm_before_residual") else x
            else:
                inputs = [self.norm(f"{at}.input_layernorm", state) for state in x]
            x = [state + more for state, more in zip(x, self.attended(layer, inputs), strict=True)]
            for i, state in enumerate(x):
                normed = self.norm(f"{at}.post_attention_layernorm", state)
                gate, up = (self.product(f"{at}.mlp.{name}_proj", normed) for name in ("gate", "up"))
                x[i] = state + self.product(f"{at}.mlp.down_proj", silu(gate) * up)
        return x

    def logits(self, features: np.ndarray, tokens: Sequence[int], path: Sequence[int]) -> np.ndarray:
        """Over draft columns, behind a path of tokens that starts with the last committed one, the root.

        Args:
          features: [n, layers, H] of the committed positions but the root's.
          tokens: the committed tokens, n + 1 with the root.
        """
        states, following, last = [self.fused(x) for x in features], [*tokens[1:]], np.zeros(0)
        for depth in range(len(path)):
            last = self.states(states, following)[-1]
            normed = self.norm("norm", last)
            states.append(normed if self.keys.get("norm_output") else last)
            following += path[depth + 1 : depth + 2]
        return self.product("lm_head", normed)

    def token(self, column: int) -> int:
        """The token of a column: `d2t` holds what is added to its number."""
        return int(column + self.tensors["d2t"][column]) if "d2t" in self.tensors else column

    def chain(self, features: np.ndarray, tokens: Sequence[int], depth: int) -> tuple[np.ndarray, list[int]]:
        """The logits [depth, columns] of a greedy chain, and its tokens."""
        path, found = [int(tokens[-1])], []
        for _ in range(depth):
            found.append(self.logits(features, tokens, path))
            path.append(self.token(int(found[-1].argmax())))
        return np.stack(found), path[1:]
