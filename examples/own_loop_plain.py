"""The twin of own_loop.py, in plain torch: python examples/own_loop_plain.py."""

import torch
from torch import nn
from torch.nn import EmbeddingBag

USERS, TAGS, TAGS_OF_ITEM, DIM = 1_000, 200, 4, 16


def clicks(samples):
    """Who was shown an item with which tags, and whether they clicked: some users click often, and
    some tags are liked.
    """
    draw = torch.Generator().manual_seed(1)
    eager, liked = torch.randn(USERS, generator=draw), torch.randn(TAGS, generator=draw)
    user = torch.randint(USERS, (samples, 1), generator=draw)
    tags = torch.randint(TAGS, (samples, TAGS_OF_ITEM), generator=draw)
    score = eager[user].sum(dim=1) + liked[tags].sum(dim=1)
    return torch.utils.data.TensorDataset(user, tags, (score > 0).float())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = EmbeddingBag(USERS, DIM, mode="sum")
        self.tags = EmbeddingBag(TAGS, DIM, mode="sum")
        self.top = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, tags):
        return self.top(torch.cat([self.users(user), self.tags(tags)], dim=1)).squeeze(1)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
losses = []
batches = torch.utils.data.DataLoader(clicks(20_000), batch_size=100, shuffle=True)
for user, tags, clicked in batches:
    loss = nn.functional.binary_cross_entropy_with_logits(model(user, tags), clicked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"mean loss of the last 50 steps: {sum(losses[-50:]) / max(len(losses[-50:]), 1):.4f}")
