"""A copying drafter: what it proposes, and that no text changes."""

from __future__ import annotations

from oracles import copying as oracle

import hsd_jax


def test_it_drafts_what_the_oracle_drafts_and_the_text_stays():
    prompt = "the cat the cat the cat"
    plain = hsd_jax.decode(hsd_jax.load("demo"), prompt, max_new_tokens=24, speculate=False)
    params = hsd_jax.load("demo", drafter="copy:3")
    out = hsd_jax.decode(params, prompt, max_new_tokens=24, tree=hsd_jax.TreeConfig(5, 4, 1))
    assert out.tokens.tolist() == plain.tokens.tolist()
    text = [*params.tokenizer.encode(prompt), *out.tokens[0].tolist()]
    start, passes = len(text) - 24, 0
    while start < len(text):
        drafted = oracle.draft(text[:start], 3, 4)
        kept = 0
        while kept < 4 and start + kept + 1 < len(text) and drafted[kept] == text[start + kept]:
            kept += 1
        start, passes = start + kept + 1, passes + 1
    assert passes == out.stats.num_target_passes
