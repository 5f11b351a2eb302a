"""Durable checkpoints: files and bytes, and nothing about messages.

Each server writes its part with a `PartWriter`, a trainer the dense part; then somebody calls
`publish`, and from then on the checkpoint counts. `latest` finds the newest whole one, `restore`
fills a server's arenas from it, in any layout. A `Lease` keeps two jobs off one folder.
docs/checkpoints.md has the promises.
"""

from planaria.checkpoints.catalogue import (
    Facts,
    Found,
    Listed,
    discard,
    discard_parts,
    latest,
    list_checkpoints,
    prune,
    publish,
)
from planaria.checkpoints.checkpoint import Checkpoint, Piece
from planaria.checkpoints.chunks import DENSE
from planaria.checkpoints.encodings import (
    BITS,
    RAW_BITS,
    Encoding,
    EncodingMaker,
    Quantised,
    Raw,
    make_encoding,
)
from planaria.checkpoints.folders import check_writable
from planaria.checkpoints.lease import Lease
from planaria.checkpoints.manifest import Manifest, PartSummary
from planaria.checkpoints.names import new_job_id
from planaria.checkpoints.policy import POLICIES, Policy, Saved, SavePlan, plan_next
from planaria.checkpoints.restoring import fill_parity, restore
from planaria.checkpoints.target import Taken
from planaria.checkpoints.writer import PartWriter

__all__ = [
    "BITS",
    "DENSE",
    "POLICIES",
    "RAW_BITS",
    "Checkpoint",
    "Encoding",
    "EncodingMaker",
    "Facts",
    "Found",
    "Lease",
    "Listed",
    "Manifest",
    "PartSummary",
    "PartWriter",
    "Piece",
    "Policy",
    "Quantised",
    "Raw",
    "SavePlan",
    "Saved",
    "Taken",
    "check_writable",
    "discard",
    "discard_parts",
    "fill_parity",
    "latest",
    "list_checkpoints",
    "make_encoding",
    "new_job_id",
    "plan_next",
    "prune",
    "publish",
    "restore",
]
