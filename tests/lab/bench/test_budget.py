"""`hsd bench budget`: shapes at equal budgets, which siblings are counted, and the folder it writes."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from support import command_line, toy

from hsd_jax.config import TreeConfig
from hsd_jax.lab.bench import budget, report
from hsd_jax.lab.bench.replay import Round
from hsd_jax.lab.viz import plots
from hsd_jax.planning.measure import parse_tree

folders, own_cache, hsd, both = command_line.folders, command_line.own_cache, command_line.hsd, command_line.both

DRAFTER = toy.drafter_config(toy.target_config(), num_steps=8)


def test_the_shapes_of_the_paper():
    found = [budget.branching_of(tokens, 8) for tokens in budget.BUDGETS]
    assert found == [(2, 2), (2, 2, 1), (2, 2, 2), (3, 2, 2), (2, 2, 2, 2)]
    beams = [budget.beam_of(tokens, 8) for tokens in budget.BUDGETS]
    assert [(beam.width, beam.depth) for beam in beams] == [(2, 3), (2, 5), (2, 7), (3, 7), (5, 6)]
    assert [beam.nodes - 1 for beam in beams] == list(budget.BUDGETS)


@pytest.mark.parametrize("deepest", [2, 3, 5, 8])
@pytest.mark.parametrize("tokens", [2, 3, 5, 6, 7, 10, 13, 14, 21, 30])
def test_every_budget_has_trees_that_can_be_drawn(tokens, deepest):
    """Never more than the budget; a beam uses all of it, and no level is deeper than the drafter drafts."""
    branching = TreeConfig(branching=budget.branching_of(tokens, deepest))
    assert branching.depth <= deepest and branching.nodes - 1 <= tokens
    assert list(branching.branching) == sorted(branching.branching, reverse=True)
    for tree in (budget.beam_of(tokens, deepest), budget.beam_of(tokens, deepest, 2)):
        assert tree.depth <= deepest and tree.nodes - 1 == tokens == sum(tree.level_widths())


def test_a_mode_of_a_budget_and_of_a_length_is_measured_once():
    found = budget.make_protocol([6, 14], [2, 3], DRAFTER)
    assert list(found.groups) == ["6 draft tokens", "14 draft tokens", "length 2", "length 3"]
    assert all(
        len(names) == len(budget.METHODS) and set(names) <= set(found.methods) for names in found.groups.values()
    )
    assert "RSD-C 2.2" in found.groups["6 draft tokens"] and "RSD-C 2.2" in found.groups["length 2"]
    assert found.groups["14 draft tokens"][0] == "SD 9x8x1"  # a chain of 14 would be longer than it drafts
    for group, names in found.groups.items():
        sizes = {parse_tree(found.methods[name].tree).nodes for name in names[1:]}
        assert len(sizes) == 1, group
    assert len(budget.make_protocol(None, None, DRAFTER).groups) == len(budget.BUDGETS) + len(budget.LENGTHS)
    for wrong in ([], [9]), ([1], []), ([], [1]), ([6, 6], []):
        with pytest.raises(ValueError, match=r"--(budgets (1|6,6)|lengths [19]):"):
            budget.make_protocol(*wrong, DRAFTER)


def drafted(path: list[int], valid: list[bool] | None = None) -> Round:
    """A round of the tree (3, 2): nodes 1 to 3 below the root, then two below each."""
    parents = np.array([-1, 0, 0, 0, 1, 1, 2, 2, 3, 3])
    is_valid = np.ones(10, bool) if valid is None else np.array(valid)
    return Round(np.zeros(10, int), parents, np.zeros(10, int), is_valid, None, path, 0, [0] * len(path))


def test_siblings_are_counted_where_they_were_tried():
    """The second child, then its first; all three rejected; the third, below which nothing was valid."""
    rounds = [drafted([0, 2, 6]), drafted([0]), drafted([0, 3], [True] * 8 + [False] * 2)]
    tried, accepted = budget.count_siblings(rounds, 2, 3).tolist()
    assert tried == [[3, 3, 2], [1, 0, 0]]
    assert accepted == [[0, 1, 1], [1, 0, 0]]
    assert report.accepted_shares({"tried": tried, "accepted": accepted}) == [1 / 4, 1 / 3, 1 / 2]
    rounds = [drafted([0], [True, False] + [True] * 8)]  # the first place holds no token: the next one is the first
    assert budget.count_siblings(rounds, 2, 3)[0].tolist() == [[1, 1, 0], [0, 0, 0]]


def test_the_folder_holds_every_figure(folders, tmp_path, capsys, monkeypatch):
    """Two methods at one budget, greedy and sampled; counts of siblings are those of the timed decode."""
    monkeypatch.setattr(budget, "METHODS", {name: budget.METHODS[name] for name in ("RSD-C", "coupled")})
    out = tmp_path / "out"
    arguments = ["--prompts", folders.data, "--limit", "2", "--max-new-tokens", "8", "--repeats", "1", "--out", out]
    arguments += ["--budgets", "6", "--temperatures", "0", "1", "--dtype", "float32"]
    assert hsd("bench", "budget", *both(folders), *arguments) == 0
    record = json.loads((out / "budget.json").read_text())
    assert record["groups"] == {"6 draft tokens": ["RSD-C 2.2", "coupled 7x3x2"]}
    rows = {(row["temperature"], row["method"]): row for row in record["rows"]}
    assert len(rows) == 6
    sizes = record["drafters"]["RSD-C 2.2"]["parameters"] / record["target"]["parameters"]
    for (temperature, method), row in rows.items():
        if method == "plain":
            continue
        depth = row["tree"]["depth"]
        assert row["draft_tokens"] == 6 and row["rho"] == pytest.approx(sizes)
        assert row["mbsu"] == pytest.approx(row["tau"] / (depth * sizes + 1))
        accepted = np.array(row["siblings"]["accepted"])
        histogram = np.array(row["accepted_histogram"])
        assert accepted.shape == (depth, row["tree"]["width"])
        # A path may go on behind an end of the text, where nothing is emitted.
        assert accepted.sum() >= histogram @ np.arange(len(histogram)) - len(row["differing_prompts"])
        if temperature == 0 or method != "RSD-C 2.2":
            assert row["same_text_as_plain"] == 2
    shown, table = capsys.readouterr().out, (out / "budget.md").read_text()
    for text in ("6 draft tokens", "RSD-C 2.2", "coupled 7x3x2"):
        assert text in shown and text in table
    assert (out / "budget.csv").read_text().count("\n") == 7
    if importlib.util.find_spec("matplotlib") is not None:
        assert (out / "budget.png").stat().st_size > 1000
    (sampled,) = (row for row in record["rows"] if row["temperature"] == 1 and row["method"] == "RSD-C 2.2")
    first, second = (one["optimum"] for one in sampled["gap"])
    assert plots.best_tau(sampled["gap"]) == pytest.approx(1 + first + first * second)
