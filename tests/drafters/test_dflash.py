"""DFlash and DSpark, read from folders as speculators writes them, against loops that compute every block anew.

The equality of texts is in `test_exact.py`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import dflash as oracle
from oracles import tree as tree_oracle
from support import calls, dspark, setups, toy
from support.cases import cases
from support.published import save
from support.rules import drawn_schemes, judges
from support.texts import first_difference

from hsd_jax import pair
from hsd_jax.config import NO_REUSE, ReuseConfig, TreeConfig
from hsd_jax.drafters.dflash.draft import DFLASH, INPUTS, context_features, lattice
from hsd_jax.drafters.dflash.heads import with_confidence
from hsd_jax.drafters.hidden.reuse import fresh_logits
from hsd_jax.drafters.method import DraftedFor
from hsd_jax.drafters.published import read_published
from hsd_jax.drafters.rescored.draft import RescoredConfig
from hsd_jax.drafters.table import make_drafter
from hsd_jax.infer.levels import inverse_temperature
from hsd_jax.infer.round import root_of
from hsd_jax.infer.rules.table import RULES
from hsd_jax.infer.tree import token_free
from hsd_jax.models.mask_block import context_pass
from hsd_jax.types import NO_PARENT, DraftTree, DrawScheme

slow = pytest.mark.slow
GATED, RNN = {"markov_head_type": "gated"}, {"markov_head_type": "rnn"}
LATER = {"sample_from_anchor": False}
BIASED = {"attention_bias": True, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
LLAMA = {"model_type": "llama", "head_dim": 8}
FILES = {
    "dflash": (dspark.DFLASH, dspark.SLIDING),
    "dflash_anchor": (dspark.DFLASH | {"sample_from_anchor": True}, BIASED),
    "vanilla": (dspark.DSPARK, {}),
    "vanilla_later": (dspark.DSPARK | LATER | {"sliding_window_non_causal": True}, dspark.SLIDING | LLAMA),
    "gated": (dspark.DSPARK | GATED, dspark.SLIDING),
    "gated_later": (dspark.DSPARK | GATED | LATER | {"confidence_head_with_markov": False}, {}),
    "rnn": (dspark.DSPARK | RNN, {}),
    "rnn_later": (dspark.DSPARK | RNN | LATER | {"aux_hidden_state_layer_ids": [0, 2]}, {}),
    "raw": (dspark.RAW_DSPARK, {}),
    "reduced": (dspark.DSPARK | {"draft_vocab_size": len(setups.DRAFT_TO_TARGET)}, {}),
}
"""Switches, and the keys of the draft's own layers."""


@dataclasses.dataclass(frozen=True, eq=False)
class Read:
    """A drafter that was read from a folder, and what the folder holds."""

    setup: setups.Setup
    values: dict
    tensors: dict
    ids: np.ndarray | None

    def blocks(self, state) -> dict[int, oracle.Block]:
        """The oracle's block behind the text of each row that goes on."""
        one, found = self.setup, {}
        layers = one.drafter_config.feature_layers
        texts = np.maximum(np.asarray(state.tokens), 0)
        output = toy.causal_pass(one.models["target"], one.config, jnp.asarray(texts), feature_layers=layers)
        features = np.concatenate([np.asarray(x) for x in output.features], -1)
        own, table = self.tensors, np.asarray(one.models["target"]["embedding"])  # the toy target's head, too
        for row in np.flatnonzero(~np.asarray(state.done)):
            last = int(state.length[row]) - 1
            embedding, head = (own.get(f"{part}.weight", table) for part in ("embed_tokens", "lm_head"))
            given = features[row, :last], int(texts[row, last]), embedding, head
            found[int(row)] = oracle.Block(own, dspark.flat(self.values), *given)
        return found

    def tokens(self, columns) -> np.ndarray:
        return np.asarray(columns) if self.ids is None else self.ids[np.asarray(columns)]


def setup_of(folder, tree: TreeConfig | None = None) -> setups.Setup:
    """The toy target and the drafter of a folder, with trees that nothing draws; by default the deepest chain."""
    base = setups.setup("llama", "plain")
    config, weights, _ = read_published(folder, DraftedFor(base.config, "", None))
    drafter = make_drafter(base.config, config, tree or TreeConfig.chain(config.num_steps))
    models = {"target": base.models["target"], "drafter": weights}
    one = dataclasses.replace(base, drafter_config=config, drafter=drafter, models=models)
    return dataclasses.replace(one, decoder=one.decoder_with())


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """`read(name, tree)`: the drafter of a folder of FILES, with trees that nothing draws."""
    folders = tmp_path_factory.mktemp("drafters")

    @functools.cache
    def read(name: str, tree: TreeConfig | None = None) -> Read:
        switches, layers = FILES[name]
        values, ids = dspark.file_config(switches, layers), setups.DRAFT_TO_TARGET[::-1] if name == "reduced" else None
        tensors = dspark.tensors_of(values, ids)
        save(folders / name, values, tensors)
        return Read(setup_of(folders / name, tree), values, tensors, ids)

    return read


