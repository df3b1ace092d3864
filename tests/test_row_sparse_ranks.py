"""Row-sparse steps on two gloo ranks, one of them with an all-masked batch.

Catches: a rank without loss rows that skips a collective or leaves a weight without a gradient,
layers whose FSDP2 hooks are passed by, weights read while they are sharded.
"""

from lm_case import make_model, make_stream, reference_step
from ranks import run_world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from specforge_trim.drafts.lm.layers import RowSparseSettings, enable_row_sparse, hidden_states
from specforge_trim.drafts.lm.rows import loss_rows, plan_rows
from specforge_trim.loss.labels import label_loss
from specforge_trim.ranks.world import sum_gradients

ON = RowSparseSettings(stop_grad_context_tokens=True)
MASKS = (["000000111000110", "0001"], ["0000000", "00000"])  # rank 1 has nothing to learn


class Step(nn.Module):
    """A whole step behind one forward, as FSDP2 and DDP want it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, stream):
        plan = plan_rows(loss_rows([stream.mask], cu_seqlens=stream.cu), cu_seqlens=stream.cu)
        hidden = hidden_states(self.model, stream.ids, stream.positions, plan, settings=ON)
        weight = self.model.lm_head.weight
        return label_loss(hidden, weight, stream.labels, plan.keep, row_scale=0.1)[0]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check(step, expected, factor, how):
    for name, parameter in step.named_parameters():
        assert parameter.grad is not None, f"{how}: {name} has no gradient"
        name = name.removeprefix("module.").removeprefix("model.")
        gap = float((whole(parameter.grad) * factor - expected[name]).abs().max())
        assert gap <= 1e-10, f"{how}: {name}: {gap:.2e}"


def main(world):
    for family in ("qwen3", "llama"):
        streams = [make_stream(masks, seed=i) for i, masks in enumerate(MASKS)]
        _, expected = reference_step(make_model(family), streams[0])
        assert all(float(g.abs().max()) > 0 for g in expected.values())
        own = streams[world.rank]
        for how in ("sum", "ddp", "fsdp", "fsdp and checkpointing"):
            model = make_model(family)
            enable_row_sparse(model, ON)
            if "checkpointing" in how:
                model.activation_checkpointing_enable()
            step = Step(model)
            if how == "ddp":
                step = DistributedDataParallel(step)
            elif how.startswith("fsdp"):
                mesh = init_device_mesh("cpu", (world.size,))
                for layer in model.model.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(step, mesh=mesh)
            step(own).backward()
            if how == "sum":
                if world.rank == 1:
                    gradients = [p.grad for p in step.parameters()]
                    assert all(float(g.abs().max()) == 0 for g in gradients)
                sum_gradients(step.parameters(), world)
            # DDP and FSDP2 average over ranks.
            check(step, expected, 1 if how == "sum" else world.size, f"{family}, {how}")


def test_a_rank_without_loss_rows_takes_part(tmp_path):
    run_world(2, main, tmp_path)
