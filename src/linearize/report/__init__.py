"""The account of a conversion as one self-contained HTML page."""

from linearize.report.data import EVALUATION, SAMPLES, Memory, ReportData, read
from linearize.report.page import PAGE, render, write

__all__ = ["EVALUATION", "PAGE", "SAMPLES", "Memory", "ReportData", "read", "render", "write"]
