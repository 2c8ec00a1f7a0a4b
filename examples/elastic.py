"""Training that survives lost processes: torchrun starts it again with those that are left, and it goes on from its checkpoint.

torchrun --nnodes=1:2 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT examples/elastic.py
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
        accel.print(
            f"resumed at step {state['step']} on {accel.world_size()} processes after {seconds:.1f} s", flush=True
        )


def main(args):
    accel.init(timeout=args.timeout)  # how long the others wait for a process that does not answer
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 8, generator=generator)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    accel.seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # The global batch stays, whatever the number of processes.
    loader = DataLoader(data, GLOBAL_BATCH // accel.world_size(), shuffle=True)

    # With a seed the order of the samples is the same on any number of processes, also on one.
    model, optimizer, loader = accel.setup(model, optimizer, loader, loader_options=accel.LoaderOptions(seed=0))

    state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0, "time": 0.0}
    resume(args.checkpoints, state)
    while state["step"] < args.steps:
        for x, y in loader:  # the first time the rest of the epoch in which the checkpoint was made
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            state |= {"step": state["step"] + 1, "time": time.time()}
            accel.save(state, args.checkpoints / f"step-{state['step']}", keep=2)
            time.sleep(args.pause)
            if state["step"] == args.steps:
                loss = accel.all_reduce(loss.detach(), "mean")
                accel.print(f"step {state['step']}: loss {loss:.5f} on {accel.world_size()} processes")
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/elastic"), help="on a file system of all hosts")
    parser.add_argument("--timeout", type=float, default=60, help="seconds")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    main(parser.parse_args())
