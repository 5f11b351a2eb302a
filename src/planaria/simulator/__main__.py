"""`python -m planaria.simulator`: run schedules, find the seed that fails, replay it."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from planaria.simulator.campaigns import (
    EXHAUSTIVE,
    KillsAt,
    Outcome,
    run_boundaries,
    run_seeds,
    schedule,
)
from planaria.simulator.checks import Failure
from planaria.simulator.process import START_S
from planaria.simulator.toy import ToyJob
from planaria.simulator.world import World
from planaria.wire.messages import Member, Message

GUIDE = """
One seed is one schedule: a small job on simulated servers, trainers and a coordinator, with kills,
pauses, partitions, lost, late, doubled and reordered messages. It must end with the records, the
parity and the dense state of an undisturbed run, bit for bit, and be fully redundant in time.

  python -m planaria.simulator --seeds 0-1999 --workers 2   look for a seed that fails
  python -m planaria.simulator --seed 17 --trace            replay one, message by message
  python -m planaria.simulator --seeds 0-499 --drop 0.2     the same seeds, on a worse network
  python -m planaria.simulator --seeds 0-499 --over         more deaths than the code can bear
  python -m planaria.simulator --boundaries --workers 2     4+2: all kills at every message
  python -m planaria.simulator --kill 0,3 --at 217          replay one of those

