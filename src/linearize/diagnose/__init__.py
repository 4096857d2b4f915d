"""Why linear attention errs, and where: diagnostics of the activations of any model.

Each function looks at one thing and returns a frozen account of it.
"""

from linearize.diagnose.activations import ActivationProfile, activation_profile
from linearize.diagnose.budget import GroupBudget, group_budget
from linearize.diagnose.concentration import Concentration, concentration
from linearize.diagnose.groups import Groups, groups
from linearize.diagnose.profiles import Profiles, profiles
from linearize.diagnose.retained_error import retained_error
from linearize.diagnose.retained_result import RetainedError
from linearize.diagnose.stability import Stability, stability
from linearize.diagnose.state_size import StateCurve, state_curve

__all__ = [
    "ActivationProfile",
    "Concentration",
    "GroupBudget",
    "Groups",
    "Profiles",
    "RetainedError",
    "Stability",
    "StateCurve",
    "activation_profile",
    "concentration",
    "group_budget",
    "groups",
    "profiles",
    "retained_error",
    "stability",
    "state_curve",
]
