"""PEARL on two sets of fake devices: the text of the scheduled one, drafts beside a pass, bad arguments."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import setups
from support.meshes import needs_devices

import hsd_jax
from hsd_jax.drafters.pearl import overlap
from hsd_jax.infer.loop import UNBOUNDED
from hsd_jax.measure import pearl
from hsd_jax.session import prepare
from hsd_jax.settings import Sampling

pytestmark = needs_devices
slow = pytest.mark.slow

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
CALL = {"max_new_tokens": [24, 40, 9], "temperature": [0.0, 0.8, 0.8], "seed": [1, 2, 3]}
GAMMA = 3


@pytest.fixture(scope="module")
def pair():
    return setups.params_of("small_lm", max_len=128, precision="exact")


@pytest.fixture(scope="module")
def apart(pair):
    return hsd_jax.pearl(pair, GAMMA, devices=(1, 1))


def assert_scheduled(found: hsd_jax.DecodeResult, scheduled: hsd_jax.DecodeResult) -> None:
    """The same tokens in the same rounds, and each of these overlapped."""
    np.testing.assert_array_equal(found.tokens, scheduled.tokens)
    np.testing.assert_array_equal(found.stats.accepted_histogram, scheduled.stats.accepted_histogram)
    rounds = {"overlapped rounds": scheduled.stats.num_target_passes}
    assert found.stats.drafter == scheduled.stats.drafter | rounds


# --- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_of_any_length_say_what_plain_decoding_says(pair, apart):
    """Greedy and sampled rows, which end in different rounds; the weights of each model lie on its own device."""
    found = hsd_jax.decode(apart, PROMPTS, **CALL)
    np.testing.assert_array_equal(found.tokens, hsd_jax.decode(pair, PROMPTS, speculate=False, **CALL).tokens)
    assert_scheduled(found, hsd_jax.decode(hsd_jax.pearl(pair, GAMMA), PROMPTS, **CALL))
    for name, device in (("target", 0), ("drafter", 1)):
        assert {x.device.id for x in jax.tree.leaves(getattr(apart, name))} == {device}


@pytest.mark.slow
def test_rows_come_and_go(pair, apart):
    """More requests than slots, in caches smaller than the first size: each says what plain decoding says of it."""
    asked = zip(PROMPTS, CALL["max_new_tokens"], CALL["temperature"], CALL["seed"], strict=True)
    names = "prompt", "max_new_tokens", "temperature", "seed"
    requests = [dict(zip(names, values, strict=True)) for values in asked]
    with hsd_jax.Session(apart, slots=2) as session:
        found = [one.tokens.tolist() for one in session.generate(requests, ordered=True)]
    plain = hsd_jax.decode(pair, PROMPTS, speculate=False, **CALL)
    assert found == [row[:num].tolist() for row, num in zip(plain.tokens, plain.num_tokens, strict=True)]


@pytest.mark.parametrize("asked", [{"repetition_penalty": 1.2}, {"logprobs": 1}, {"prompt_logprobs": 1}], ids=str)
def test_settings_without_a_program_are_refused_at_once(pair, apart, asked):
    """By calls before anything runs; in a session they disturb no row."""
    with pytest.raises(ValueError, match="devices of its own"):
        hsd_jax.decode(apart, PROMPTS[0], 4, **asked)
    with hsd_jax.Session(apart, slots=2) as session:
        handle = session.admit(PROMPTS[0], 12)
        session.step(1)
        with pytest.raises(ValueError, match="devices of its own"):
            session.admit(PROMPTS[1], 12, **asked)
        (wrong,) = session.generate([{"prompt": PROMPTS[1], "max_new_tokens": 12, **asked}], on_error="yield")
        assert wrong.finish_reason == "failed" and "devices of its own" in str(wrong.error)
        session.step()
        text = session.take(handle).tokens
    np.testing.assert_array_equal(text, hsd_jax.decode(pair, PROMPTS[0], 12, speculate=False).tokens[0])


@pytest.mark.slow
def test_a_row_ends_inside_a_round(pair, apart):
    """Each token of a text in turn ends it: in every place of a round, with rounds in flight behind it."""
    call = {"max_new_tokens": 30, "temperature": 0.8, "seed": 1}
    whole = hsd_jax.decode(pair, PROMPTS[0], speculate=False, **call).tokens[0].tolist()
    inside = 0
    for eos in sorted(set(whole)):
        found = hsd_jax.decode(apart, PROMPTS[0], eos=eos, **call)
        assert found.tokens[0].tolist() == whole[: whole.index(eos) + 1]
        inside += found.stats.num_target_passes < found.num_tokens[0]
    assert inside > 1


@slow
@pytest.mark.parametrize(("accept", "devices"), [("match", (2, 6)), ("recursive", (6, 2))])
def test_models_in_parts_under_either_rule(pair, accept, devices):
    """Drafts, coins and residuals are keyed by position: drawn text, too, is that of the scheduled rounds."""
    split = hsd_jax.pearl(pair, GAMMA, devices=(jax.devices()[: devices[0]], jax.devices()[devices[0] :]))
    kernel = split.target["layer_0"]["mlp"]["up"]["kernel"].sharding
    assert len(kernel.device_set) == devices[0]
    found = hsd_jax.decode(split, PROMPTS, accept=accept, **CALL)
    assert_scheduled(found, hsd_jax.decode(hsd_jax.pearl(pair, GAMMA), PROMPTS, accept=accept, **CALL))


@slow
def test_caches_grow_between_rounds(pair):
    """From 16 slots to 64 and all: no round writes past the last one, though the host knows no row's length.

    The target drafts for itself: rows grow as fast as they can, and a draft that is refused was read wrongly.
    """
    call = {"max_new_tokens": 100, "temperature": 0.8}
    prompt = [1, 5, 9, 2, 6, 5, 3, 5]  # with 8 slots more, what a round may write, all are full
    same = dataclasses.replace(pair, drafter=pair.target)
    one = prepare(hsd_jax.pearl(same, GAMMA, devices=(1, 1)), prompt, Sampling(**call))
    state, *settings = one.rows
    tokens = jnp.zeros((1, 16), jnp.int32).at[0, : len(prompt)].set(jnp.array(prompt))
    given = tokens, jnp.array([len(prompt)], jnp.int32), state.keys, settings[1]
    small = one.setup.decoder.prefill(one.setup.models, *given, capacity=16)
    one.rows = small, *settings
    assert one.run(UNBOUNDED)
    state = one.rows[0]
    assert state.cache.capacity == state.drafter.base.cache.capacity > 64
    plain = hsd_jax.decode(pair, prompt, speculate=False, **call)
    np.testing.assert_array_equal(one.take(0).tokens, plain.tokens[0])
    scheduled = hsd_jax.decode(hsd_jax.pearl(same, GAMMA), prompt, **call).stats
    np.testing.assert_array_equal(state.stats.accepted_histogram[0], scheduled.accepted_histogram)
    assert scheduled.tau > 2.8


def test_rounds_end_when_fewer_rows_go_on_than_are_wanted(apart):
    """A few rounds later than one program would, and the rows that are left can go on."""
    call = {"max_new_tokens": [6, 60, 60], "temperature": 0.0}
    request = prepare(apart, [[5, 6], [7, 8], [9]], Sampling(**call))
    assert request.run(UNBOUNDED, least_live=3)
    assert request.rows[0].done.tolist()[:3] == [True, False, False]
    assert request.run(UNBOUNDED)
    assert bool(request.rows[0].done.all())


# --- the host ---------------------------------------------------------------------------------------------------------


def test_drafts_are_made_while_the_target_reads(apart, monkeypatch):
    """With a target that is slow, two rounds are dispatched and the first one's drafts are there before its verdict."""
    session = prepare(apart, PROMPTS[0], Sampling(8))
    decoder, (state, sampling, limits) = session.setup.decoder, session.rows
    assert isinstance(decoder, overlap.Overlapped)

    @jax.jit
    def late(x):
        large = jnp.full((256, 256), x[0, 0, 0])  # without a large product a CPU would run it while the host waits
        spun = lax.fori_loop(0, 8_000_000, lambda i, y: 0.999 * y + 0.001 * jnp.sin(y), (large @ large)[0, :16])
        return x.at[0, 0, :16].add(0 * spun)

    def look(*args, look=decoder.look):
        output, noise = look(*args)
        return output, late(noise)

    late(jax.device_put(jnp.zeros((1, GAMMA + 1, apart.target_config.vocab_size)), apart.mesh.devices[0]))
    given = session.setup.models, decoder._across((state.keys, sampling)), sampling, limits
    apart, _ = decoder.dispatch(*given, *overlap._apart(state))  # compiles
    monkeypatch.setattr(decoder, "look", look)
    jax.block_until_ready(apart[0].length)
    (state, (base, outcome)), where = decoder.dispatch(*given, *apart)
    jax.block_until_ready(base.cache.length)
    assert not where.is_ready()
    _, later = decoder.dispatch(*given, state, (base, outcome))
    assert not where.is_ready() and not later.is_ready()
    assert np.asarray(later)[0, 0] > np.asarray(where)[0, 0]


