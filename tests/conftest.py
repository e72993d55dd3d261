"""Eight CPU devices for every test, set before anything imports jax; and no cache of this user's."""

import atexit
import os
import shutil
import tempfile

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"
# Markers that killed processes left there would make executables of the tests be refused.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="orbax_aot_tests_")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
