"""Coupled drafts: chosen by the target's own noise, they change when a token appears and never which.

Their trees against the oracle, the text by enumeration over proposers, settings and seeds, their acceptance against its
closed form, and mutants that one of these must find.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import coupled as oracle
from oracles import sampling as sampling_oracle
from scipy import stats
from support import calls, setups, tiny_pairs, toy
from support.cases import cases
from support.texts import first_difference

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.table import make_drafter
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.accept import match_rule, recursive_rule
from hsd_jax.infer.decode import Decoder
from hsd_jax.infer.plain import make_plain_step
from hsd_jax.infer.step import make_step, or_invalid
from hsd_jax.infer.tree import Grower, ancestor_mask, coupled_sharpness
from hsd_jax.kernels import native, ops
from hsd_jax.types import INVALID_TOKEN, DrawScheme, ModelOutput, NewKV, RoundInputs, SamplingParams

FALSE_ALARM = 1e-6
VOCAB = 9
HOT = np.array([0, 2, 3, 5, 6, 8], np.int32)
CONFIGS = [TreeConfig(5, 4, 1), TreeConfig(4, 1, 3), TreeConfig(12, 4, 3)]
SETTINGS = [
    (0.0, None, None),
    (0.5, None, None),
    (0.8, 4, None),
    (1.0, None, None),
    (1.0, None, 0.99),
    (1.7, 5, 0.999),
    (0.0, 3, 0.5),
    (1e-3, None, None),
]


def settings_of(rows) -> SamplingParams:
    temperature, top_k, top_p = zip(*rows, strict=True)
    return SamplingParams(
        jnp.asarray(temperature, jnp.float32),
        jnp.asarray([k or 0 for k in top_k], jnp.int32),
        jnp.asarray([p or 1.0 for p in top_p], jnp.float32),
    )


def keys_of(seeds) -> jax.Array:
    return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))


# --- trees ------------------------------------------------------------------------------------------------------------


@functools.cache
def jitted(config: TreeConfig, scheme: DrawScheme, is_hot: bool, is_given: bool = True):
    """Grows trees with the noise of the round given, or left to the tree."""
    draft_to_target = jnp.asarray(HOT) if is_hot else None

    def grow(base, table, root, keys, position, sampling):
        noise = sampling_lib.round_noise(keys, position, config.depth + 1, VOCAB, sampling) if is_given else None
        bias = toy.of_tokens(lambda tokens: table[tokens])
        inputs = RoundInputs(root, position, keys, sampling, noise)
        return Grower(config, scheme, VOCAB).grow_token_free(base, bias, inputs, draft_to_target)

    return jax.jit(grow)


def inputs(config: TreeConfig, seed: int, is_hot: bool, rows=SETTINGS):
    """A row for each setting, with logits, a root, a key and a position of its own."""
    rng, columns = np.random.default_rng(seed), len(HOT) if is_hot else VOCAB
    base = rng.normal(0, 1.5, (len(rows), config.depth, columns)).astype(np.float32)
    table = rng.normal(0, 1.5, (VOCAB, columns)).astype(np.float32)
    root = jnp.asarray(rng.integers(0, VOCAB, len(rows)), jnp.int32)
    keys, position = keys_of(rng.integers(0, 2**32, len(rows))), jnp.asarray(rng.integers(0, 50, len(rows)), jnp.int32)
    return base, table, root, keys, position, settings_of(rows)


def find_difference(
    config: TreeConfig, is_hot: bool, seed: int, rows=SETTINGS, scheme=DrawScheme.COUPLED
) -> str | None:
    """Where a tree and the oracle's differ, or None."""
    base, table, root, keys, position, sampling = inputs(config, seed, is_hot, rows)
    tree = jax.tree.map(np.asarray, jitted(config, scheme, is_hot)(base, table, root, keys, position, sampling))
    predicted = np.asarray(position)[:, None] + 1 + np.arange(config.depth, dtype=np.int32)
    noise = np.asarray(sampling_lib.position_noise(keys, jnp.asarray(predicted), VOCAB), np.float64)
    for row, setting in enumerate(rows):
        wanted = oracle.grow(
            lambda path, row=row: np.float64(base[row, len(path) - 1]) + table[path[-1]],
            int(root[row]),
            config.nodes,
            config.depth,
            config.width,
            noise[row],
            setting,
            HOT if is_hot else None,
        )
        found = tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.depth[row].tolist()
        if found != wanted:
            return f"row {row} {setting}: {found} is not {wanted}"
    return None


