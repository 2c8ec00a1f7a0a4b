"""A job that torchrun starts again after one of its processes was killed: `torchrun ... resumed.py DIRECTORY`.

It saves to disk after step 2 and at the end, and into memory after each other step; in step 7 rank 1 is killed, once.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

import accel

torch.manual_seed(0)
net = nn.Linear(64, 64)
model, optimizer, _ = accel.setup(net, torch.optim.AdamW(net.parameters()), backend="fsdp", devices="cpu")
state = {"model": model, "optimizer": optimizer, "step": 0}
if accel.latest(sys.argv[1]):
    accel.load(sys.argv[1], state)
began = state["step"]
while state["step"] < 8:
    if state["step"] == 6 and began == 0 and accel.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
    state["step"] += 1
    if state["step"] >= 2:
        accel.save(state, sys.argv[1], in_memory=state["step"] not in (2, 8))
total = sum(float(value.double().sum()) for value in accel.full_state_dict(model).values())
accel.print(f"began at step {began}, ended with {total!r}", flush=True)
