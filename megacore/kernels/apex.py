"""Whether NVIDIA apex is installed; `scripts/install_apex.sh` builds it from NVIDIA's source."""

from functools import cache
from importlib import import_module


@cache
def has_apex(module: str) -> bool:
    """Whether a module of apex can be imported: which of its extensions were built differs between installations.

    On PyPI `apex` is another package, which has none of them.
    """
    try:
        import_module(module)
    except (ImportError, OSError):
        return False
    return True
