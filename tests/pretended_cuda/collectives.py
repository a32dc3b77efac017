"""An all-reduce on NCCL's stream beside the caller's, in a job of one rank: who waits for it is in the log.

    python -m tests.pretended_cuda exec -m tests.pretended_cuda.collectives       prints the races, as JSON
"""

from __future__ import annotations

import json
import tempfile

import torch
import torch.distributed as dist

from tests.pretended_cuda.detector import races
from tests.pretended_cuda.log import Log


def races_of(*, waits: bool) -> list[str]:
    """Reduce a tensor in place and read it, with or without waiting for that."""
    log, x = Log(), torch.ones(4096, device="cuda")
    log.start()
    log.write(x, "an op before")
    work = dist.all_reduce(x, async_op=True)
    if waits:
        work.wait()
    log.read(x, "an op after")
    entries, names = log.stop()
    work.wait()
    return [str(race) for race in races(entries, names)]


def main() -> None:
    """Print the races of both."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/meet", rank=0, world_size=1, device_id=torch.device("cuda", 0)
        )
        print(json.dumps({"waits": races_of(waits=True), "does not": races_of(waits=False)}))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
