"""The bundled demo pair says today what it said when `golden.json` was written: no accidental change of either side.

Float32 at highest precision. The file is made by `python -m tests.support.golden`.
"""

from __future__ import annotations

import json

import pytest
from support import golden

STORED = json.loads(golden.FILE.read_text())
NAMES = [numbers["prompt"] for numbers in STORED["prompts"]]


@pytest.fixture(scope="module", params=STORED["prompts"], ids=NAMES)
def stored(request):
    """The numbers of one prompt."""
    changed = f"the demo's files are not those of {golden.FILE.name}; if that is meant, run `{golden.COMMAND}`"
    assert STORED["assets"] == golden.assets_hash(), changed
    return request.param


def test_prompts_become_the_same_tokens(stored):
    text = next(p.text for p in golden.prompts.demo_prompts() if p.name == stored["prompt"])
    assert golden.params().tokenizer.encode(text) == stored["tokens"]


def test_target_logits(stored):
    logits = golden.target_logits([*stored["tokens"], *stored["greedy"]])
    for position, top in stored["target_logits"].items():
        tokens, wanted = [int(token) for token in top], list(top.values())
        assert logits[int(position), tokens] == pytest.approx(wanted, abs=golden.TOLERANCE)
        others = logits[int(position)].copy()
        others[tokens] = -float("inf")
        assert others.max() < min(wanted) + golden.TOLERANCE


def test_draft_tree(stored):
    found = golden.draft(stored["tokens"])
    assert found == pytest.approx(stored["draft_logp"], abs=golden.TOLERANCE)


@pytest.mark.parametrize("speculate", [False, True])
def test_greedy_text(stored, speculate):
    assert golden.decode(stored["tokens"], speculate) == stored["greedy"]
