"""Models, built from layers that take their tensor-parallel group explicitly."""
