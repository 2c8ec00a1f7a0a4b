"""Training that survives lost processes: torchrun starts it again with those that are left, and it goes on from its checkpoint.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:2 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT \
examples/elastic.py
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel

GLOBAL_BATCH = 64


def save(path, model, optimizer, loader, step):
    state = {"model": accel.full_state_dict(model), "optimizer": accel.full_state_dict(optimizer)}
    state |= {"loader": loader.state_dict(), "step": step, "time": time.time()}
    if accel.is_main():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)  # a process that is killed here leaves the old one


def load(path, model, optimizer, loader):
    if not path.exists():
        return 0
    state = torch.load(path)
    for handle, name in ((model, "model"), (optimizer, "optimizer"), (loader, "loader")):
        handle.load_state_dict(state[name])
    seconds = time.time() - state["time"]
    accel.print(f"resumed at step {state['step']} on {accel.world_size()} processes after {seconds:.1f} s", flush=True)
    return state["step"]


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

    model, optimizer, loader = accel.setup(model, optimizer, loader)

    step = load(args.checkpoint, model, optimizer, loader)
    while step < args.steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            save(args.checkpoint, model, optimizer, loader, step)
            time.sleep(args.pause)
            if step == args.steps:
                break
    loss = accel.all_reduce(loss.detach(), "mean")
    accel.print(f"step {step}: loss {loss:.5f} on {accel.world_size()} processes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/elastic.pt"))
    parser.add_argument("--timeout", type=float, default=60, help="seconds")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    main(parser.parse_args())
