"""Tests of megacore.compare."""
