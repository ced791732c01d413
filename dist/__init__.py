"""Everything that knows about ranks; torch.distributed is imported nowhere else."""

from ._axis import Axis as Axis
from ._collectives import all_gather as all_gather
from ._collectives import all_to_all as all_to_all
from ._collectives import ppermute as ppermute
from ._collectives import psum as psum
from ._collectives import psum_scatter as psum_scatter
from ._run_local import run_local as run_local