@pytest.mark.parametrize("is_hot", [False, True], ids=["whole", "hot"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_trees_are_those_of_the_oracle(config, is_hot):
    """Chains, one level of children, and beams; greedy, sampled and filtered rows in one batch."""
    for seed in range(10):
        assert find_difference(config, is_hot, seed) is None


def test_the_comparison_finds_trees_that_see_no_noise():
    assert find_difference(CONFIGS[2], False, 0, scheme=DrawScheme.ARBITRARY) is not None


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_greedy_rows_have_the_tree_they_always_had(config):
    """Beside sampled rows, and in a batch of greedy rows alone."""
    for rows in (SETTINGS, [(0.0, None, None)] * len(SETTINGS)):
        call = inputs(config, 3, False, rows)
        one, other = (jitted(config, scheme, False)(*call) for scheme in (DrawScheme.COUPLED, DrawScheme.ARBITRARY))
        greedy = [row for row, setting in enumerate(rows) if setting[0] == 0.0]
        for name in ("tokens", "parents", "depth", "valid"):
            found, wanted = (np.asarray(getattr(tree, name))[greedy] for tree in (one, other))
            np.testing.assert_array_equal(found, wanted)
        assert one.scheme is DrawScheme.COUPLED and one.draft_logp is None


def test_noise_that_is_not_given_is_the_same():
    call = inputs(CONFIGS[2], 5, True)
    given, computed = (jitted(CONFIGS[2], DrawScheme.COUPLED, True, is_given)(*call) for is_given in (True, False))
    jax.tree.map(np.testing.assert_array_equal, given, computed)


def test_filters_that_leave_fewer_tokens_than_children():
    """Children without mass come last; parents stay before children, and the text is none of their business."""
    rows = [(1.0, 1, None), (0.7, 2, None), (1.0, None, 0.05)]
    tree = jax.tree.map(np.asarray, jitted(CONFIGS[2], DrawScheme.COUPLED, False)(*inputs(CONFIGS[2], 1, False, rows)))
    assert (tree.parents[:, 1:] >= 0).all() and (tree.parents < np.arange(CONFIGS[2].nodes)).all()
    assert (tree.depth[:, 1:] == np.take_along_axis(tree.depth, tree.parents[:, 1:], 1) + 1).all()
    assert tree.depth[0].max() == CONFIGS[2].depth  # top-k 1: the chain of the likeliest comes first
    assert tree.depth[0, :5].tolist() == [0, 1, 2, 3, 4]


def test_beams_are_ranked_by_the_temperature():
    found = coupled_sharpness(jnp.asarray([0.0, 0.1, 0.5, 1.0, 3.0]))
    np.testing.assert_allclose(found, [oracle.sharpness(t) for t in (0.0, 0.1, 0.5, 1.0, 3.0)])


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "xla"])
@pytest.mark.parametrize("vocab", [24, *(pytest.param(v, marks=pytest.mark.slow) for v in (1000, 4096)), 1021])
def test_noise_has_the_same_bits_alone_and_in_a_round(vocab, is_native, fully_optimized):
    """[B, 1, V] as plain decoding draws it, alone and fused with its argmax, and [B, D + 1, V] of a round."""
    if is_native and not native.available():
        pytest.skip("needs the compiled kernels")
    keys, root, depth = keys_of([3, 9]), jnp.array([17, 40], jnp.int32), 7
    sampling = settings_of([(1.0, None, None), (0.7, None, None)])

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def noise(root, num, rows):
        with native.enabled(is_native):
            some = jax.tree.map(lambda x: x[:rows], sampling)
            return sampling_lib.round_noise(keys[:rows], root[:rows], num, vocab, some)

    whole = np.asarray(noise(root, depth + 1, 2))
    for place in range(depth + 1):
        for rows in (1, 2):
            alone = np.asarray(noise(root + place, 1, rows))
            np.testing.assert_array_equal(alone[:, 0].view(np.int32), whole[:rows, place].view(np.int32))

    @jax.jit
    def plainly(logits, position):
        with native.enabled(is_native):
            return sampling_lib.draw(keys, logits, position, sampling)

    @jax.jit
    def in_a_round(logits):
        with native.enabled(is_native):
            shared = sampling_lib.round_noise(keys, root, depth + 1, vocab, sampling)
            return ops.argmax(sampling_lib.perturb(shared, logits, sampling))

    logits = jnp.asarray(np.random.default_rng(vocab).normal(0, 1, (2, depth + 1, vocab)), jnp.float32)
    drawn = in_a_round(logits)
    for place in range(depth + 1):
        one = plainly(logits[:, place : place + 1], root[:, None] + 1 + place)
        np.testing.assert_array_equal(one[:, 0], drawn[:, place])