def log_sigmoid(x: float) -> float:
    return -float(np.log1p(np.exp(-x)))


@pytest.mark.parametrize("name", cases(list(FILES), slow=FILES.keys() - {"dflash"}))
def test_chains_are_those_of_blocks_that_are_computed_anew(read, name):
    """In a decode with pending features of several lengths: the logits of every depth, the greedy chain, its score."""
    one, call = read(name), calls.mixed_call()
    setup, pending = one.setup, set()
    config, tree, num_states = setup.drafter_config, TreeConfig.chain(one.setup.drafter.max_depth), 0
    keys = dspark.flat(one.values)
    assert tree.depth == keys["block_size"] - (not keys["sample_from_anchor"])

    @setup.decoder.compile
    def logits_along(state, drafts):
        base, inject, _ = lattice(setup.config, config, tree, setup.models, state.drafter)
        expand, said, carry = token_free(base, inject), [], None
        for level in range(tree.depth):
            here, carry = expand(level, drafts[:, level, None], jnp.zeros((call.batch, 1), jnp.int32), carry)
            said.append(here.logits[:, 0])
        return jnp.stack(said, 1)

    for state in setup.rounds():
        blocks = one.blocks(state)
        if not blocks or num_states == 6:
            break
        num_states += 1
        drafted, _ = setups.draft(setup, state, call.arrays()[-1])
        logits = np.asarray(logits_along(state, drafted.tokens))
        for row, block in blocks.items():
            pending.add(int(state.drafter.num_pending[row]))
            path = np.asarray(drafted.tokens)[row].tolist()
            assert path[1:] == block.chain(one.ids)
            for depth in range(tree.depth):
                wanted = block.logits(path[: depth + 1])
                wanted = wanted if one.ids is None else wanted[np.argsort(one.ids)]  # ours ascend
                np.testing.assert_allclose(logits[row, depth], wanted, atol=1e-4)
            if keys.get("enable_confidence_head"):
                wanted = [log_sigmoid(block.confidence(path[: depth + 1])) for depth in range(tree.depth)]
                np.testing.assert_allclose(np.asarray(drafted.score)[row], [0, *np.cumsum(wanted)], atol=1e-4)
    assert len(pending) >= 2 and num_states == 6


@pytest.mark.parametrize("name", cases(["rnn_later", "gated", "reduced"], slow=["gated", "reduced"]))
def test_trees_are_those_of_a_beam_that_computes_every_path(read, name):
    """The heads of siblings read their own paths."""
    tree, call = TreeConfig(nodes=14, depth=4, width=3), calls.mixed_call()
    one = read(name, tree)
    state, sampling = one.setup.after(2), call.arrays()[-1]
    scale = np.asarray(inverse_temperature(sampling.temperature, DrawScheme.ARBITRARY))
    drafted, _ = setups.draft(one.setup, state, sampling)
    blocks = one.blocks(state)
    assert len(blocks) > 2
    for row, block in list(blocks.items())[:3]:

        def logits(path: tuple[int, ...], s=scale[row], block=block) -> np.ndarray:
            whole = np.full(toy.VOCAB, -np.inf)
            whole[one.tokens(np.arange(len(block.head)))] = s * block.logits(path)
            return whole

        wanted = tree_oracle.grow_paths(logits, int(root_of(state)[0][row]), tree.nodes, tree.depth, tree.width)
        found = [np.asarray(x)[row].tolist() for x in (drafted.tokens, drafted.parents, drafted.depth)]
        assert found == [list(x) for x in wanted]


@pytest.mark.slow
def test_the_cache_holds_the_context_alone():
    """After rounds: what one pass over the whole text gives, and nothing of a block."""
    setup = setups.setup("llama", "dspark")
    for num in (1, 4):
        state = setup.after(num)
        config, drafter = setup.drafter_config, setup.models["drafter"]
        tokens = jnp.maximum(state.tokens, 0)
        output = toy.causal_pass(setup.models["target"], setup.config, tokens, feature_layers=config.feature_layers)
        context = context_features(setup.models, config, output.hidden, output.features)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        sees = jnp.ones((*tokens.shape, tokens.shape[1]), bool)
        _, fresh = context_pass(drafter, config, context, None, positions, sees, None)
        length, pending = state.drafter.cache.length, state.drafter.num_pending
        for row in np.flatnonzero(~np.asarray(state.done)):
            n = int(length[row])
            assert n + int(pending[row]) == int(state.length[row]) - 1
            assert n > 0 or row == 0  # whose prompt is one token
            assert setups.is_cached(state.drafter.cache, int(row), fresh)


