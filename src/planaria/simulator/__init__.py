"""The protocol under a seeded scheduler: the real machines, simulated time, every kind of fault.

    python -m planaria.simulator --seeds 0-1999

runs schedules and prints the seed of each that fails; one seed replays one schedule exactly.
"""

from planaria.simulator.checks import Failure
from planaria.simulator.faults import Faults
from planaria.simulator.toy import ToyJob, reference
from planaria.simulator.world import World

__all__ = ["Failure", "Faults", "ToyJob", "World", "reference"]