# --- the text is a function of keys and target alone --------------------------------------------------------------


COUPLED = [name for kind, name in setups.OF_EACH_KIND.items() if kind != "lookup"]
OF_STATES = ["chain", "hot", "path", "hot_path", "eagle_layers", "ahead", "hot_sum", "block_sum", "skip"]
SLOW_SEEDED = [*OF_STATES, "small_lm", *(name for name in setups.LEFT_TO_SLOW if name not in ("eagle", "medusa"))]


def warm_call(seed: int) -> calls.Call:
    """Temperatures 0, 0.5, 0.8 and 1, with and without filters; a seed of its own in every row."""
    rng = np.random.default_rng(seed)
    return calls.mixed_call(seed=seed).replace(
        new_tokens=[30] * 6,
        temperature=[0.5, 0.8, 1.0, 0.0, 1.0, 0.5],
        top_k=[0, 0, 0, 0, 6, 0],
        top_p=[1.0, 1.0, 1.0, 1.0, 0.95, 0.8],
        seeds=rng.integers(0, 2**32, 6).tolist(),
    )


@functools.cache
def plain_texts(seed: int) -> list[list[int]]:
    call, plain = warm_call(seed), setups.setup("llama", "plain")
    return calls.generated(call, call.run(plain.decoder, plain.models))


@pytest.mark.parametrize("proposer", cases([*COUPLED, "block", *OF_STATES], SLOW_SEEDED))
def test_text_is_that_of_plain_sampling(proposer):
    """Every proposer, with three sets of seeds and prompts."""
    setup = setups.setup("llama", proposer)
    assert setup.drafter.scheme is DrawScheme.COUPLED
    for seed in (1, 2, 3):
        call = warm_call(seed)
        found = calls.generated(call, call.run(setup.decoder, setup.models))
        assert first_difference(found, plain_texts(seed)) is None


def test_arbitrary_trees_may_still_be_asked_for():
    call, setup = warm_call(1), setups.setup("llama", "beam", DrawScheme.ARBITRARY)
    found = calls.generated(call, call.run(setup.decoder, setup.models))
    assert first_difference(found, plain_texts(1)) is None


def test_lookup_has_no_distribution_to_couple():
    assert setups.setup("llama", "lookup").drafter.scheme is DrawScheme.ARBITRARY


ROWS = 1024


def tiny_call(rows: int = ROWS) -> calls.Call:
    return calls.Call(
        prompts=[np.array([1], np.int32)] * rows,
        new_tokens=[tiny_pairs.NEW_TOKENS] * rows,
        temperature=[(1.0, 0.8, 0.5)[row % 3] for row in range(rows)],
        top_k=[0] * rows,
        top_p=[1.0] * rows,
        seeds=list(range(rows)),
    )