# --- users ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "devices",
    [
        *((8, 1), "1:", "0:9", "0,1:1-3", (0, 1), (True, 1), 2, "ab"),
        lambda: (jax.devices()[:1] * 2, jax.devices()[1:2]),
    ],
)
def test_illegal_devices(pair, devices):
    with pytest.raises(ValueError, match="devices="):
        hsd_jax.pearl(pair, GAMMA, devices=devices() if callable(devices) else devices)


def test_devices_by_name(pair):
    """As text: counts, and lists with ranges."""
    for text, target, drafter in (("1,2", [0], [1, 2]), ("3:0", [3], [0]), ("4-5,7:0-1", [4, 5, 7], [0, 1])):
        meshes = pearl.submeshes(text)
        assert [[device.id for device in mesh.devices.ravel()] for mesh in meshes] == [target, drafter]
    split = hsd_jax.pearl(pair, GAMMA, devices="3:0")
    assert {x.device.id for x in jax.tree.leaves(split.target)} == {3}


def test_what_two_programs_cannot_do(pair, apart):
    """Each by its name, before anything compiles."""
    with pytest.raises(ValueError, match="gamma=0"):
        hsd_jax.pearl(pair, 0, devices=(1, 1))
    with pytest.raises(ValueError, match="block_verification"):
        hsd_jax.decode(apart, [[1]], 4, accept="block_verification")
    with pytest.raises(ValueError, match="small_lm"):
        small = dataclasses.replace(apart, drafter_config=pair.drafter_config)
        hsd_jax.decode(small, [[1]], 4)


@pytest.mark.parametrize(("c", "gamma"), [(0.2, 1), (2.6, 3)])
def test_gamma_is_the_drafts_in_the_time_of_a_pass(pair, monkeypatch, c, gamma):
    monkeypatch.setattr(pearl, "measured_c", lambda params: c)
    config = hsd_jax.pearl(pair).drafter_config
    assert config.gamma == gamma and config.ratio == c and f"gamma {gamma}" in config.choice
    assert config == hsd_jax.pearl(pair, gamma).drafter_config  # so a given gamma runs the same programs
    assert hsd_jax.pearl(pair, gamma).drafter_config.choice is None
