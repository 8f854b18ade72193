"""What changing a trained drafter starts from: rows to use, the last tenth held out; a result that is there already."""

from __future__ import annotations

import numpy as np
import pytest

from hsd_jax.train import trained
from hsd_jax.train.rows import Rows


@pytest.mark.parametrize(("num", "used", "held_out"), [(25, 23, 2), (2, 1, 1)])
def test_the_last_tenth_is_held_out(monkeypatch, num, used, held_out):
    """Of each row the labels alone: here every row holds its own number, and odd ones are labels."""
    tokens = np.arange(num)[:, None] * np.ones((1, trained.ROW + 1), np.int32)
    rows = Rows(tokens, tokens % 2 == 1, num, tokens.size)
    monkeypatch.setattr(trained, "read_rows", lambda files, folder, length, *rest: rows)
    found = trained.read_split(["data"], "target", 24, "all")
    assert used + held_out == num
    for labels, first, end in zip(found, (0, used), (used, num), strict=True):
        wanted = [row for row in range(first, end) if row % 2]
        np.testing.assert_array_equal(labels, np.repeat(wanted, trained.ROW + 1))


def test_one_row_is_too_few(monkeypatch):
    row = np.zeros((1, trained.ROW + 1), np.int32)
    monkeypatch.setattr(trained, "read_rows", lambda *args: Rows(row, row == 0, 1, row.size))
    with pytest.raises(ValueError, match="the data fill one row of 256 tokens"):
        trained.read_split(["data"], "target", 24, "all")


def test_a_result_is_not_written_over(tmp_path):
    with pytest.raises(ValueError, match="is there already; choose another folder"):
        trained.read_drafter_of(None, "no-drafter", tmp_path)