def tiny_state(change=lambda drafter: drafter, tree: TreeConfig = tiny_pairs.TREES["deep"]):
    """The pair of four tokens, decoded in every row with another seed."""
    config, _, drafter_config, models = tiny_pairs.tiny_pair()
    drafter = change(make_drafter(config, drafter_config, tree, scheme=DrawScheme.COUPLED))
    step = make_step(config, drafter, match_rule(tree.depth))
    return tiny_call().run(Decoder(config, step, drafter, precision="highest", use_native=False), models)


@functools.cache
def tiny_plain() -> np.ndarray:
    config, _, _, models = tiny_pairs.tiny_pair()
    decoder = Decoder(config, make_plain_step(config), None, precision="highest", use_native=False)
    return np.asarray(tiny_call().run(decoder, models | {"drafter": None}).tokens)


def displaced(drafter):
    """A mutant: the noise of the position behind."""

    def draft(models, state, inputs):
        late = jnp.concatenate([inputs.noise[:, 1:], inputs.noise[:, :1]], 1)
        return drafter.draft(models, state, inputs.replace(noise=late))

    return drafter._replace(draft=draft)


def estranged(drafter):
    """A mutant: the noise of another key."""

    def draft(models, state, inputs):
        others = jax.vmap(jax.random.fold_in, (0, None))(inputs.keys, 7)
        own = sampling_lib.round_noise(others, inputs.position, *inputs.noise.shape[1:], inputs.sampling)
        return drafter.draft(models, state, inputs.replace(noise=own))

    return drafter._replace(draft=draft)


SLOW_TREES = [pytest.param(tree, marks=pytest.mark.slow) for tree in ("deep", "chain", "branching")]


@pytest.mark.parametrize("tree", ["wide", *SLOW_TREES])
def test_a_thousand_seeds_and_any_tree_give_one_text(tree):
    tree = {**tiny_pairs.TREES, "chain": TreeConfig(4, 3, 1)}[tree]
    np.testing.assert_array_equal(np.asarray(tiny_state(tree=tree).tokens)[:, :9], tiny_plain()[:, :9])


# --- acceptance -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [displaced, estranged])
def test_wrong_noise_costs_acceptance_alone(mutant):
    """The text cannot show it. Passes of all rows: fewer by a tenth at least with the right noise."""
    right, wrong = tiny_state(), tiny_state(mutant)
    np.testing.assert_array_equal(np.asarray(wrong.tokens)[:, :9], tiny_plain()[:, :9])
    passes = [int(state.stats.num_target_passes.sum()) for state in (right, wrong)]
    assert passes[0] < 0.9 * passes[1], passes


PAIRS: list[oracle.Setting] = [(1.0, None, None), (0.8, None, None), (0.5, None, None), (1.0, None, None)]
PAIRS += [(0.8, 5, None), (1.0, None, 0.9)]
"""Settings of pairs of distributions over VOCAB tokens, from nearly alike to unlike, the last ones filtered."""


def pair_of_distributions(number: int) -> tuple[np.ndarray, np.ndarray, oracle.Setting]:
    rng = np.random.default_rng(number)
    target = rng.normal(0, 1.0, VOCAB)
    draft = target + rng.normal(0, 0.2 + 0.3 * number, VOCAB)
    return target.astype(np.float32), draft.astype(np.float32), PAIRS[number]


NUM = 8_000


