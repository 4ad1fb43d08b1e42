"""Turn a results folder into one self-contained page and a Markdown file: our numbers beside the paper's.

Reading order: records (the lines of the results), statistics, comparison (row by row), claims, story (the sentences to
remember), document (the parts of a report), drawing, charts, overview and figures, paper_tables, networks, recipes,
code_protocol, explorer, provenance, build (results to document), page and markdown.
"""

from cpnorm.lab.report.build import build
from cpnorm.lab.report.charts import write_lead
from cpnorm.lab.report.markdown import write_markdown
from cpnorm.lab.report.page import write_page
from cpnorm.lab.report.records import RecordError, read_results

__all__ = ["RecordError", "build", "read_results", "write_lead", "write_markdown", "write_page"]
