"""Everything that knows about ranks; torch.distributed is imported nowhere else."""

from ._run_local import run_local as run_local
