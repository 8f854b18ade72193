"""Settings of output against the logits processors of transformers, on the same tiny Llama in float32 (marker `hf`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.cases import cases

import hsd_jax

pytestmark = pytest.mark.hf
VOCAB, NEW_TOKENS, TOLERANCE, ENDS = 16, 24, 1e-4, (10, 14)
SIZES = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
PROMPTS = np.array([[1, 5, 7, 5, 2, 8], [4, 4, 11, 2, 15, 6], [12, 10, 3, 1, 0, 14]])
"""Their last tokens begin no forbidden sequence: in transformers those of the prompt count, too."""
WORDS = ((7,), (2, 4), (4, 10), (2, 15), (15, 10, 3), *((token, (3 * token + 2) % VOCAB) for token in (1, 3, 5, 9, 13)))
BIAS = {2: 1.5, 5: -2.0, 11: 0.75, 13: -100.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.3},
    "repeats": {"repetition_penalty": 0.7},
    "bias": {"logit_bias": BIAS},
    "words": {"bad_words": WORDS},
    "min_tokens": {"min_tokens": 15},
    "all": {"repetition_penalty": 1.2, "logit_bias": BIAS, "bad_words": WORDS, "min_tokens": 10},
}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The same folder in both libraries."""

    params: hsd_jax.Params
    model: Any


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES)).float().eval()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return Loaded(hsd_jax.load(target=folder, precision="exact"), model)


def processors(settings: dict[str, Any], sampled: dict[str, Any] | None = None):
    """Those of transformers, in the order of hsd_jax."""
    import transformers

    found = transformers.LogitsProcessorList()
    if bias := settings.get("logit_bias"):
        found.append(transformers.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]))
    if words := settings.get("bad_words"):
        found.append(transformers.NoBadWordsLogitsProcessor([list(word) for word in words]))
    if least := settings.get("min_tokens"):
        found.append(transformers.MinNewTokensLengthLogitsProcessor(PROMPTS.shape[1], least, list(ENDS)))
    if penalty := settings.get("repetition_penalty"):
        found.append(transformers.RepetitionPenaltyLogitsProcessor(penalty))
    made = {
        "temperature": transformers.TemperatureLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
    }
    found.extend(made[name](value) for name, value in (sampled or {}).items())
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_text_is_that_of_transformers(loaded, name):
    import torch

    ours = hsd_jax.decode(loaded.params, PROMPTS, NEW_TOKENS, eos=ENDS, **SETTINGS[name])
    wanted = loaded.model.generate(
        torch.from_numpy(PROMPTS),
        attention_mask=torch.ones(PROMPTS.shape, dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=list(ENDS),
        logits_processor=processors(SETTINGS[name]),
    )[:, PROMPTS.shape[1] :]
    bare = hsd_jax.decode(loaded.params, PROMPTS, NEW_TOKENS, eos=ENDS)
    for row, num in enumerate(ours.num_tokens):
        assert ours.tokens[row, :num].tolist() == wanted[row, :num].tolist()
        assert num == NEW_TOKENS or ours.tokens[row, num - 1] in ENDS
    assert (ours.tokens.tolist() == bare.tokens.tolist()) == (name == "none")


SAMPLED = {
    "min_p": {"temperature": 0.8, "min_p": 0.2},
    "all": {"temperature": 1.3, "min_p": 0.03, "top_k": 9, "top_p": 0.9},
}


@pytest.mark.parametrize(("name", "sampled"), cases([(n, s) for n in ("none", "all") for s in SAMPLED]))
def test_rows_draw_from_the_distribution_of_transformers(loaded, name, sampled):
    """The whole of it, at every place of a drawn text."""
    settings = {**SETTINGS[name], **SAMPLED[sampled], "eos": ENDS, "logprobs": f"processed:{VOCAB}"}
    result = hsd_jax.decode(loaded.params, PROMPTS, NEW_TOKENS, **settings)
    num_removed = 0
    for row, (found, wanted) in enumerate(
        told_and_wanted(loaded, result, processors(SETTINGS[name], SAMPLED[sampled]))
    ):
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE, err_msg=f"row {row}")
        num_removed += (wanted == -np.inf).sum()
    assert num_removed > 20


def test_log_probabilities_are_those_of_transformers(loaded):
    result = hsd_jax.decode(
        loaded.params, PROMPTS, NEW_TOKENS, temperature=1.0, eos=(), logprobs=VOCAB, **SETTINGS["all"]
    )
    for found, wanted in told_and_wanted(loaded, result, processors({})):
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE)


def told_and_wanted(loaded, result, changes):
    """For each row the log-probabilities [T, V] of all tokens at each place, by hsd_jax and by transformers."""
    import torch

    for row, num in enumerate(result.num_tokens):
        told = result.logprobs[row]
        found = np.full((num, VOCAB), np.nan)
        np.put_along_axis(found, told.tokens, told.values, 1)
        np.testing.assert_array_equal(told.chosen, found[np.arange(num), result.tokens[row, :num]])
        whole = torch.from_numpy(np.concatenate([PROMPTS[row], result.tokens[row, :num]]).astype(np.int64))[None]
        with torch.no_grad():
            logits = loaded.model(whole).logits[0, PROMPTS.shape[1] - 1 : -1]
        changed = [changes(whole[:, : PROMPTS.shape[1] + place], logits[place][None])[0] for place in range(num)]
        yield found, torch.log_softmax(torch.stack(changed), -1).numpy()
