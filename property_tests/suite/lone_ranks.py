"""Ranks as a launcher has them: no caller that ends all when one ends, so that each tells its own.

``run_local`` stops the others as soon as a rank has died; here they live on, and say what they see.
"""

import multiprocessing
import os
import pickle
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as c10d

KILLED = "killed"
HANGS = "hangs"


def outcomes(fn, num_ranks, *args, timeout):
    """What ``fn(*args)`` gave on each rank, which then ends; or that it was killed, or hangs."""
    with TemporaryDirectory() as folder:
        start = multiprocessing.get_context("fork").Process
        ranks = [
            start(target=_rank, args=(fn, args, rank, num_ranks, folder))
            for rank in range(num_ranks)
        ]
        for each in ranks:
            each.start()
        deadline = time.monotonic() + timeout
        for each in ranks:
            each.join(max(0.0, deadline - time.monotonic()))
        found = [_outcome(each, folder, rank) for rank, each in enumerate(ranks)]
        for each in ranks:
            each.kill()
            each.join()
        return found


def _outcome(process, folder, rank):
    if process.exitcode is None:
        return HANGS
    path = Path(folder) / str(rank)
    return pickle.loads(path.read_bytes()) if path.exists() else KILLED


def _rank(fn, args, rank, num_ranks, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder}/store"
    c10d.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    try:
        found = fn(*args)
    except Exception as error:
        found = f"the test itself: {type(error).__name__}: {error}"
    path = Path(folder) / str(rank)
    path.with_suffix(".part").write_bytes(pickle.dumps(found))
    path.with_suffix(".part").rename(path)
    os._exit(0)  # its connections end here, as those of any process that fails
