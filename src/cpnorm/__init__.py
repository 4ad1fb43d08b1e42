"""Neural networks in canonical form: weights kept, trained and normalised as sums of weighted rank-one terms."""
# ruff: noqa: I001, RUF022 (in reading order, not in the alphabet's)

from cpnorm.cp.tensor import CPTensor
from cpnorm.cp.decompose import RankEstimate, cp_als, cp_exact, cp_power, estimate_rank, exact_rank
from cpnorm.nn.planner import Plan, plan
from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.layers import (
    CPConv1d,
    CPConv2d,
    CPConv3d,
    CPConvTranspose1d,
    CPConvTranspose2d,
    CPConvTranspose3d,
    CPLinear,
)
from cpnorm.nn.convert import canonical_layers, canonical_norm, fold
from cpnorm.nn.prebuilt import NetworkWeights
from cpnorm.nn.renormalizing import renormalize_terms
from cpnorm.nn.training import equal_angles, lambda_penalty, renormalize, renormalize_after
from cpnorm.gpu.fused_step import FusedTrainStep
from cpnorm.nn.modes import flatten_modes
from cpnorm.nn.ranks import ranks_for_budget
from cpnorm.compress.truncation import truncate
from cpnorm.compress.fitting.calibration import Calibrated, calibrate
from cpnorm.compress.report import Report
from cpnorm.compress.gradual import GradualTruncation
from cpnorm.compress.distillation import distill
from cpnorm.compress.fitting.batch_norm import reestimate_batch_norm
from cpnorm.compress.shrinking.sweeping import Sweep, sweep
from cpnorm.describe.summarize import Summary, summary
from cpnorm.deploy.factorization import Factorization, choose_forms, factorize
from cpnorm.io.checkpoint import load, read_metadata, save
from cpnorm.deploy.onnx import export_onnx
from cpnorm.compress.shrinking.shrinker import Shrinker, Shrunk, shrink
from cpnorm.compress.shrinking.report import ShrinkReport

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "CPTensor",
    "cp_exact",
    "cp_power",
    "cp_als",
    "exact_rank",
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
    "NetworkWeights",
    "FusedTrainStep",
    "fold",
    "equal_angles",
    "flatten_modes",
    "ranks_for_budget",
    "truncate",
    "calibrate",
    "Calibrated",
    "Report",
    "GradualTruncation",
    "distill",
    "reestimate_batch_norm",
    "sweep",
    "Sweep",
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
    "shrink",
    "Shrinker",
    "Shrunk",
    "ShrinkReport",
]
