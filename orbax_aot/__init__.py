"""Compiled XLA executables saved beside the weights of an Orbax checkpoint."""
