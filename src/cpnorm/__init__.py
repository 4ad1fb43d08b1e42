"""Neural networks in canonical form: weights kept, trained and normalised as sums of weighted rank-one terms."""

from cpnorm._version import __version__
from cpnorm.contract import Plan, plan
from cpnorm.convert import canonical_layers, canonical_norm, fold, renormalize, renormalize_after, renormalize_terms
from cpnorm.decompose import RankEstimate, cp_als, cp_exact, cp_power, estimate_rank
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
from cpnorm.tensor import CPTensor

__all__ = [
    "CPConv1d",
    "CPConv2d",
    "CPConv3d",
    "CPConvTranspose1d",
    "CPConvTranspose2d",
    "CPConvTranspose3d",
    "CPLayer",
    "CPLinear",
    "CPTensor",
    "Plan",
    "RankEstimate",
    "__version__",
    "canonical_layers",
    "canonical_norm",
    "cp_als",
    "cp_exact",
    "cp_power",
    "estimate_rank",
    "fold",
    "plan",
    "renormalize",
    "renormalize_after",
    "renormalize_terms",
]
