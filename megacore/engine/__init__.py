"""Engines: how one optimizer step is carried out."""
