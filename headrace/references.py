"""Things of a user's own, named in settings as ``my.module:name``."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from headrace.errors import ConfigError


def load_function(reference: str) -> Callable[..., Any]:
    """The function or class ``my.module:name``, looked for in the working directory too.

    Raises:
        ConfigError: the text is not of that form, or there is no such module or name.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise ConfigError(f"got {reference!r}, expected my.module:function")
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{reference}: there is no module {error.name!r} in the working directory or installed"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"{reference}: module {module_name} has no {name!r}") from error
    finally:
        if added:
            sys.path.remove(here)
