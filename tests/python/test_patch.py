"""tandem.patch(): replaces other names by Tandem, and restores them."""

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import tandem  # noqa: E402
import tandem.fa3  # noqa: E402
import tandem.fa4  # noqa: E402
import tandem.flash_attn  # noqa: E402

NAMES = (
    "flash_attn",
    "flash_attn.flash_attn_interface",
    "flash_attn.bert_padding",
    "flash_attn.layers",
    "flash_attn.layers.rotary",
    "flash_attn.cute",
    "flash_attn.cute.interface",
    "flash_attn_interface",
)


@pytest.fixture(autouse=True)
def leaves_no_trace():
    before = snapshot()
    yield
    assert snapshot() == before


def snapshot():
    """The state that a patch changes: the modules, by identity, and the finders of distributions."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("flash_attn")}
    return modules, [finder for finder in sys.meta_path if type(finder).__module__ == "tandem.compat.patch"]


def test_imports_find_tandem():
    with tandem.patch():
        import flash_attn
        import flash_attn.cute as cute
        import flash_attn.layers.rotary
        import flash_attn_interface
        from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        from flash_attn.bert_padding import pad_input, unpad_input
        from flash_attn.cute.interface import flash_attn_func as fa4_func
        from flash_attn.flash_attn_interface import flash_attn_qkvpacked_func

        ours = tandem.flash_attn
        assert flash_attn_func is ours.flash_attn_func
        assert flash_attn_varlen_func is ours.flash_attn_varlen_func
        assert flash_attn_with_kvcache is ours.flash_attn_with_kvcache
        assert flash_attn_qkvpacked_func is ours.flash_attn_qkvpacked_func
        assert (pad_input, unpad_input) == (ours.bert_padding.pad_input, ours.bert_padding.unpad_input)
        assert flash_attn.layers.rotary.RotaryEmbedding is ours.layers.rotary.RotaryEmbedding
        assert cute.flash_attn_func is fa4_func is tandem.fa4.flash_attn_func
        assert flash_attn_interface.flash_attn_func is tandem.fa3.flash_attn_func
        for module in (flash_attn_interface, cute, sys.modules["flash_attn.cute.interface"]):
            assert callable(module.get_scheduler_metadata) and callable(module.flash_attn_combine)
        assert flash_attn.__version__ == "2.8.3"
        assert flash_attn.__name__ == "flash_attn" and ours.__name__ == "tandem.compat.flash_attn"
        for name in NAMES:
            assert importlib.import_module(name).__spec__.name == importlib.util.find_spec(name).name == name
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("flash_attn.losses")


def test_metadata():
    with tandem.patch():
        for name in ("flash_attn", "flash-attn", "Flash.Attn"):
            assert importlib.metadata.version(name) == "2.8.3"
        assert importlib.metadata.version("flash-attn-3") == "3.0.0"
        assert importlib.metadata.version("flash-attn-4") == "4.0.0"
        assert importlib.metadata.version("pytest") == pytest.__version__
        if sys.version_info < (3, 10):
            return
        packages = importlib.metadata.packages_distributions()
        assert {"flash-attn", "flash-attn-4"} <= set(packages["flash_attn"])
        assert "flash-attn-3" in packages["flash_attn_interface"]


@pytest.fixture
def real_flash_attn(monkeypatch):
    """A fake installed and loaded flash_attn, one of whose submodules is blocked."""
    modules = {name: types.ModuleType(name) for name in ("flash_attn", "flash_attn.ops", "flash_attn_interface")}
    modules["flash_attn.losses"] = None
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def test_undo_brings_back_what_was_there(real_flash_attn):
    before = snapshot()
    patch = tandem.patch()
    assert sys.modules["flash_attn"] is not real_flash_attn["flash_attn"]
    assert "flash_attn.ops" not in sys.modules
    sys.modules["flash_attn.later"] = types.ModuleType("flash_attn.later")
    patch.undo()
    assert snapshot() == before
    patch.undo()
    assert snapshot() == before


def test_an_exception_undoes():
    with pytest.raises(ZeroDivisionError), tandem.patch():
        raise ZeroDivisionError
    assert "flash_attn" not in sys.modules


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_nested_patches(real_flash_attn, order):
    patches = [tandem.patch() for _ in range(3)]
    alias = sys.modules["flash_attn"]
    for count, index in enumerate(order):
        assert sys.modules["flash_attn"] is alias, f"undone after {count} of 3"
        patches[index].undo()
        patches[index].undo()
    assert sys.modules["flash_attn"] is real_flash_attn["flash_attn"]


def test_a_program_of_flash_attn_runs():
    with tandem.patch():
        from flash_attn import flash_attn_func

        q = torch.randn(1, 4, 2, 8)
        torch.testing.assert_close(flash_attn_func(q, q, q, causal=True), tandem.attention(q, q, q, causal=True))


@pytest.mark.parametrize("statement", ["import tandem", "import tandem; tandem.patch"])
def test_importing_tandem_patches_nothing_and_needs_no_torch(statement):
    code = f"{statement}; import sys; assert not {{'torch', 'flash_attn', 'flash_attn_interface'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_transformers_finds_the_package():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    checks = transformers.utils.import_utils
    with tandem.patch():
        assert checks._is_package_available("flash_attn", return_version=True) == (True, "2.8.3")
        assert checks._is_package_available("flash_attn_interface")[0]
