"""HADS: a block budget for every head of a model. profile → budget → selection → plan.

calibration text ─ calibrate ─ Profile ─ make ─ Plan ─ mask(layer, q, k) ─ BlockMask
                                            ↑
                      one density for the whole model, and a policy that splits it
"""

from xsake.hads.certificate import Certify, Report, certified_attention
from xsake.hads.correction import corrected_attention
from xsake.hads.plan import Plan, make
from xsake.hads.profile import Profile, calibrate
from xsake.hads.statistics import measure

__all__ = [
    "Certify",
    "Plan",
    "Profile",
    "Report",
    "calibrate",
    "certified_attention",
    "corrected_attention",
    "make",
    "measure",
]
