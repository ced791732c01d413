"""Everything that knows about ranks; torch.distributed is imported nowhere else."""

from ._axis import Axis as Axis
from ._collectives import all_gather as all_gather
from ._collectives import all_to_all as all_to_all
from ._collectives import ppermute as ppermute
from ._collectives import psum as psum
from ._collectives import psum_scatter as psum_scatter
from ._ranks import RankError as RankError
from ._run_local import run_local as run_local
from .accumulate import Accumulator as Accumulator
from .accumulate import accumulator as accumulator
from .checkpoint import latest as latest
from .checkpoint import load as load
from .checkpoint import save as save
from .fsdp import sum_gradients as sum_gradients
from .norm import sum_of_squares as sum_of_squares
from .sharding import gather as gather
from .sharding import shard as shard
from .train import Record as Record
from .train import TrainState as TrainState
from .train import fit as fit
from .train import init_state as init_state
from .train import train_step as train_step
from .window import window_grad as window_grad
from .window import window_value as window_value
