"""``headrace envs check``: is an environment fit to be trained on? Each fault is named, with what to do about it."""

from headrace.envs.check.report import Finding as Finding
from headrace.envs.check.report import Report as Report
from headrace.envs.check.watch import check as check
