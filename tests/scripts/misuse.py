"""Uses of a job that are refused, one after the other; each sentence is printed, and training goes
on as if it had not been tried."""

import torch
from ratings import BATCH, Model, Ratings, collate

import planaria.torch
from planaria.errors import PlanariaError


def refused(what, call, *arguments):
    try:
        call(*arguments)
    except PlanariaError as error:
        print(f"{what}: {error}")
    else:
        print(f"{what} was allowed")


def backward(dense, bags, ids):
    model(dense, bags, ids).sum().backward()


job = planaria.torch.connect()
torch.manual_seed(1)
model = Model(planaria.torch.Adagrad(lr=0.1))
sample = collate([Ratings()[number] for number in range(2)])[:3]
refused("a forward before connect's loop", lambda: model(*sample))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.keep(model=model, optimizer=optimizer)
refused("evaluate before the loop", lambda: job.evaluate().__enter__())
for dense, bags, ids, _ in job.batches(Ratings(), BATCH, collate_fn=collate):
    optimizer.zero_grad()
    backward(dense, bags, ids)
    optimizer.step()
    if job.step == 1:
        refused("keep in the loop", lambda: job.keep(late=model))
        refused("batches in the loop", lambda: job.batches(Ratings(), BATCH))
        refused("a second backward", backward, dense, bags, ids)
        late = planaria.torch.EmbeddingBag(10, 4)
        refused("a late collection", late, torch.tensor([[1]]))
        with job.evaluate():
            refused("an id in evaluation", model.single, ids + 60)
            wrong = planaria.torch.KeyedJaggedTensor(
                bags.keys(), bags.values() + 60, lengths=bags.lengths()
            )
            refused("an id of a feature", model.bags, wrong)
        stranger = torch.optim.SGD(model.parameters(), lr=0.1)
        refused("an optimizer that is not kept", stranger.step)
        refused("labels that do not fit", job.judge, 0, torch.ones(3), torch.ones(5))
        job.log(torch.tensor(0.5))  # a number, whatever it comes as
    if job.step == 3:
        break
refused("a forward after the loop", model, *sample)
refused("a second loop", lambda: next(iter(job.batches(Ratings(), BATCH, collate_fn=collate))))
