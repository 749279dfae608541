"""The index of held prefixes: which worker probably holds which blocks of a prompt."""

from router.core.prefix_index.held import Held
from router.core.prefix_index.index import PrefixIndex

__all__ = ["Held", "PrefixIndex"]
