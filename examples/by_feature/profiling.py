"""Profiling by torch.profiler: all processes run the same steps, rank 0 writes its trace (open it in chrome://tracing)."""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, TensorDataset

import accel


def main(args):
    accel.seed(0)
    x = torch.randn(128, 64)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accel.setup(model, optimizer, loader)

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    steps = schedule(wait=1, warmup=1, active=3, repeat=1)  # not the first steps: they allocate and set up
    with profile(activities=activities, schedule=steps) if accel.is_main() else nullcontext() as profiler:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            if profiler is not None:
                profiler.step()  # local: it makes no call of accel
    if profiler is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(args.out))
        print(profiler.key_averages().table(sort_by="cpu_time_total", row_limit=5))
        print(f"trace: {args.out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/trace.json"))
    main(parser.parse_args())