@functools.cache
def jitted_round(change=None):
    """One round of one child behind the root: whether it is accepted. `change` spoils the noise that the draft sees."""
    tree = TreeConfig(2, 1, 1)

    def verdict(draft_logits, target_logits, keys, sampling):
        rows = len(sampling.temperature)
        zero = jnp.zeros(rows, jnp.int32)
        noise = sampling_lib.round_noise(keys, zero, 2, VOCAB, sampling)
        base = jnp.broadcast_to(draft_logits, (rows, 1, VOCAB))
        nothing = toy.of_tokens(lambda tokens: jnp.zeros((*tokens.shape, VOCAB)))
        shown = noise if change is None else change(noise)
        inputs = RoundInputs(zero, zero, keys, sampling, shown)
        drafted = Grower(tree, DrawScheme.COUPLED, VOCAB).grow_token_free(base, nothing, inputs)
        logits = jnp.broadcast_to(target_logits, (rows, 2, VOCAB))
        mask = ancestor_mask(drafted, 1)
        return match_rule(1).judge(keys, drafted, mask, logits, sampling, zero, noise).num_accepted

    return jax.jit(verdict)


def num_accepted(number: int, change=None) -> int:
    target, draft, setting = pair_of_distributions(number)
    sampling = settings_of([setting] * NUM)
    return int(jitted_round(change)(draft, target, keys_of(np.arange(NUM)), sampling).sum())


def distributions(number: int) -> tuple[np.ndarray, np.ndarray]:
    target, draft, setting = pair_of_distributions(number)
    return sampling_oracle.distribution(target, *setting), sampling_oracle.distribution(draft, *setting)


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_one_child_is_accepted_as_often_as_the_noise_allows(number):
    """As the closed form says, which is never below (1 - TV) / (1 + TV); false alarm 10^-6 each."""
    p, q = distributions(number)
    exact, distance = oracle.acceptance(p, q), np.abs(p - q).sum() / 2
    assert exact >= (1 - distance) / (1 + distance) - 1e-12
    assert stats.binomtest(num_accepted(number), NUM, exact).pvalue > FALSE_ALARM
    # The likeliest token, which knows no noise, is accepted with probability p; on unlike pairs nothing helps.
    if number < 4:
        assert exact > p[np.argmax(q)]


@pytest.mark.parametrize("change", [lambda noise: noise[:, ::-1], lambda noise: -noise], ids=["displaced", "negated"])
def test_the_closed_form_finds_wrong_noise(change):
    p, q = distributions(0)
    assert stats.binomtest(num_accepted(0, change), NUM, oracle.acceptance(p, q)).pvalue < FALSE_ALARM


def test_the_bound_is_that_of_the_paper():
    """Over random pairs: the closed form lies between (1 - TV) / (1 + TV) and 1 - TV, which no coupling exceeds."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        p, q = rng.dirichlet(np.full(VOCAB, rng.choice([0.2, 1.0, 5.0])), 2)
        distance = np.abs(p - q).sum() / 2
        assert (1 - distance) / (1 + distance) - 1e-12 <= oracle.acceptance(p, q) <= 1 - distance + 1e-12


# --- other rules ------------------------------------------------------------------------------------------------------


@functools.cache
def jitted_recursive_round(is_coupled: bool):
    """What one round of one drawn child emits first; `is_coupled`: the child was chosen by the target's noise."""
    tree, scheme = TreeConfig(2, 1, 1), DrawScheme.WITHOUT_REPLACEMENT

    def emitted(draft_logits, target_logits, keys, sampling):
        rows = len(sampling.temperature)
        zero = jnp.zeros(rows, jnp.int32)
        base = jnp.broadcast_to(draft_logits, (rows, 1, VOCAB))
        nothing = toy.of_tokens(lambda tokens: jnp.zeros((*tokens.shape, VOCAB)))
        inputs = RoundInputs(zero, zero, keys, sampling)
        drafted = Grower(tree, scheme, VOCAB).grow_token_free(base, nothing, inputs)
        if is_coupled:
            by_noise = Grower(tree, DrawScheme.COUPLED, VOCAB).grow_token_free(base, nothing, inputs)
            drafted = drafted.replace(tokens=by_noise.tokens)
        logits = jnp.broadcast_to(target_logits, (rows, 2, VOCAB))
        mask = ancestor_mask(drafted, 1)
        return recursive_rule(1, 1).judge(keys, drafted, mask, logits, sampling, zero).emitted[:, 0]

    return jax.jit(emitted)


