"""TorchRec's DLRM, unchanged, with its tables on Planaria's servers. Only the collection is another
one: planaria.torch.EmbeddingBagCollection in place of TorchRec's.

    planaria run --set trainers=2 --kill server:any@100 examples/torchrec_dlrm.py
    planaria run examples/torchrec_dlrm.py --model DLRM_DCN

docs/own-model.md says how to install TorchRec where there is no GPU.
"""

import argparse

import torch
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import planaria.torch

ROWS = {"user": 2_000, "item": 1_000, "tags": 200, "seen": 1_000}
NUMBERS, DIM = 13, 16
options = argparse.ArgumentParser()
options.add_argument("--model", choices=["DLRM", "DLRM_DCN"], default="DLRM")
options.add_argument("--samples", type=int, default=40_000)
options.add_argument("--out", help="a file for the dense part of the model and a few predictions")


class Clicks(torch.utils.data.Dataset):
    """Who was shown what, after having seen what, and whether they clicked: some users click often,
    some tags are liked. Users and items come one by one, tags and what was seen in bags of 0 to 5.
    """

    def __init__(self, samples):
        draw = torch.Generator().manual_seed(1)
        self.numbers = torch.randn(samples, NUMBERS, generator=draw)
        self.sizes, self.ids = {}, {}
        for name, rows in ROWS.items():
            single = name in ("user", "item")
            sizes = torch.randint(
                1 if single else 0, 2 if single else 6, (samples,), generator=draw
            )
            self.sizes[name] = sizes
            self.ids[name] = torch.randint(rows, (int(sizes.sum()),), generator=draw).split(
                sizes.tolist()
            )
        eager, liked = (torch.randn(ROWS[name], generator=draw) for name in ("user", "tags"))
        score = torch.stack([liked[ids].sum() for ids in self.ids["tags"]])
        score += 2 * eager[torch.cat(self.ids["user"])] + self.numbers[:, 0]
        self.clicked = (score > 0).float()

    def __len__(self):
        return len(self.clicked)

    def __getitems__(self, samples):
        """A batch: one KeyedJaggedTensor has all bags, by feature and then by sample."""
        values = torch.cat([self.ids[name][sample] for name in ROWS for sample in samples])
        lengths = torch.cat([self.sizes[name][samples] for name in ROWS])
        features = KeyedJaggedTensor(list(ROWS), values, lengths=lengths)
        return self.numbers[samples], features, self.clicked[samples]

    def __getitem__(self, sample):
        return self.__getitems__([sample])


def model_of(name, collection):
    """collection: TorchRec's, or one of the same interface."""
    if name == "DLRM":
        return DLRM(collection, NUMBERS, [32, DIM], [32, 1])
    return DLRM_DCN(collection, NUMBERS, [32, DIM], [32, 1], dcn_num_layers=2, dcn_low_rank_dim=8)


def main():
    wanted = options.parse_args()
    job = planaria.torch.connect()
    torch.manual_seed(0)
    tables = [
        planaria.torch.EmbeddingBagConfig(rows, DIM, f"t_{name}", [name])
        for name, rows in ROWS.items()
    ]
    of_tables = planaria.torch.RowwiseAdagrad(lr=0.1)
    collection = planaria.torch.EmbeddingBagCollection(tables, optimizer=of_tables)
    model = model_of(wanted.model, collection)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    job.keep(model=model, optimizer=optimizer)
    losses = []
    clicks = Clicks(wanted.samples)
    batches = job.batches(clicks, batch_size=100, shuffle=True, collate_fn=lambda batch: batch)
    for numbers, features, clicked in batches:
        logits = model(numbers, features).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if wanted.out and job.rank == 0 and job.step + 1 == job.config.steps:
            some = clicks.__getitems__(range(64))
            with job.evaluate():
                predicted = model(*some[:2])
            torch.save({"model": model.state_dict(), "predicted": predicted}, wanted.out)
    print(f"mean loss of the last 50 steps: {sum(losses[-50:]) / max(len(losses[-50:]), 1):.4f}")


if __name__ == "__main__":
    main()
