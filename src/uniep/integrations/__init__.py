"""Thin adapters to training frameworks, each imported on demand: `from uniep.integrations import hf`."""
