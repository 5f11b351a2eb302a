"""The same model twice, on Planaria and in plain torch, batch by batch: prints how far apart they
get. With each optimizer, over plain bags and over weighted ones."""

import torch
from plain_collections import PlainEmbeddingBagCollection
from torch import nn

import planaria.torch as pt

ROWS, BATCH, STEPS = 21, 8, 200
TABLES = [("short", ROWS, 4, ["a"]), ("long", ROWS, 8, ["b"], "mean")]
SUMS = [rule[:4] for rule in TABLES]  # torch has weights for these only
SPARSE = {
    "sgd": lambda: pt.SGD(lr=0.1, momentum=0.0),
    "momentum": lambda: pt.SGD(lr=0.05, momentum=0.9),
    "adagrad": lambda: pt.Adagrad(lr=0.1),
    "adam": lambda: pt.Adam(lr=0.01),
}
PLAIN = {
    "sgd": lambda of: torch.optim.SGD(of, lr=0.1),
    "momentum": lambda of: torch.optim.SGD(of, lr=0.05, momentum=0.9),
    "adagrad": lambda of: torch.optim.Adagrad(of, lr=0.1),
    "adam": lambda of: torch.optim.Adam(of, lr=0.01),
}


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        number = index % BATCH
        if number == BATCH - 1:
            return [torch.empty(0, dtype=torch.int64)] * 2, [torch.empty(0)] * 2, 1.0
        # A batch names every row: torch's momentum and Adam also move rows that nobody names.
        rows = torch.arange(number, ROWS, BATCH - 1)
        bags = [torch.cat([rows, torch.randint(ROWS, (2,), generator=draw)]) for _ in range(2)]
        weights = [torch.rand(len(bag), generator=draw) + 0.5 for bag in bags]
        return bags, weights, float(index % 3 == 0)


def collate(samples):
    bags, weights = ([one[kind][at] for at in range(2) for one in samples] for kind in range(2))
    lengths = torch.tensor([len(own) for own in bags])
    keyed = pt.KeyedJaggedTensor(["a", "b"], torch.cat(bags), torch.cat(weights), lengths)
    return keyed, torch.tensor([liked for _, _, liked in samples])


def config(name, rule):
    pooling = pt.PoolingType.MEAN if len(rule) > 4 else pt.PoolingType.SUM
    return pt.EmbeddingBagConfig(ROWS, rule[2], f"{name}_{rule[0]}", rule[3], pooling=pooling)


def copy_rows(own, plain):
    """Reads all rows of a collection's tables, as bags of one."""
    ids, ones = torch.arange(ROWS).repeat(2), torch.ones(2 * ROWS)
    keyed = pt.KeyedJaggedTensor(["a", "b"], ids, ones, ones.long())
    with job.evaluate(), torch.no_grad():
        for bag, rows in zip(
            plain.embedding_bags.values(), own(keyed).to_dict().values(), strict=True
        ):
            bag.weight.copy_(rows)


job = pt.connect(seed=3)
torch.manual_seed(1)
tables, twins = {}, {}
for name, optimizer in SPARSE.items():
    for case, rules in ((name, TABLES), (f"{name}_weighted", SUMS)):
        configs, is_weighted = [config(case, rule) for rule in rules], rules is SUMS
        tables[case] = pt.EmbeddingBagCollection(
            configs, is_weighted=is_weighted, optimizer=optimizer()
        )
        twins[case] = PlainEmbeddingBagCollection(rules, is_weighted)
tops = {name: nn.Linear(12, 1) for name in tables}
optimizers = {name: torch.optim.SGD(top.parameters(), lr=0.1) for name, top in tops.items()}
twin_tops = {name: nn.Linear(12, 1) for name in tables}
job.keep(**{f"top_{name}": top for name, top in tops.items()})
job.keep(**{f"of_{name}": optimizer for name, optimizer in optimizers.items()})
twin_optimizers = {}
furthest = dict.fromkeys(tables, 0.0)
loss_of = nn.functional.binary_cross_entropy_with_logits
for keyed, liked in job.batches(Samples(), BATCH, collate_fn=collate):
    if job.step == 0:
        for name, twin in twins.items():
            copy_rows(tables[name], twin)
            twin_tops[name].load_state_dict(tops[name].state_dict())
            twin_optimizers[name] = [
                PLAIN[name.partition("_")[0]](list(twin.parameters())),
                torch.optim.SGD(twin_tops[name].parameters(), lr=0.1),
            ]
    with job.accumulate():
        for name, own in tables.items():
            ours = tops[name](own(keyed).values()).squeeze(1)
            plain = twin_tops[name](twins[name](keyed).values()).squeeze(1)
            furthest[name] = max(furthest[name], (ours - plain).abs().max().item())
            for one in (optimizers[name], *twin_optimizers[name]):
                one.zero_grad()
            loss_of(ours, liked).backward()
            loss_of(plain, liked).backward()
            for one in (optimizers[name], *twin_optimizers[name]):
                one.step()
for name, distance in furthest.items():
    print(f"{name} {distance:.2e}")
