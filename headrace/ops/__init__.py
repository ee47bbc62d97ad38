"""The mathematics: pure functions on one stream ``[T]`` (vmapped by the caller), and distributions."""

from headrace.ops.distributions import distribution, masked
from headrace.ops.families import Distribution, mask_logits
from headrace.ops.rewards import reward_transform
from headrace.ops.schedules import Schedule, ScheduleConfig, make_schedule
from headrace.ops.vtrace import VTrace, vtrace

__all__ = [
    "Distribution",
    "Schedule",
    "ScheduleConfig",
    "VTrace",
    "distribution",
    "make_schedule",
    "mask_logits",
    "masked",
    "reward_transform",
    "vtrace",
]
