"""How every test runs: on 8 fake CPU devices, in full float32 products, as strictly as the libraries bear.

What is strict here and why something is not stands beside each setting. Warnings are errors (pyproject.toml).
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import shutil
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent

# Before jax is imported. Programs that a test starts inherit both.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HSD_RACE"] = "off"  # texts and plans of tests do not depend on the clock,
os.environ["HSD_RATES"] = "off"  # and neither is how fast it is
os.environ["HSD_PROBE"] = "off"  # what a drafter of others accepts is tried where a test asks for it
if not (shutil.which("g++") or shutil.which("clang++")):
    os.environ["HSD_NATIVE_ISA"] = "off"  # without a warning, which would be an error in every test that decodes
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

# Shapes are checked where functions are. Not in types.py: jax builds pytrees of None, of 0 and of placeholders
# (tree.map, vmap's in_axes), which no shape fits. A pytree dataclass within the packages named here says
# `@typing.no_type_check` above its other decorators for the same reason. Configurations check themselves.
CHECKS_SHAPES = importlib.util.find_spec("beartype") is not None
if CHECKS_SHAPES:
    import jaxtyping

    assert not any(name.startswith("hsd_jax.") for name in sys.modules), "hsd_jax was imported before its import hook"
    packages = [
        "hsd_jax.kernels",
        "hsd_jax.models",
        "hsd_jax.drafters",
        "hsd_jax.infer",
        "hsd_jax.lab.bench.identity",
        "hsd_jax.lab.bench.replay",
        "hsd_jax.planning.timing",
    ]
    jaxtyping.install_import_hook(packages, "beartype.beartype")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from hsd_jax.host import compilation  # noqa: E402

pytest.register_assert_rewrite("support")  # whose asserts then show their values, as those of tests do

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# jax_numpy_rank_promotion stays "allow": the layers add [H] biases and norm weights to [B, N, H] activations on
# purpose, and shapes are checked at function borders anyway.

# Most of a test's time is XLA's. What users run, in full optimization, is what `make test-slow` runs, and what the
# tests of bits ask for (`fully_optimized`).
IS_OPTIMIZED = bool(os.environ.get("HSD_TEST_OPTIMIZED"))
jax.config.update("jax_disable_most_optimizations", not IS_OPTIMIZED)

# Programs are not told from which lines they come: nothing here reads that, and writing it takes time.
jax.config.update("jax_traceback_in_locations_limit", 0)

FAST_OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
"""XLA's older way to write a program, in one piece: a quarter of the time where nothing is optimized. That of jax 0.12
has only the newer way, whose programs have three times as many pieces."""


def compile_fast() -> None:
    """Compiles with FAST_OPTIONS wherever most optimizations are off.

    jax has settings of its own for few options of XLA, and XLA_FLAGS holds for a process from its start, tests of bits
    included; so the one function that is asked before every compilation is wrapped. It is no part of jax's interface:
    with a jax without it, or an XLA without the options, tests take longer, and that is all.
    """
    try:
        from jax._src import compiler

        plain = compiler.get_compile_options
        jax.jit(lambda x: x, compiler_options=FAST_OPTIONS)(np.float32(0)).block_until_ready()
    except (ImportError, AttributeError, jax.errors.JaxRuntimeError):
        return

    def get_compile_options(*args, **kwargs):
        options = plain(*args, **kwargs)
        if jax.config.read("jax_disable_most_optimizations"):
            options.env_option_overrides = [*options.env_option_overrides, *FAST_OPTIONS.items()]
        return options

    compiler.get_compile_options = get_compile_options


compile_fast()

jax.config.update("jax_compilation_cache_dir", str(REPO / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look through it again in every test."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


_tests = itertools.count()


def pytest_runtest_setup() -> None:
    """Tests compile more programs than a process has memory maps for. To count the maps takes up to 50 ms."""
    if next(_tests) % 8 == 0:
        compilation.make_room()


def pytest_report_header() -> str:
    level = "fully optimized" if IS_OPTIMIZED else "compiled fast (HSD_TEST_OPTIMIZED=1: as users do)"
    shapes = "checked" if CHECKS_SHAPES else "NOT checked: beartype is missing (pip install -e '.[test]')"
    return f"jax {jax.__version__} on {jax.device_count()} {jax.default_backend()} devices, shapes {shapes}, {level}"


@pytest.fixture
def fully_optimized():
    """For tests whose subject is the bits that a user gets; what they compile takes several times as long."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", not IS_OPTIMIZED)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of large models and data that may lie beside the repository; tests that need it skip without."""
    folder = REPO.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs {folder.name}/ beside the repository")
    return folder
