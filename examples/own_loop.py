"""A model of one's own, in a loop of one's own, on Planaria. Its twin is own_loop_plain.py.

    planaria run examples/own_loop.py          several trainers, and failures if you like
    python examples/own_loop.py                one trainer, this process
"""

import torch
from torch import nn

import planaria.torch

ROWS, DIM, USERS_PER_BATCH = 20_000, 16, 256


class Ratings(torch.utils.data.Dataset):
    """Who saw what, and whether they liked it: a planted preference, and noise."""

    def __len__(self):
        return 40_960

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        user, item = torch.randint(ROWS, (2,), generator=draw).tolist()
        liked = float((user % 97 + item % 89) % 7 < 3)
        return user, item, liked


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = planaria.torch.EmbeddingBag(ROWS, DIM, mode="sum")
        self.items = planaria.torch.EmbeddingBag(ROWS, DIM, mode="sum")
        self.top = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, item):
        both = [self.users(user.unsqueeze(1)), self.items(item.unsqueeze(1))]
        return self.top(torch.cat(both, dim=1)).squeeze(1)


job = planaria.torch.connect()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
job.keep(model=model, optimizer=optimizer)
for user, item, liked in job.batches(Ratings(), batch_size=USERS_PER_BATCH, shuffle=True):
    loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), liked.float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss of the last batch: {loss.item():.4f}")
