"""The one place that touches `jax._src` and jaxlib internals, split by topic.

Each function names the JAX versions it was seen on. Private modules are imported inside the functions that use
them, so that a JAX that moved one of them costs that function only, never the import of this package: callers turn
the `ImportError`, `AttributeError` or `TypeError` into a reason and leave the work to `jax.jit`.
"""
