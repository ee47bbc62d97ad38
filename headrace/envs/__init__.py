"""Environments: many of them behind one contract."""

from headrace.envs.contract import EnvGroup as EnvGroup
from headrace.envs.contract import EnvSpec as EnvSpec
from headrace.envs.registry import describe as describe
from headrace.envs.registry import make_group as make_group
from headrace.envs.registry import prefixes as prefixes
from headrace.envs.registry import register as register
