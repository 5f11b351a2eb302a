"""The data and the model of the scripts: bags of any length, two sizes, dropout, BatchNorm."""

import torch
from torch import nn

import planaria.torch as pt

ROWS, BATCH, SAMPLES = 60, 8, 240


class Ratings(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(ROWS, (3,), generator=draw)
        return torch.randn(4, generator=draw), ids, float(ids.sum() % 2)


def collate(samples):
    dense, ids, liked = zip(*samples, strict=True)
    ids = torch.stack(ids)
    lengths = torch.tensor([number * 7 % 4 for number in range(2 * len(samples))])
    values = ids.flatten().repeat(3)[: int(lengths.sum())]
    bags = pt.KeyedJaggedTensor(keys=["a", "b"], values=values, lengths=lengths)
    return torch.stack(dense), bags, ids, torch.tensor(liked)


class Model(nn.Module):
    def __init__(self, optimizer):
        super().__init__()
        tables = [
            pt.EmbeddingBagConfig(ROWS, 8, "of_a", ["a"]),
            pt.EmbeddingBagConfig(ROWS, 4, "of_b", ["b"], pooling=pt.PoolingType.MEAN),
        ]
        self.bags = pt.EmbeddingBagCollection(tables, optimizer=optimizer)
        self.single = pt.EmbeddingBag(ROWS, 8, mode="mean", optimizer=pt.SGD(lr=0.1, momentum=0.5))
        self.top = nn.Sequential(
            nn.Linear(24, 16), nn.ReLU(), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 1)
        )

    def forward(self, dense, bags, ids):
        together = torch.cat([dense, self.bags(bags).values(), self.single(ids)], 1)
        return self.top(together).squeeze(1)
