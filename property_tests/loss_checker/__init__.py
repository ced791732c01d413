"""The checker of loss functions: the laws, tried on drawn batches."""

from .check import check_loss as check_loss
from .check import report_loss as report_loss
