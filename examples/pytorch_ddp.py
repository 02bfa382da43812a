"""A PyTorch loop under DDP, watched: `torchrun --nproc-per-node 2 examples/pytorch_ddp.py`, or plain `python`.

Every process executes the same lines; rank 0 reports, and all of them stop at the same step. The model has more weights
than data and learns the noise by heart: the loss on held-out data turns.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from evalstop_client.callbacks.pytorch import DistributedRun
from torch.nn.parallel import DistributedDataParallel

STEPS, EVAL_EVERY = 20_000, 10
METRICS = {"held_out_loss": {"role": "eval", "direction": "minimize"}, "loss": {"role": "loss"}}


def train(rank: int, ranks: int) -> None:
    torch.manual_seed(1)
    truth = torch.randn(64, 1)
    points, held_out = torch.randn(40, 64), torch.randn(500, 64)
    targets = points @ truth + 4 * torch.randn(40, 1)
    mine = slice(rank, None, ranks)

    model = torch.nn.Linear(64, 1)
    parallel = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    folder = Path("checkpoints")
    folder.mkdir(exist_ok=True)

    with DistributedRun(name="pytorch-ddp", metrics=METRICS, total_steps=STEPS, policy="paper", mode="enforce") as run:
        for step in range(STEPS):
            loss = torch.nn.functional.mse_loss(parallel(points[mine]), targets[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % EVAL_EVERY == 0:
                if rank == 0:
                    torch.save(model.state_dict(), folder / f"{step}.pt")
                    run.checkpoint((folder / f"{step}.pt").absolute().as_uri(), step=step)
                with torch.no_grad():
                    score = torch.nn.functional.mse_loss(model(held_out), held_out @ truth)
                run.log({"held_out_loss": score, "loss": loss}, step=step)  # goes nowhere but on rank 0
            if run.should_stop_at(step):  # the same answer on every rank: ask at the same steps everywhere
                break
    print(f"rank {rank} ended at step {step} of {STEPS}")


def main() -> None:
    torch.set_num_threads(1)
    if "RANK" not in os.environ:  # torchrun sets it
        train(0, 1)
        return
    dist.init_process_group("gloo")  # "nccl" on GPUs
    # The DDP model holds the process group: kept until Python exits, a thread of gloo may abort the process.
    train(dist.get_rank(), dist.get_world_size())
    dist.barrier()  # wait until every rank is done
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
