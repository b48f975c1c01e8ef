"""All kinds of calls that are killed, by name."""

from tests.faults._cases import Kind
from tests.faults._data import DATA_KINDS
from tests.faults._training import LAUNCHER_KINDS, TRAINING_KINDS

KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (*DATA_KINDS, *TRAINING_KINDS, *LAUNCHER_KINDS)
}
