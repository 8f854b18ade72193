"""What changing a trained drafter starts from: rows to use, the last tenth held out; a result that is there already."""

from __future__ import annotations

import numpy as np
import pytest

from hsd_jax.train import trained
from hsd_jax.train.rows import Rows


@pytest.mark.parametrize(("num", "limit", "used", "held_out"), [(25, None, 23, 2), (25, 10, 9, 1), (2, None, 1, 1)])
def test_the_last_tenth_is_held_out(monkeypatch, num, limit, used, held_out):
    tokens = np.arange(num)[:, None] * np.ones((1, trained.ROW + 1), np.int32)
    rows = Rows(tokens, tokens % 2 == 1, num, tokens.size)
    monkeypatch.setattr(trained, "read_rows", lambda files, folder, length, *rest: rows)
    found = trained.read_split(["data"], "target", 24, "all", limit)
    assert [len(text.tokens) for text in found] == [used, held_out]
    assert [text.tokens[0, 0] for text in found] == [0, used]
    assert set(np.concatenate([text.labels for text in found])) == set(range(1, used + held_out, 2))


def test_one_row_is_too_few(monkeypatch):
    row = np.zeros((1, trained.ROW + 1), np.int32)
    for limit, num in ((None, 1), (1, 5)):
        rows = Rows(np.repeat(row, num, 0), np.repeat(row == 0, num, 0), num, num * row.size)
        monkeypatch.setattr(trained, "read_rows", lambda *args, rows=rows: rows)
        with pytest.raises(ValueError, match="the data fill one row of 256 tokens"):
            trained.read_split(["data"], "target", 24, "all", limit)


def test_a_result_is_not_written_over(tmp_path):
    with pytest.raises(ValueError, match="is there already; choose another folder"):
        trained.read_pair("no-target", "no-drafter", tmp_path)