def test_a_score_shares_what_the_best_child_leaves():
    """The best child is accepted with probability c, its siblings share the rest; a chain multiplies the cs."""
    probability = [1.0, 0.6, 0.3, 0.9, 0.05, 0.5]
    parents = [NO_PARENT, 0, 0, 1, 1, 3]
    score = np.zeros(6)
    for node in range(1, 6):
        score[node] = score[parents[node]] + np.log(probability[node])
    depth = jnp.array([[0, 1, 1, 2, 2, 3]])
    arrays = jnp.arange(6)[None], jnp.array([parents]), depth
    tree = DraftTree(*arrays, jnp.array([[True] * 5 + [False]]), score=jnp.asarray(score, jnp.float32)[None])
    c = np.array([0.8, 0.7, 0.0, 0.2, 0.0, 0.0])
    logit = jnp.asarray(np.log(c + 1e-9) - np.log1p(-c), jnp.float32)[None]
    found = np.exp(np.asarray(with_confidence(tree, logit, 3).score)[0])
    wanted = [1, 0.8, 0.2 * 0.3 / 0.4, 0.8 * 0.7, 0.8 * 0.3 * 0.05 / 0.1, 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize("value", [jnp.nan, 1e30, -1e30])
def test_any_confidence_gives_scores_that_fall(value):
    """A broken head must not separate a node from its parent."""
    setup, call = setups.setup("llama", "dspark", DrawScheme.ARBITRARY), calls.mixed_call()
    drafter = setup.models["drafter"]
    models = setup.models | {"drafter": drafter | {"confidence": drafter["confidence"] | {"bias": jnp.full(1, value)}}}
    drafted, _ = setups.draft(setup, setup.after(1), call.arrays()[-1], models=models)
    score, parents = np.asarray(drafted.score), np.maximum(np.asarray(drafted.parents), 0)
    assert (score <= np.take_along_axis(score, parents, 1)).all()


CHAIN = TreeConfig.chain(3)
JUDGED = [(rule, scheme) for rule in RULES for scheme in drawn_schemes(rule)[:1]]


@pytest.mark.parametrize(("accept", "scheme"), cases(JUDGED, slow=JUDGED[1:]))
def test_greedy_rows_are_greedy_under_every_rule(accept, scheme):
    """Beside sampled rows; also with a drafter whose weights are NaN."""
    tree = setups.DRAWN_BEAM if judges(accept, setups.DRAWN_BEAM) else CHAIN
    call, setup = calls.mixed_call(), setups.sampled(scheme, tree, accept, "dspark")
    rows = call.batch if RULES[accept].keeps_text else 2
    wanted = setups.expected("llama", call)[:rows]
    own = setup.models["drafter"]
    for drafter in (own, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), own)):
        state = call.run(setup.decoder, setup.models | {"drafter": drafter})
        assert first_difference(calls.generated(call, state)[:rows], wanted) is None


@pytest.mark.parametrize("form", cases(["sum", "skip", "ahead"], slow=["sum", "skip"]))
def test_spares_are_the_states_of_earlier_blocks(form):
    """For the same absolute positions, although they have read the anchor of their own round."""
    setup, call = setups.setup("llama", f"dspark_{form}"), calls.mixed_call()
    of_round = jax.jit(lambda s: fresh_logits(setup.models, setup.config, setup.drafter_config, 5, s, INPUTS)[0])
    state, forecasts, seen = call.start(setup.decoder, setup.models), [dict() for _ in call.prompts], 0
    for _ in range(5):
        before = jax.tree.map(lambda x: jnp.array(x, copy=True), state.drafter)
        root, logits = np.asarray(state.length) - 1, np.asarray(of_round(before))
        state = call.resume(setup.decoder, setup.models, state, 1)
        spares = jax.tree.map(np.asarray, state.drafter.spares)
        kept = spares.logits.shape[1]
        for row in np.flatnonzero(~np.asarray(state.done)):
            if form != "skip" or before.spares.num[row] < 1:
                forecasts[row] = {int(root[row]) + 1 + k: x for k, x in enumerate(logits[row, :kept])}
            for j in range(int(spares.num[row])):
                wanted = forecasts[row][int(state.length[row]) + j]
                np.testing.assert_allclose(spares.logits[row, j], wanted, rtol=1e-3, atol=1e-3)
                seen += 1
    assert seen > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rnn_later", "dflash"])
