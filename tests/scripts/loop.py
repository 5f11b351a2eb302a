"""A loop with all that a user's may have; arguments name what it does besides.

two_epochs   shuffled data, twice; without it, once
stop=N       leaves the loop in step N
held         has a name for the loop, so that it is there until the script ends
raise=N      raises in step N, on every rank
caught=N     goes on after a backward that has raised in step N
move         goes to another folder in step 3
sleep=N:S    computes for S seconds in step N
apart=N      leaves the loop in step N + its rank
say          prints every loss, exactly
end=N:HOW    ends in step N: see end()
after=HOW    ends after the loop
unkept       learns something that is neither kept nor the same on all ranks
lacks=N:WHAT raises OSError or MemoryError in step N on rank 0, and a spare does so only if WHAT is
             "memory always"
slow=S       computes for S seconds before its first batch, where it was not there from the start
skips=N      takes no step of the optimizer in step N, on rank 1
starts=S     takes S seconds before it connects
elsewhere    goes to another folder before it connects
given=JSON   keys for connect
ranks        prints what it finds of its rank in every step
save=N       asks for a checkpoint in step N
pace=S       takes S seconds for every step
raw          has ids in its batches that no table has, and takes their remainders
"""

import contextlib
import json
import os
import signal
import sys
import time

import torch
from ratings import BATCH, ROWS, Model, Ratings, collate
from torch import nn

import planaria.torch

wanted = dict(word.partition("=")[::2] for word in sys.argv[1:])
stop, fails = int(wanted.get("stop", -1)), int(wanted.get("raise", -1))
apart, skips = int(wanted.get("apart", -99)), int(wanted.get("skips", -1))
caught = int(wanted.get("caught", -1))
ends, _, how = wanted.get("end", "-1:").partition(":")
lacks, _, what = wanted.get("lacks", "-1:").partition(":")
sleeps, _, seconds = wanted.get("sleep", "-1:0").partition(":")

replaces = os.environ.get("RANK") == "-1"
busy_until = time.monotonic() + float(wanted.get("slow", 0)) * replaces
while time.monotonic() < busy_until:
    pass

time.sleep(float(wanted.get("starts", 0)))
if "elsewhere" in wanted:
    os.chdir("/")
job = planaria.torch.connect(seed=7, **json.loads(wanted.get("given", "{}")))
torch.manual_seed(1)
of_tables = planaria.torch.Adagrad(lr=0.1)
model = Model(of_tables)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
schedule_of_tables = torch.optim.lr_scheduler.StepLR(of_tables, 3, 0.8)
job.keep(model=model, optimizer=optimizer, schedule=schedule, of_tables=schedule_of_tables)


class Seen:
    """What the loop has counted: a user's own kept object."""

    def __init__(self):
        self.mean = 0.0

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


seen = Seen()
job.keep(seen=seen)
loss_of = nn.functional.binary_cross_entropy_with_logits
epochs = 2 if "two_epochs" in wanted else 1


def end(how):
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "closed":
        sys.stdout.close()
    elif how == "abrupt":
        os._exit(3)
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "sleep":
        print("sleeps after the loop", flush=True)
        time.sleep(200)
    else:
        sys.exit(int(how) if how.isdigit() else how)


def remapped(bags, change):
    return planaria.torch.KeyedJaggedTensor(
        bags.keys(), change(bags.values()), lengths=bags.lengths()
    )


def collate_raw(samples):
    dense, bags, ids, liked = collate(samples)
    return dense, remapped(bags, lambda values: values + 7 * ROWS), ids, liked


def batches():
    collated = collate_raw if "raw" in wanted else collate
    return job.batches(Ratings(), BATCH, epochs=epochs, shuffle=True, collate_fn=collated)


held = batches() if "held" in wanted else None
for dense, bags, ids, liked in held or batches():
    step = job.step + 1
    if step == int(sleeps):
        print(f"step {step} takes long", flush=True)
        time.sleep(float(seconds))
    time.sleep(float(wanted.get("pace", 0)))
    if step == 3 and "move" in wanted:
        os.chdir("/")
    if step == int(wanted.get("save", -1)):
        job.save()
    if "ranks" in wanted:
        found = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
        print(f"step {step}:", *found, job.rank, job.world_size, flush=True)
    if "raw" in wanted:
        bags = remapped(bags, lambda values: values % ROWS)
    optimizer.zero_grad()
    if step == caught:
        with contextlib.suppress(ZeroDivisionError):
            leaf = dense.clone().requires_grad_()
            leaf.register_hook(lambda _: 1 // 0)
            loss_of(model(leaf, bags, ids), liked).backward()
    with job.accumulate():
        loss = loss_of(model(dense, bags, ids), liked)
        loss.backward()
        (0.5 * loss_of(model(dense * 0.5, bags, ids), liked)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for one in (optimizer, schedule, of_tables, schedule_of_tables):
        if one is not optimizer or step != skips or job.rank != 1:
            one.step()
    if step % 5 == 0:  # the last step is one of these
        model.eval()
        if job.rank == 0:
            with job.evaluate():
                mean = model(dense, bags, ids).mean().item()
        seen.mean = mean if job.world_size == 1 else step
        model.train()
    if "unkept" in wanted:
        seen.mean += job.rank
    if "say" in wanted:
        print(step, loss.item().hex(), flush=True)
    if step == int(lacks) and job.rank == 0 and (what == "memory always" or not replaces):
        raise OSError(24, "Too many open files") if what == "descriptors" else MemoryError
    if step == fails:
        raise RuntimeError(f"step {step} is one too many")
    if step == int(ends):
        end(how)
    if step in (stop, apart + job.rank):
        break
print(f"rank {job.rank} is through after step {job.step}")
if "after" in wanted and job.rank == job.world_size - 1:
    end(wanted["after"])
