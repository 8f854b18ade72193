"""`examples/json_schema.py`: with drafts the answer is the plain one, and what the schema allows."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import hsd_jax

pytest.importorskip("llguidance")
SCRIPT = Path(__file__).resolve().parent.parent / "examples/json_schema.py"
TEXT = '{"city": "Oslo", "people": 11}'
PROMPT = "User: I would like to book a table.\nAssistant:"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Osaka"]}, "people": {"type": "integer", "minimum": 2, "maximum": 12}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("json_schema", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def params():
    return hsd_jax.load("demo")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_with_drafts_is_the_plain_one(example, params, temperature):
    prompt = params.tokenizer.encode(PROMPT)

    def answer(**how):
        process = example.constraint(example.Guide(params, SCHEMA), len(prompt))
        return hsd_jax.decode(params, [prompt], 40, temperature=temperature, seed=2, logits_processor=process, **how)

    plain, drafted = answer(speculate=False), answer(tree=hsd_jax.TreeConfig(8, 4, 2))
    assert drafted.text == plain.text and drafted.finish_reason == plain.finish_reason == ["stop"]
    found = json.loads(plain.text[0])
    assert found["city"] in ("Oslo", "Osaka") and 2 <= found["people"] <= 12
    assert drafted.stats.tau > 1.3


def test_a_guide_goes_from_any_text_to_any_other(example, params):
    """Also behind end tokens, and behind drafts that are not allowed."""
    moving, rng = example.Guide(params, SCHEMA), np.random.default_rng(0)
    right, wrong = (params.tokenizer.raw.encode(x, add_special_tokens=False).ids for x in (TEXT, '{"town": 5'))
    end = [params.eos[0]]
    texts = [right[:n] for n in range(len(right) + 1)] + [right + end, wrong, wrong[:-1], right[:5] + end + right[:2]]
    for number in rng.integers(len(texts), size=60):
        fresh = example.Guide(params, SCHEMA).after(texts[number])
        np.testing.assert_array_equal(moving.after(texts[number]), fresh)
    assert moving.after(right)[end].all() and not moving.after(right[:-1])[end].any()
    assert moving.after(wrong).all() and moving.after(right).sum() == 1


def test_a_schema_that_is_none(example, params):
    with pytest.raises(ValueError, match="the schema: "):
        example.Guide(params, {"type": "nothing"})
