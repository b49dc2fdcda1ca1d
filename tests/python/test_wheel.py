"""The wheel: one file for every CPython, no dependency on torch; and the ctypes binding."""

import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def wheel():
    wheels = list((ROOT / "build" / "wheel").glob("*.whl"))
    if not wheels:
        pytest.skip("no wheel in build/wheel")
    return wheels[0]


def test_is_tied_to_no_python_and_holds_what_it_needs(wheel):
    assert wheel.name.startswith("tandem_attention-") and "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert {
        "tandem/py.typed",
        "tandem/_native.abi3.so",
        "tandem/libtandem.so.0",
        "tandem/compat/flash_attn/__init__.py",
    } <= names
    assert not [n for n in names if n.endswith((".c", ".h", ".cmake", ".a", ".pyc"))]
    requirements = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    required = [line for line in requirements if "extra" not in line]
    assert required == ["Requires-Dist: numpy>=1.22"]
    assert "Requires-Python: >=3.9" in metadata
    assert "tandem/libtandem_vgpu.so.0" not in names  # packaging/vgpu has it
    extras = [line.partition(": ")[2].replace("'", '"') for line in requirements if "nvidia-cuda" in line]
    assert extras == [
        'nvidia-cuda-nvrtc; extra == "cuda"',
        'nvidia-cuda-nvrtc-cu12<13,>=12.8; extra == "cuda12"',
        'nvidia-cuda-nvrtc<14,>=13.0; extra == "cuda13"',
    ]


def test_auditwheel_accepts_it(wheel):
    pytest.importorskip("auditwheel")
    shown = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True)
    text = " ".join(shown.stdout.split())
    assert 'following platform tag: "manylinux_2_' in text, shown.stdout + shown.stderr
    minor = int(text.split('platform tag: "manylinux_2_')[1].split("_")[0])
    assert minor <= 34, shown.stdout


def test_imports_neither_torch_nor_others(run_python):
    run_python("""
        import sys, tandem
        loaded = {name.partition(".")[0] for name in sys.modules}
        assert not loaded & {"torch", "transformers", "jax", "scipy"}, loaded
        import numpy as np
        q = np.ones((1, 2, 1, 8), np.float32)
        assert (tandem.attention(q, q, q) == 1).all()
        assert not {"torch"} & set(sys.modules)
    """)


def test_the_ctypes_binding(monkeypatch):
    """Runs the numpy tests again without the extension module, as free-threaded builds do."""
    monkeypatch.setenv("TANDEM_PYTHON_BOUNDARY", "ctypes")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests/python/test_numpy.py")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0 and "passed" in result.stdout, result.stdout + result.stderr


def test_free_threaded_builds_never_load_the_module(run_python):
    """CPython 3.13t would find it by its suffix, and crash."""
    run_python("""
        import sys
        sys.abiflags = "t"
        import tandem._binding as library
        assert library.binding.__name__ == "tandem._ctypes" and "tandem._native" not in sys.modules
    """)


def test_the_ctypes_binding_under_torch(run_python, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("TANDEM_PYTHON_BOUNDARY", "ctypes")
    run_python("""
        import torch, tandem, tandem._binding as library
        assert library.binding.__name__ == "tandem._ctypes"
        torch.set_num_threads(2)
        q, k, v = (torch.randn(1, 40, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        out = tandem.attention(q, k, v, causal=True)
        out.float().sum().backward()
        assert out.dtype == torch.bfloat16 and q.grad.abs().sum() >= 0 and "2 threads" in tandem.description()
    """)


def test_the_support_matrix_is_what_the_library_says():
    pytest.importorskip("ml_dtypes")
    script = ROOT / "scripts" / "support_matrix.py"
    result = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
