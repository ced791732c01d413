"""Reports of checks: verdicts as data, and how they are shown."""

from .code import as_code as as_code
from .rendering import as_json as as_json
from .rendering import as_text as as_text
from .rendering import print_report as print_report
from .report import CheckFailed as CheckFailed
from .report import Diagnosis as Diagnosis
from .report import Report as Report
from .report import Verdict as Verdict