def recursive_p_value(is_coupled: bool) -> float:
    """Chi-square of the first token of 100,000 rounds against the target's distribution."""
    rng, num = np.random.default_rng(1), 100_000
    target, draft = rng.normal(0, 1.0, (2, VOCAB)).astype(np.float32)
    sampling = settings_of([(1.0, None, None)] * num)
    found = jitted_recursive_round(is_coupled)(draft, target, keys_of(np.arange(num)), sampling)
    scheme = sampling_oracle.distribution(target, 1.0, None, None)
    return float(stats.chisquare(np.bincount(np.asarray(found), minlength=VOCAB), scheme * num).pvalue)


@pytest.mark.slow
def test_the_chi_square_finds_coupled_drafts_under_recursive():
    """A child that says it was drawn, though it was chosen by the noise that draws the token in its place."""
    assert recursive_p_value(is_coupled=False) > FALSE_ALARM
    assert recursive_p_value(is_coupled=True) < FALSE_ALARM


# --- targets without a distribution
# --------------------------------------------------------------------------------------------


def output_of(logits: np.ndarray, hidden: np.ndarray | None = None) -> ModelOutput:
    states = np.zeros((*logits.shape[:2], 2), np.float32) if hidden is None else hidden
    return ModelOutput(jnp.asarray(logits), jnp.asarray(states), (), NewKV((), ()))


def test_tokens_without_a_distribution_are_found():
    """A node whose state is NaN, a token that is NaN everywhere, logits that are all -inf, and rows in order."""
    logits = np.random.default_rng(0).normal(0, 1, (4, 3, 5)).astype(np.float32)
    hidden = np.zeros((4, 3, 2), np.float32)
    hidden[0, 2, 1] = np.nan
    logits[1, :, 3] = np.nan
    logits[2, 1] = -np.inf
    logits[3, :, 2] = -np.inf  # one token of no mass is a distribution
    emitted, path = jnp.full((4, 3), 1, jnp.int32), jnp.array([[0, 1, 2]] * 4, jnp.int32)
    found = jax.jit(or_invalid, static_argnums=3)(emitted, path, output_of(logits, hidden), False)
    wrong = INVALID_TOKEN
    assert found.tolist() == [[1, 1, wrong], [wrong] * 3, [1, wrong, 1], [1, 1, 1]]


@pytest.mark.parametrize("proposer", ["plain", pytest.param("chain", marks=pytest.mark.slow), "beam"])
def test_a_row_without_a_distribution_ends_and_leaves_the_others_alone(proposer):
    """The embedding of one token is NaN: rows that say it end, and what stands before is the text.

    A drafted node of NaN spoils its neighbours in the tree, whose weight of 0 it meets, so with drafts a row may end
    earlier, never later.
    """
    setup = setups.setup("untied", "plain")
    call = warm_call(1)
    wanted = calls.generated(call, call.run(setup.decoder, setup.models))
    prompted = {int(token) for prompt in call.prompts for token in prompt}
    saying = {token: sum(token in text[:-1] for text in wanted) for token in {*range(toy.VOCAB)} - prompted}
    token = next(token for token, rows in saying.items() if 0 < rows < call.batch)
    embedding = setup.models["target"]["embedding"].at[token].set(jnp.nan)
    other = setups.setup("untied", proposer)
    state = call.run(other.decoder, other.models | {"target": setup.models["target"] | {"embedding": embedding}})
    assert bool(state.done.all())
    for text, found in zip(wanted, calls.generated(call, state), strict=True):
        end = text.index(token) + 1 if token in text[:-1] else len(text)
        if proposer == "plain":
            assert found == [*text[:end], *[INVALID_TOKEN] * (end < len(text))]
        elif found[-1] == INVALID_TOKEN:
            assert len(found) - 1 <= end and found[:-1] == text[: len(found) - 1]
        else:
            assert found == text and end == len(text)
