"""Fixtures of all tests."""

import subprocess
import sys
import textwrap

import pytest


@pytest.fixture
def run_python():
    """Runs a program in a new interpreter with warnings as errors. A failure shows its output."""

    def run(program, *flags):
        result = subprocess.run(
            [sys.executable, "-W", "error", *flags, "-c", textwrap.dedent(program)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run


@pytest.fixture
def random():
    """Seeded tensors by their shape, normally distributed."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=generator).to(dtype)


@pytest.fixture
def calls(monkeypatch):
    """The options of every call of attention made through the adapter to transformers."""
    import tandem.transformers

    made = []

    def counted(function):
        def call(*arguments, **options):
            made.append(options)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(tandem, "attention", counted(tandem.attention))
    heads_first = counted(tandem.transformers.attention_heads_first)
    monkeypatch.setattr(tandem.transformers, "attention_heads_first", heads_first)
    return made
