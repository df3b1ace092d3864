"""The fused head and loss.

Catches: per-row answers that disagree with the sums made of them.
"""

import torch

from specforge_trim.objective.linear_soft_ce import linear_soft_ce
from specforge_trim.objective.teacher import TeacherTable


def test_right_says_which_rows_are_right():
    # Draft vocabulary {1, 3, 4} of 6. The head is the identity: hidden states are logits.
    draft_to_target = torch.tensor([1, 3, 4])
    logits = torch.tensor([[5.0, 1, 0], [0, 5, 1], [0, 1, 5], [2, 2, 0]], dtype=torch.float64)
    argmax = torch.tensor([1, 1, 5, 1])  # right; wrong; out of vocabulary; a tie goes to id 1
    table = TeacherTable(
        torch.full((4, 3), 1 / 3, dtype=torch.float64),
        argmax,
        torch.tensor([True, True, False, True]),
        torch.ones(4, dtype=torch.float64),
    )
    _, metrics = linear_soft_ce(
        logits, torch.eye(3, dtype=torch.float64), table, torch.arange(4), scale=1.0,
        draft_to_target=draft_to_target,
    )  # fmt: skip
    assert metrics.right.dtype == torch.bool
    assert metrics.right.tolist() == [True, False, False, True]
    assert float(metrics.correct) == 2
