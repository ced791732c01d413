"""Models as pure functions: ``init(config, key) -> params``, ``apply``, ``loss_terms``.

One model a file; params are nested dicts of tensors. ``as_module`` makes an ``nn.Module`` of them
for what needs one. ``hf`` reads and writes Hugging Face checkpoints.
"""

from . import decoder as decoder
from . import hf as hf
from . import layers as layers
from .module import as_module as as_module
from .module import as_params as as_params
from .module import call as call
