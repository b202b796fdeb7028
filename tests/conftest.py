"""What every test needs before jax is imported: float64, two devices, one place for compiled programs."""

import gc
import os
from collections.abc import Iterator

import pytest

os.environ["JAX_ENABLE_X64"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
quickly = [  # compiling is most of it, and the emitters of fused loops are more than half of compiling
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_cpu_parallel_codegen_split_count=1",  # cut into up to 32 parts, a program costs more to compile
]
os.environ["XLA_FLAGS"] = " ".join([*flags, *quickly, "--xla_force_host_platform_device_count=2"])


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs between runs: JAX's key for one covers the program, the flags and the compiler.

    And look for garbage seldom: Python did it 2,700 times in 90 s, and JAX each time, too.
    """
    import jax

    gc.freeze()  # what is imported by now stays
    gc.set_threshold(20_000, 20, 20)  # tracing makes many objects, and little garbage
    if cache := getattr(config, "cache", None):  # there is none under `-p no:cacheprovider`
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache.mkdir("jax"))  # for processes of tests, too
        jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(scope="module", autouse=True)
def _programs_go_with_their_module() -> Iterator[None]:
    """Compiled programs and the memory that compiling took: kept to the end they would be gigabytes in each process."""
    import jax

    from fedbilevel.engines import machine

    yield
    jax.clear_caches()
    machine.give_back()
