"""The text a small drafter writes itself while it is distilled, and its held-out figures, against plain loops.

Its loss and whole runs are `test_distill.py`, the divergences of single nodes `test_losses.py`.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import divergence as oracle
from support.toy import causal_pass
from support.training import ROWS, TARGET, random_rows, random_weights

from hsd_jax.drafters.small_lm import SmallLMConfig
from hsd_jax.measure.texts import Texts
from hsd_jax.models.target import init_target
from hsd_jax.pair import Params
from hsd_jax.train import data, distill, own_text
from hsd_jax.train.loop import LoopConfig

SMALL = SmallLMConfig(**vars(dataclasses.replace(TARGET, num_layers=1, intermediate_size=16)))
"""Another architecture of the same vocabulary."""


# --- held-out figures -------------------------------------------------------------------------------------------------


def test_held_out_divergences():
    """Of what was written, prompts left out, both distributions at the temperature; texts of different lengths."""
    drafter, frozen, rows = random_weights(init_target, SMALL, 1), random_weights(init_target, TARGET, 2), random_rows()
    texts = Texts.join(
        [list(row[: 2 + i]) for i, row in enumerate(rows)], [list(row[2 + i : 9]) for i, row in enumerate(rows)]
    )
    held_out_divergences = distill.held_out_divergences(TARGET, SMALL, distill.DistillLoss(jsd_beta=0.2), texts, 0.7)
    found = held_out_divergences(drafter, frozen)
    tokens = jnp.asarray(texts.tokens[:, :-1])
    both = (causal_pass(*one, tokens).logits for one in ((frozen, TARGET), (drafter, SMALL)))
    p, q = (np.exp(oracle.log_softmax(np.asarray(x, np.float64) / 0.7)) for x in both)
    written = np.zeros((ROWS, 8), bool)
    for i in range(ROWS):
        written[i, 1 + i : 8] = True  # the law of token t stands at t - 1
    values = {"fkl": oracle.kl(p, q), "rkl": oracle.kl(q, p), "jsd": oracle.jensen_shannon(p, q, 0.2)}
    values["tvd"] = oracle.total_variation(p, q)
    wanted = {name: value[written].mean() for name, value in values.items()}
    assert set(found) == {*wanted, "predicted_acceptance"}
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, err_msg=name)
    assert found["predicted_acceptance"] == pytest.approx(1 - wanted["tvd"], rel=1e-5)


# --- text the drafter writes itself -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_hold_what_plain_decoding_of_the_drafter_says():
    """At temperature 0, token by token from whole causal passes; labels are what was written, the end token too."""
    weights = random_weights(init_target, SMALL, 1)
    prompts = [random_rows(3)[i, : 2 + i] for i in range(3)]
    writer = Params(weights, None, SMALL, max_len=SMALL.max_position)
    free = own_text.write_rows(writer, prompts, 12, own_text.OnPolicyConfig(1.0, temperature=0.0), [0] * 3)
    eos = (int(free["tokens"][1, 6]),)  # so that a text ends early
    asked = own_text.OnPolicyConfig(1.0, temperature=0.0, max_new_tokens=7)
    found = own_text.write_rows(dataclasses.replace(writer, eos=eos), prompts, 12, asked, [0] * 3)
    lengths = []
    for row, prompt in enumerate(prompts):
        text, end = list(prompt), len(prompt)
        while end < len(prompt) + 7 and (end == len(prompt) or text[-1] not in eos):
            padded = np.zeros((1, 13), np.int32)
            padded[0, :end] = text
            text.append(int(causal_pass(weights, SMALL, jnp.asarray(padded)).logits[0, end - 1].argmax()))
            end += 1
        lengths.append(end - len(prompt))
        np.testing.assert_array_equal(found["tokens"][row], text + [0] * (13 - end))
        np.testing.assert_array_equal(np.flatnonzero(found["mask"][row]), np.arange(len(prompt), end))
    assert min(lengths) < 7 and free["mask"].sum(1).tolist() == [13 - len(prompt) for prompt in prompts]


@pytest.fixture
def mixed(tmp_path):
    """`make(folder)`: batches of four rows and seven steps, refreshed every third, and what they are made of."""
    rng = np.random.default_rng(5)
    tokens = np.array([rng.permutation(np.arange(2, TARGET.vocab_size))[:10] for _ in range(13)], np.int32)
    starts = np.zeros_like(tokens)
    starts[::2, 4:] = 4
    rows = data.Rows(tokens, np.ones(tokens.shape, bool), 13, 130, starts=starts)
    asked = own_text.OnPolicyConfig(0.5, refresh=3, prompt_tokens=5)
    train = LoopConfig(batch=4, length=9, steps=7)

    writer = Params({}, None, SMALL, eos=(1,), max_len=SMALL.max_position)

    def make(folder: str = "a"):
        return own_text.MixedBatches(rows, train, 3, asked, writer, tmp_path / folder), data.Batches(rows, 4, 3)

    return make


def taken(batches, steps, weights):
    found = []
    for step in steps:
        batches.refresh(weights[step // 3])
        found.append(next(batches))
    return found


@pytest.fixture(scope="module")
def writers():
    """The drafter's weights at steps 0, 3 and 6."""
    return [random_weights(init_target, SMALL, seed) for seed in range(3)]


def test_a_batch_mixes_own_text_and_rows(mixed, writers):
    """The last rows are those of `data.Batches`; the first go on from the beginnings of the rows they stand for, each
    in one document, by the weights of the last refresh."""
    batches, plain = mixed()
    found = taken(batches, range(7), writers)
    texts = set()
    for step, batch in enumerate(found):
        rows = next(plain)
        assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
            n: (x.shape, x.dtype) for n, x in rows.items()
        }
        for name, value in batch.items():
            np.testing.assert_array_equal(value[2:], rows[name][2:])
        for row in range(2):
            at = int(rows["starts"][row].max())  # five tokens are in the second document, if there is one
            assert int(batch["mask"][row].argmax()) == 5 and not batch["starts"][row].any()
            np.testing.assert_array_equal(batch["tokens"][row, :5], rows["tokens"][row, at : at + 5])
            texts.add((step, tuple(batch["tokens"][row])))
    assert len(texts) == 14
    again = taken(mixed(folder="b")[0], range(7), writers)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    others = taken(mixed(folder="c")[0], range(7), [writers[0]] * 3)
    jax.tree.map(np.testing.assert_array_equal, found[:3], others[:3])
    assert all((one["tokens"][:2] != two["tokens"][:2]).any() for one, two in zip(found[3:], others[3:], strict=True))


@pytest.mark.parametrize("broken_at", [3, 5])
def test_batches_go_on_where_a_run_broke_off(mixed, writers, broken_at, monkeypatch):
    """At a refresh and between two, with the texts on disk, and none written again before the next one."""
    whole = taken(mixed(folder="whole")[0], range(7), writers)
    first = mixed()[0]
    taken(first, range(broken_at), writers)
    state = json.loads(json.dumps(first.get_state()))
    second, written = mixed()[0], []
    write = own_text.write_rows
    monkeypatch.setattr(own_text, "write_rows", lambda *args: written.append(1) or write(*args))
    second.set_state(state)
    rest = taken(second, range(broken_at, 7), writers)
    jax.tree.map(np.testing.assert_array_equal, rest, whole[broken_at:])
    assert len(written) == len([step for step in range(broken_at, 7) if step % 3 == 0])
