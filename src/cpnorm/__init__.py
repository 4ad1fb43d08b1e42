"""Neural networks in canonical form: weights kept, trained and normalised as sums of weighted rank-one terms."""
# ruff: noqa: I001, RUF022 (in reading order, not in the alphabet's)

from cpnorm._version import __version__
from cpnorm.tensor import CPTensor
from cpnorm.decompose import RankEstimate, cp_als, cp_exact, cp_power, estimate_rank
from cpnorm.contract import Plan, plan
from cpnorm.layers import (
    CPConv1d,
    CPConv2d,
    CPConv3d,
    CPConvTranspose1d,
    CPConvTranspose2d,
    CPConvTranspose3d,
    CPLayer,
    CPLinear,
)
from cpnorm.convert import canonical_layers, canonical_norm, fold, renormalize, renormalize_after, renormalize_terms
from cpnorm.angles import equal_angles
from cpnorm.modes import flatten_modes
from cpnorm.ranks import ranks_for_budget
from cpnorm.compress import truncate
from cpnorm.report import Report
from cpnorm.gradual import GradualTruncation, lambda_penalty
from cpnorm.summary import Summary, summary
from cpnorm.factorize import Factorization, choose_forms, factorize
from cpnorm.checkpoint import load, read_metadata, save
from cpnorm.export import export_onnx

__all__ = [
    "__version__",
    "CPTensor",
    "cp_exact",
    "cp_power",
    "cp_als",
    "estimate_rank",
    "RankEstimate",
    "Plan",
    "plan",
    "CPLayer",
    "CPLinear",
    "CPConv1d",
    "CPConv2d",
    "CPConv3d",
    "CPConvTranspose1d",
    "CPConvTranspose2d",
    "CPConvTranspose3d",
    "canonical_norm",
    "canonical_layers",
    "renormalize",
    "renormalize_after",
    "renormalize_terms",
    "fold",
    "equal_angles",
    "flatten_modes",
    "ranks_for_budget",
    "truncate",
    "Report",
    "GradualTruncation",
    "lambda_penalty",
    "summary",
    "Summary",
    "factorize",
    "choose_forms",
    "Factorization",
    "save",
    "load",
    "read_metadata",
    "export_onnx",
]
