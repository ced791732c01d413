"""Diagnoses: which wrong formula gives the wrong numbers."""

from .explain import diagnose as diagnose
from .faults import Fault as Fault
from .faults import catalogue as catalogue
