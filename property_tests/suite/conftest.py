import os

import pytest
import torch
import torch.distributed as c10d
from hypothesis import HealthCheck, settings
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

# `dev` is for the desk, `ci` repeats the same examples each time, `thorough` is for a night.
slow_ok = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("dev", max_examples=30, deadline=None, suppress_health_check=slow_ok)
settings.register_profile(
    "ci", max_examples=30, deadline=None, derandomize=True, suppress_health_check=slow_ok
)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

# Two cores: more threads only get in the way of the ranks that tests start.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_rng_state_in_each_test():
    torch.manual_seed(0)


@pytest.fixture
def two_ranks():
    """A default group of two ranks: this process is the first, the other is not there."""
    c10d.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield c10d.distributed_c10d._get_default_group()
    c10d.destroy_process_group()
    # DTensor caches shapes by mesh; ranks that are forked later would take those of rank 0.
    _clear_sharding_prop_cache()
