"""The score of texts beside their speed: the answers of maths problems, and the target's own likelihood."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import toy

from hsd_jax.config import TreeConfig
from hsd_jax.lab.bench import quality, report
from hsd_jax.lab.bench.prompts import BenchPrompt
from hsd_jax.models.target import forward_sequence
from hsd_jax.planning.measure import Mode
from hsd_jax.request import Speculation


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 9 * 2 = 18\n#### 18", "18"),
        ("#### $1,234.50 a year", "1234.50"),
        ("#### -7.", "-7"),
        ("#### none", None),
        ("18", None),
        ("", None),
    ],
)
def test_the_answer_of_a_solution(text, answer):
    assert quality.final_answer(text) == answer


def test_scores_by_hand():
    """Two texts behind two prompts; one of the two problems is solved, the third prompt is none."""
    config = toy.target_config()
    weights = toy.make_target(config)
    spelled = {(5, 6): "#### 1,0", (7,): "#### 3", (8, 9, 2): "#### 4"}
    tokenizer = types.SimpleNamespace(encode=lambda text: [1, 2, 3], decode=lambda tokens: spelled[tuple(tokens)])
    params = types.SimpleNamespace(target=weights, target_config=config, tokenizer=tokenizer)
    found = [BenchPrompt("a", "x", "is #### 10"), BenchPrompt("b", "x", "#### 4"), BenchPrompt("c", "x", "well")]
    score = quality.task_score(params, found, list(map(list, spelled)))
    assert score["exact_match"] == 0.5
    nats = []
    for text in spelled:
        tokens = [1, 2, 3, *text]
        logp = jax.nn.log_softmax(forward_sequence(weights, config, jnp.asarray([tokens])).logits[0])
        nats += [float(logp[at - 1, tokens[at]]) for at in range(3, len(tokens))]
    np.testing.assert_allclose(score["logp"], np.mean(nats), rtol=1e-5)
    assert quality.task_score(params, found[2:], [[7]])["exact_match"] is None


def test_a_lossy_row_says_so():
    row = {"method": "m", "tree": None, "accept": "recursive", "lossy": "linear:0.5", "tau": 2.0, "temperature": 1.0}
    row |= {"tokens_per_second": {"median": 1, "min": 1, "max": 1}, "over_plain": None, "over_reference": None}
    row |= {"num_texts": 3, "same_text_as_plain": 0, "task_score": {"exact_match": None, "logp": -1.25}}
    row |= {"kind": "speculative", "over_plain_whole": None}
    table = report.table_of("a setting", report.COMPARED, [row])
    assert table.rows[0][2] == "recursive, lossy linear:0.5" and table.rows[0][-2:] == ["lossy", "-1.250 nats/token"]
    assert len(table.heads) == len(table.rows[0])
    for match, words in ((0.0, "0% exact"), (0.25, "25% exact")):
        row["task_score"]["exact_match"] = match
        assert report.COLUMNS["task score"](row) == f"{words}, -1.250 nats/token"


def test_a_lossy_mode_is_checked_before_anything_is_decoded():
    config = toy.target_config()
    drafter_config = toy.drafter_config(config)
    params = types.SimpleNamespace(target_config=config, drafter_config=drafter_config)
    tree = TreeConfig(3, 2, 1)
    Mode("m", params, Speculation(tree, "recursive", lossy="square:0.5")).check()
    for accept, lossy, message in (
        ("match", "square:0.5", "lossy='square:0.5': .*accept='recursive'"),
        ("recursive", "square:2", r"Lossy\.epsilon=2\.0: .*1"),
    ):
        with pytest.raises(ValueError, match=message):
            Mode("m", params, Speculation(tree, accept, lossy=lossy)).check()
