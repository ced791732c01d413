"""What a step is tried on: problems, the windows of all ranks, and what is right for them."""

from .problems import Problem as Problem
from .problems import token_batch as token_batch
from .problems import tokens as tokens
from .problems import tokens_and_balance as tokens_and_balance
from .problems import tokens_packed as tokens_packed
from .problems import two_heads as two_heads
from .world import Step as Step
from .world import StepResult as StepResult
from .world import World as World