What is not set follows from the seed, so replay with the options of the run that failed. The exit
code is 1 if any schedule failed, 0 if all held.
"""


def seeds_of(text: str) -> range:
    """ "17" or "0-1999", both ends included."""
    first, _, last = text.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    if not seeds:
        raise ValueError(text)
    return seeds


def places_of(text: str) -> list[int]:
    places = [int(place) for place in text.split(",")]
    if not all(0 <= place < EXHAUSTIVE.servers for place in places):
        raise ValueError(text)
    return places


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m planaria.simulator",
        description="The protocol under a seeded scheduler.",
        epilog=GUIDE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", type=seeds_of, metavar="A-B", help="run these; default 0-199")
    what.add_argument("--seed", type=int, metavar="N", help="run this one")
    what.add_argument("--boundaries", action="store_true", help="kill at every message boundary")
    what.add_argument("--kill", type=places_of, metavar="P,Q", help="kill these places, see --at")
    parser.add_argument("--at", type=int, metavar="N", help="with --kill: before the N-th delivery")
    parser.add_argument("--trace", action="store_true", help="print every message of one schedule")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes to use")
    job = parser.add_argument_group("the job, drawn from the seed unless set")
    job.add_argument("--servers", type=int, metavar="N", help="4 if only --k or --parity is set")
    job.add_argument("--k", type=int, metavar="N", help="data records per stripe")
    job.add_argument("--parity", type=int, metavar="R", dest="r", help="parity records per stripe")
    job.add_argument("--trainers", type=int, metavar="N")
    job.add_argument("--steps", type=int, metavar="N")
    job.add_argument("--keep-steps", type=int, metavar="N", help="steps of history")
    job.add_argument("--spares", type=int, metavar="N", help="warm spare servers")
    faults = parser.add_argument_group("the faults, likewise")
    faults.add_argument("--faults", type=int, metavar="N", dest="count", help="how many")
    faults.add_argument("--drop", type=float, metavar="P", help="probability that one is lost")
    faults.add_argument("--duplicate", type=float, metavar="P", help="and that it comes twice")
    faults.add_argument("--pause", type=float, metavar="S", dest="pause_s", help="longest pause")
    faults.add_argument("--network", choices=["even", "uneven", "ragged"], help="delays")
    faults.add_argument(
        "--resizes", action="store_true", default=None, help="let servers come and go, too"
    )
    faults.add_argument(
        "--survivors", action="store_true", default=None, help="let these rebuild what was lost"
    )
    faults.add_argument(
        "--over",
        action="store_false",
        dest="within_budget",
        default=None,
        help="let more than r servers of a group die: it must be named, never hang or be wrong",
    )
    return parser


OVERRIDES = (
    *("servers", "k", "r", "trainers", "steps", "keep_steps", "spares"),
    *("count", "drop", "duplicate", "pause_s", "network", "within_budget", "resizes"),
    "survivors",
)


class Traced(World):
    """Prints what is delivered, as it happens."""

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        super().on_delivery(sender, to, message)
        print(f"{self.now - START_S:8.3f} {self.delivered:5} {sender} → {to}: {in_short(message)}")

    def note(self, what: str) -> None:
        super().note(what)
        print(f"{self.now - START_S:8.3f}       *** {what}")


class TracedKills(Traced, KillsAt):
    pass


def in_short(message: Message) -> str:
    fields = ("step", "rank", "place", "as_of", "status", "committed", "held", "whole", "member")
    said = [f"{name} {getattr(message, name)}" for name in fields if hasattr(message, name)]
    return f"{type(message).__name__} {tuple(message.view)} {', '.join(said)}"


def run_one(world: World) -> int:
    try:
        world.run()
    except Failure as failure:
        print(f"FAILED {failure}")
        return 1
    print("\n".join(world.story))
    print(f"gave up, as it should: {world.failure}" if world.failure else "all promises were kept")
    return 0


def run_many(seeds: range, workers: int, overrides: dict[str, Any]) -> int:
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for outcome in run_seeds(seeds, workers, **overrides):
        outcomes.append(outcome)
        if outcome.failed:
            print(f"\rFAILED {outcome.failed}")
        if len(outcomes) % 100 == 0 and sys.stderr.isatty():
            print(f"\r{len(outcomes)} of {len(seeds)}", end="", file=sys.stderr, flush=True)
    failed = [outcome.seed for outcome in outcomes if outcome.failed]
    given_up = sum(outcome.given_up is not None for outcome in outcomes)
    slowest_s = max(outcome.redundant_after_s for outcome in outcomes)
    print(
        f"\r{len(outcomes)} schedules, {sum(o.delivered for o in outcomes)} deliveries, "
        f"{time.monotonic() - began:.0f} s: {len(failed)} failed, {given_up} named their loss; "
        f"redundant {slowest_s:.1f} s after the last fault at the latest"
    )
    if failed:
        print(f"failing seeds: {' '.join(map(str, failed))}")
    return 1 if failed else 0


def run_all_boundaries(workers: int) -> int:
    schedules, failures = 0, 0
    for count, failed in run_boundaries(workers=workers):
        schedules += count
        failures += len(failed)
        for line in failed:
            print(f"\rFAILED {line}")
        if sys.stderr.isatty():
            print(f"\r{schedules}", end="", file=sys.stderr, flush=True)
    print(f"\r{schedules} schedules with kills at every message boundary: {failures} failed")
    return 1 if failures else 0


def main() -> int:
    parser = arguments()
    given = parser.parse_args()
    overrides = {name: getattr(given, name) for name in OVERRIDES}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    if {"servers", "k", "r"} & set(overrides):
        shape = {"servers": ToyJob.servers, "k": ToyJob.k, "r": ToyJob.r}
        overrides = {**shape, **overrides}
        if overrides["servers"] < overrides["k"] + overrides["r"]:
            parser.error("a stripe needs k + parity servers: start more, or set --k and --parity")
    if given.workers < 1:
        parser.error("--workers must be 1 or more")
    if (given.kill is None) != (given.at is None):
        parser.error("--kill and --at belong together")
    if given.trace and given.seed is None and given.kill is None:
        parser.error("--trace shows one schedule: give --seed, or --kill and --at")
    if given.boundaries:
        return run_all_boundaries(given.workers)
    if given.kill is not None:
        kind = TracedKills if given.trace else KillsAt
        return run_one(kind(EXHAUSTIVE, given.at, given.kill))
    if given.seed is not None:
        return run_one(schedule(given.seed, **overrides).world(Traced if given.trace else World))
    return run_many(given.seeds or range(200), given.workers, overrides)


if __name__ == "__main__":
    sys.exit(main())
