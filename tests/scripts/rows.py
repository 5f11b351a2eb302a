"""Prints, before its first step, what its table and its dense part are; then trains for a while."""

import hashlib

import torch
from torch import nn

import planaria.torch as pt

ROWS, BATCH, SAMPLES = 60, 8, 48

job = pt.connect(seed=7)
torch.manual_seed(1)
table = pt.EmbeddingBag(ROWS, 8, mode="sum", name="item", optimizer=pt.Adam(lr=0.1))
top = nn.Linear(8, 1)
optimizer = torch.optim.Adam(top.parameters(), lr=0.01)
job.keep(top=top, optimizer=optimizer)


def digest(tensor):
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()[:16]


first = True
ids = torch.arange(SAMPLES).reshape(-1, 1) % ROWS
for batch, wanted in job.batches(
    torch.utils.data.TensorDataset(ids, ids[:, 0].float() / ROWS), BATCH
):
    if first:
        with job.evaluate():
            rows = table(torch.arange(ROWS).reshape(-1, 1))
        print(f"after step {job.step} item {digest(rows)} top {digest(top.weight)}", flush=True)
        first = False
    optimizer.zero_grad()
    nn.functional.mse_loss(top(table(batch)).squeeze(1), wanted).backward()
    optimizer.step()
