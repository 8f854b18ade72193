"""Which kernels a process runs: what is asked for, what the processor has, and what is said where that differs."""

from __future__ import annotations

import contextlib
import warnings

import jax
import jax.numpy as jnp
import pytest
from support import toy

from hsd_jax.infer.loop import program_for
from hsd_jax.kernels import native, ops, program
from hsd_jax.lab.bench import identity
from hsd_jax.models.placement import Placement
from hsd_jax.pair import describe_arithmetic

PROCESSOR_S = native.cpu_isas
"""The real function; `asked` puts another in its place."""


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """`asked(isa)` is the instruction set for this value of the variable, on a processor with AVX2 and no more."""
    monkeypatch.setattr(native, "cpu_isas", lambda: ("avx2",))
    native._select_isa.cache_clear()

    def choose(isa: str) -> str:
        monkeypatch.setenv(native.ISA_VARIABLE, isa)
        return native.selected_isa()

    yield choose
    native._select_isa.cache_clear()


@pytest.mark.parametrize(
    ("isa", "why"),
    [
        ("avx512", "instructions.*avx2"),
        ("sse9", "avx512_bf16, amx and off.*avx2"),
    ],
)
def test_what_cannot_be_had_is_named_once_and_another_instruction_set_runs(asked, isa, why):
    with pytest.warns(UserWarning, match=f"HSD_NATIVE_ISA={isa}: .*{why}"):
        assert asked(isa) == "avx2"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked(isa) == "avx2"


@pytest.mark.parametrize(("isa", "selected"), [("", "avx512_vnni"), ("avx2", "avx2"), ("avx512_bf16", "avx512_vnni")])
def test_a_compiler_older_than_an_instruction_set_gets_the_one_below(asked, tmp_path, monkeypatch, isa, selected):
    """One that knows no bfloat16; what is asked for by name is refused with a warning."""
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *bf16*) exit 1;; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(native, "compiler", lambda: str(compiler))
    monkeypatch.setattr(native, "cpu_isas", lambda: tuple(native.ISAS))
    refused = pytest.warns(UserWarning, match="this compiler")
    with refused if "bf16" in isa else contextlib.nullcontext():
        assert asked(isa) == selected


@pytest.mark.parametrize(("grants", "selected"), [(True, "amx"), (False, "avx512_bf16")])
def test_tiles_are_asked_for_by_name_and_need_the_permission_of_linux(asked, monkeypatch, grants, selected):
    flags = " ".join(native.ISAS["amx"])
    monkeypatch.setattr(native.Path, "read_text", lambda path: f"flags : {flags}\n")
    monkeypatch.setattr(native, "cpu_isas", PROCESSOR_S)
    monkeypatch.setattr(native, "_is_known_to_compiler", lambda isa: True)
    monkeypatch.setattr(native, "_grants_tiles", lambda: grants)
    assert asked("") == "avx512_bf16" and ("amx" in native.cpu_isas()) == grants
    with contextlib.nullcontext() if grants else pytest.warns(UserWarning, match="HSD_NATIVE_ISA=amx"):
        assert asked("amx") == selected


@pytest.mark.skipif(native.compiler() is None, reason="no kernels anyway")
def test_kernels_for_tiles_are_not_even_built_without_the_permission(asked, monkeypatch):
    """Also where a caller names the level past `selected_isa`: the first tile would end the process."""
    monkeypatch.setattr(native, "_grants_tiles", lambda: False)
    monkeypatch.setattr(native, "_load", None)
    assert "tile unit" in native._fault.__wrapped__("amx")


def test_no_kernels_hold_bfloat16_wider(asked, monkeypatch):
    assert asked("off") == "off"
    assert describe_arithmetic("bfloat16") == "bfloat16 weights, multiplied in float32 by XLA (no CPU kernels)"
    assert Placement(widens=True).held_dtype(jnp.dtype("bfloat16")) == jnp.float32
    assert native.is_emulated(jnp.bfloat16)  # on every CPU: rows of XLA's matrix units are not invariant
    monkeypatch.setattr(native, "cpu_isas", lambda: ())  # a processor without vectors
    assert asked("") == "off" and not native.available()


@pytest.mark.skipif(native.compiler() is None or "avx2" not in PROCESSOR_S(), reason="no kernels")
def test_a_program_belongs_to_one_instruction_set(asked):
    """A function that is bound at one is traced so later too, and what was compiled for one does not run at another."""
    config, (x, kernel) = toy.target_config(), (jnp.ones((2, 8)), jnp.ones((4, 8)))
    weights, compiled = toy.make_target(config), []
    for isa in ("avx2", "off"):
        asked(isa)
        bound = program_for()
        asked("off")
        assert ("hsd_avx2" in str(jax.make_jaxpr(bound.traced(lambda *a: ops.matmul(*a)))(x, kernel))) == (
            isa == "avx2"
        )
        asked(isa)
        identity.replay_logits(weights, config, [1, 2], [3, 4])
        compiled.append(identity._replay._cache_size())
    assert compiled[1] == compiled[0] + 1


def test_the_platform_is_that_of_the_program():
    """On a CPU bfloat16 is multiplied in float32 or by our kernels; a program for a GPU multiplies it as it is."""
    x, kernel = jnp.ones((2, 8)), jnp.ones((4, 8), jnp.bfloat16)

    def is_multiplied_as_it_is() -> bool:
        return "bf16[2,8]" in str(jax.make_jaxpr(lambda *a: ops.matmul(*a))(x, kernel))

    assert not is_multiplied_as_it_is()
    with program.tracing(backend="gpu"):
        assert is_multiplied_as_it_is() and native.usable_isa() == native.OFF