def test_rescored_paths_are_read_by_the_head(read, name):
    """A scorer that adds nothing leaves the likeliest paths of the drafter, if there are arcs for all tokens."""
    tree, call = TreeConfig(nodes=14, depth=4, width=3), calls.mixed_call()
    setup = read(name, tree).setup
    config = RescoredConfig(setup.drafter_config, None, toy.VOCAB)
    models = setup.models | {"drafter": setup.models["drafter"] | {"rescorer": {"alpha": jnp.ones(1)}}}
    rescored = dataclasses.replace(setup, drafter=make_drafter(setup.config, config, tree), models=models)
    rescored = dataclasses.replace(rescored, decoder=rescored.decoder_with())
    trees = [setups.draft(one, one.after(2), call.arrays()[-1])[0] for one in (setup, rescored)]
    for name in ("tokens", "parents", "depth"):
        np.testing.assert_array_equal(*(getattr(one, name) for one in trees))


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_heads_that_read_states_allow_no_reuse(head):
    target = setups.VARIANTS["llama"]
    config = dspark.toy_config(target, markov_head=head)
    assert DFLASH.make(target, config, CHAIN, jnp.float32, DrawScheme.COUPLED, NO_REUSE).max_depth == 3
    with pytest.raises(ValueError, match=f"reuse='sum': a {head} Markov head .* allowed is none"):
        make_drafter(target, config, CHAIN, reuse=ReuseConfig("sum"))


WRONG = {
    "mask_token_id=None: ": ({"mask_token_id": None}, {}),
    "block_size=None: ": ({"block_size": None}, {}),
    "mask_token=24: allowed are 0 to 23": ({"mask_token_id": 24}, {}),
    "markov_head_type='deep': should be 'vanilla'": ({"markov_head_type": "deep"}, {}),
    "confidence='token' with rank=0": ({"markov_rank": 0}, {}),
    "hidden_size=48: allowed is the target's 32": ({}, {"hidden_size": 48}),
    r"'confidence_head.*found shape \[1, 40\], expected \[1, 41\] by .*markov_rank=9": ({"markov_rank": 9}, {}),
    "missing tensor 'markov_head.gate_proj": ({"markov_head_type": "gated"}, {}),
    "unexpected tensor 'confidence_head": ({"enable_confidence_head": False}, {}),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_files_are_refused_in_one_line(message, tmp_path):
    switches, layers = WRONG[message]
    values = dspark.file_config(dspark.DSPARK, {})
    tensors = dspark.tensors_of(values)
    values = values | switches | {"transformer_layer_config": values["transformer_layer_config"] | layers}
    save(folder := tmp_path / "drafter", values, tensors)
    with pytest.raises(ValueError, match=message) as caught:
        read_published(folder, DraftedFor(setups.VARIANTS["llama"], "", None))
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.slow
def test_a_copy_of_the_embedding_is_used(tmp_path):
    """A file may bring embeddings and a head, which need not be the target's."""
    target, values = setups.VARIANTS["llama"], dspark.file_config(dspark.DFLASH, {})
    rng, shape = np.random.default_rng(5), (toy.VOCAB, target.hidden_size)
    more = {f"{name}.weight": rng.normal(0, 1, shape).astype(np.float32) for name in ("embed_tokens", "lm_head")}
    save(folder := tmp_path / "drafter", values, dspark.tensors_of(values) | more)
    one = setup_of(folder)
    tensors, state = dspark.tensors_of(values), one.after(1)
    drafted, _ = setups.draft(one, state, calls.mixed_call().arrays()[-1])
    for row, block in Read(one, values, tensors | more, None).blocks(state).items():
        assert np.asarray(drafted.tokens)[row, 1:].tolist() == block.chain()


@pytest.mark.parametrize("tied", [True, False])
def test_copies_of_the_targets_weights_are_not_held(tied, tmp_path):
    """A head of its own stays, and that of a target with tied embeddings is the embedding."""
    target, values = toy.target_config(tie_embeddings=tied), dspark.file_config(dspark.DFLASH, {})
    weights = toy.make_target(target)
    more = {"embed_tokens.weight": np.array(weights["embedding"]), "lm_head.weight": np.array(weights["embedding"])}
    save(tmp_path, values, dspark.tensors_of(values) | more)
    config, own = pair._without_copy(*read_published(tmp_path, DraftedFor(target, "", None))[:2], weights)
    assert (config.has_embedding, config.has_head) == ("embedding" in own, "head" in own) == (False, not tied)


def test_the_planner_gets_chains_of_up_to_seven_drafts():
    target = setups.VARIANTS["llama"]
    for steps in (3, 15):
        config = dspark.toy_config(target, num_steps=steps)
        assert DFLASH.planning.default_tree(config) == TreeConfig.chain(min(steps, 7))
        assert DFLASH.planning.max_depth(config) == steps
