"""results/ -> one self-contained page and its Markdown twin: our numbers beside the paper's.

Reading order: records (the lines of the results), statistics, comparison (row against row), claims, document (what a
report is made of), plots, charts and figures (drawings), explorer, build (results -> document), page and markdown.
"""

from cpnorm.lab.report.build import build
from cpnorm.lab.report.markdown import write_markdown
from cpnorm.lab.report.page import write_report
from cpnorm.lab.report.records import RecordError, read_results

__all__ = ["RecordError", "build", "read_results", "write_markdown", "write_report"]
