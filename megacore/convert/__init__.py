"""Models in the forms of other programs. transformers is imported here alone, when it is needed."""

from megacore.convert.exportable import exportable

__all__ = ["exportable"]
