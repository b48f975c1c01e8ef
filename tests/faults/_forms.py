"""All kinds of files that the system reads, with their readers."""

from tests.faults._data_forms import DATA_FORMS
from tests.faults._model_forms import MODEL_FORMS
from tests.faults._run_forms import RUN_FORMS

FORMS = (*DATA_FORMS, *RUN_FORMS, *MODEL_FORMS)
