"""What a row of metrics says of work, speed and memory.

Catches: shares and speeds of other work than was done, mapped files counted as memory, a peak that
misses a block that is gone when it is read.
"""

import torch

from specforge_trim.ranks.world import World
from specforge_trim.train import metrics
from specforge_trim.train.metrics import StepCounts, Throughput, metrics_row
from specforge_trim.train.peak import PeakMemory

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
WORK = StepCounts(
    rows=50.0, loss_rows=torch.tensor([8.0, 6.0]).double(), backbone_rows=40.0, head_rows=14.0,
    kept_flops=30e9, full_flops=120e9,
)  # fmt: skip


def test_shares_of_the_work():
    row = metrics_row(torch.zeros(7, 2), WORK, decay=0.8)
    assert row["perf/backbone_row_fraction"] == 40 / 100  # of 50 rows at two steps
    assert row["perf/lm_head_token_fraction"] == 14 / 100
    assert row["perf/kept_flops_fraction"] == 30 / 120


def test_speed_counts_the_rows_of_the_stream_and_the_work_that_is_done(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    clock = Throughput(ALONE)
    for seconds in (1.0, 3.0):
        clock.add(WORK)
        clock.add(WORK)
        now[0] += seconds
        read = clock.read()
        assert read["perf/tokens_per_second"] == 100 / seconds
        assert read["perf/gflops_per_second"] == 60 / seconds
        assert read["time/step_seconds"] == seconds / 2
    assert read["time/seconds"] == 4.0


def test_peak_memory_sees_a_block_that_is_gone_and_no_mapped_file(tmp_path):
    size = 96 << 20
    file = tmp_path / "features"
    file.write_bytes(bytes(size))
    with PeakMemory(torch.device("cpu")) as peak:
        before = peak.read()
        mapped = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
        assert int(mapped.max()) == 0  # every page is resident now
        assert peak.read() - before < size // 2
        block = torch.ones(size, dtype=torch.uint8)
        for _ in range(500):
            if peak._peak - before > size // 2:
                break
            block.add_(0)  # time passes with the block in place
        del block
        assert size // 2 < peak.read() - before < 2 * size
