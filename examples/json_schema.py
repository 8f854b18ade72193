"""An answer that a JSON schema allows, with drafts: `pip install llguidance`, then `python examples/json_schema.py`.

llguidance tells on the host which tokens may follow a text. The compiled loop asks it for each node of a draft tree, by
a function that changes the logits, and drafters ask it too. So the answer is the one of plain decoding with the same
schema, token for token. A program that calls the host is compiled in each process, because jax stores none on disk. On
a GPU or TPU each question waits for the host.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

import hsd_jax

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["planet", "moon", "star", "comet"]},
        "has_rings": {"type": "boolean"},
        "facts": {"type": "array", "items": {"type": "string", "maxLength": 80}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "has_rings", "facts"],
    "additionalProperties": False,
}
SPACES: Any = {"whitespace_pattern": " ?"}
"""Between parts. Small models that may write any white space write it without end."""


class Guide:
    """The tokens that a schema allows after a text. It goes to a text from the last one."""

    def __init__(self, params: hsd_jax.Params, schema: dict[str, Any]):
        assert params.tokenizer is not None, "the target has no tokenizer"
        self.num_tokens = params.target_config.vocab_size
        tokenizer = LLTokenizer(params.tokenizer.raw.to_str(), n_vocab=self.num_tokens, eos_token=list(params.eos))
        self.matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema, defaults=SPACES))
        if self.matcher.is_error():
            raise ValueError(f"the schema: {self.matcher.get_error()}")
        self.read: list[int] = []

    def after(self, text: list[int]) -> np.ndarray:
        """bool [V]. After a draft that is not allowed, which no text contains, it allows everything."""
        num_same = 0
        while num_same < min(len(text), len(self.read)) and text[num_same] == self.read[num_same]:
            num_same += 1
        self.matcher.rollback(len(self.read) - num_same)
        num_new = self.matcher.try_consume_tokens(text[num_same:])
        self.read = text[: num_same + num_new]
        if len(self.read) < len(text):
            return np.ones(self.num_tokens, bool)
        bits = allocate_token_bitmask(1, self.num_tokens)
        fill_next_token_bitmask(self.matcher, bits)
        return np.unpackbits(bits.view(np.uint8), bitorder="little")[: self.num_tokens].astype(bool)


def constraint(guide: Guide, prompt_length: int) -> Callable:
    """The `logits_processor` of a call with one prompt."""

    def ask(tokens: jax.Array, length: jax.Array, path: jax.Array) -> np.ndarray:
        text = np.asarray(tokens)[0, prompt_length : int(length[0])].tolist()
        drafted = ([token for token in to_node if token >= 0] for to_node in path[0].tolist())
        return np.stack([guide.after(text + tokens) for tokens in drafted])[None]

    def process(logits, tokens, length, path):
        allowed = jax.pure_callback(ask, jax.ShapeDtypeStruct(logits.shape, bool), tokens, length, path)
        return jnp.where(allowed, logits, -jnp.inf)

    return process


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Answers a question as a JSON schema says.")
    parser.add_argument("question", nargs="?", default="Tell me about the planet Saturn.")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--schema", type=Path, help="a file with a JSON schema")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    params = hsd_jax.load(args.target)
    schema = json.loads(args.schema.read_text()) if args.schema else SCHEMA
    guide = Guide(params, schema)
    assert params.tokenizer is not None
    prompt = params.tokenizer.encode_chat([{"role": "user", "content": args.question}])
    process = constraint(guide, len(prompt))
    out = hsd_jax.decode(params, [prompt], args.max_new_tokens, temperature=args.temperature, logits_processor=process)
    print(*out.text or ())
    print(f"{out.num_tokens[0]} tokens, tau {out.stats.tau:.2f}, {out.stats.plan}")


if __name__ == "__main__":
    main()
