"""Resume from the last checkpoint when torchrun restarts the job.

torchrun --nnodes=1:2 --max-restarts=3 --rdzv-backend=c10d \\
    --rdzv-endpoint=HOST:PORT examples/elastic.py
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel

GLOBAL_BATCH = 64


def resume(root, state):
    last = accel.latest(root)
    if last is not None:
        accel.load(last, state)
        seconds = time.time() - state["time"]
        processes = f"{accel.world_size()} processes after {seconds:.1f} s"
        accel.print(
            f"resumed at step {state['step']} on {processes}", flush=True
        )


def main(args):
    # Ranks wait this many seconds for a rank that doesn't answer.
    accel.init(timeout=args.timeout)
    accel.seed(0)
    x = torch.randn(1024, 8)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, GLOBAL_BATCH, shuffle=True)
    # Each step uses the same samples for any number of processes.
    options = accel.LoaderOptions(split_batches=True, seed=0)
    model, optimizer, loader = accel.setup(
        model, optimizer, loader, loader_options=options
    )

    state = {
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "step": 0,
        "time": 0.0,
    }
    resume(args.checkpoints, state)
    while state["step"] < args.steps:
        for x, y in loader:  # after load: the rest of the interrupted epoch
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            state["step"] += 1
            state["time"] = time.time()
            accel.save(
                state, args.checkpoints / f"step-{state['step']}", keep=2
            )
            time.sleep(args.pause)
            if state["step"] == args.steps:
                loss = accel.all_reduce(loss.detach(), "mean")
                processes = f"{accel.world_size()} processes"
                accel.print(
                    f"step {state['step']}: loss {loss:.5f} on {processes}"
                )
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("runs/elastic"),
        help="a directory that all nodes share",
    )
    parser.add_argument("--timeout", type=float, default=60, help="seconds")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds after each step"
    )
    main(parser.parse_args())
