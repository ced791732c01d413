"""The checker of steps: any trainer against Σnum/Σden."""

from .check import check_step as check_step
from .check import report_step as report_step
