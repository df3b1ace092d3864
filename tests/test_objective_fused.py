"""The fused head and loss.

Catches: per-row answers that disagree with the sums made of them.
"""

import torch

from specforge_trim.objective.linear_loss import linear_loss
from specforge_trim.objective.teacher import TeacherTable


def test_right_says_which_rows_are_right():
    # The head is the identity: hidden states are logits.
    logits = torch.tensor([[5.0, 1, 0], [0, 5, 1], [0, 1, 5], [2, 2, 0]], dtype=torch.float64)
    choice = torch.tensor([0, 0, -1, 0])  # right; wrong; out of vocabulary; a tie goes to id 0
    table = TeacherTable(
        torch.full((4, 3), 1 / 3, dtype=torch.float64),
        choice,
        torch.ones(4, dtype=torch.float64),
    )
    _, metrics = linear_loss(
        logits, torch.eye(3, dtype=torch.float64), table, torch.arange(4), scale=1.0
    )  # fmt: skip
    assert metrics.right.dtype == torch.bool
    assert metrics.right.tolist() == [True, False, False, True]
    assert float(metrics.correct) == 2
