"""Import paths: tandem.X and tandem.compat.X are one module object, and the public names do not change."""

import importlib
import importlib.util

import pytest

pytest.importorskip("torch", reason="torch is not installed")

PATHS = (
    "fa3", "fa4", "flash_attn", "flash_attn.bert_padding", "flash_attn.flash_attn_interface", "flash_attn.layers",
    "flash_attn.layers.rotary", "flex", "patch", "ring_flash_attn", "sdpa", "sglang", "torch_context_parallel",
    "transformer_engine", "vllm", "vllm.flash_attn_interface",
)  # fmt: skip


@pytest.mark.parametrize("first", ["tandem", "tandem.compat"])
def test_both_paths_give_one_module(run_python, first):
    second = {"tandem": "tandem.compat", "tandem.compat": "tandem"}[first]
    run_python(f"""
        import importlib, sys
        for path in {PATHS}:
            a = importlib.import_module(f"{first}.{{path}}")
            b = importlib.import_module(f"{second}.{{path}}")
            assert a is b and sys.modules["tandem." + path] is sys.modules["tandem.compat." + path], path
            assert a.__spec__.name == a.__name__ == "tandem.compat." + path, (a.__spec__, a.__name__)
    """)


def test_attributes_and_from_imports_give_the_same_module():
    import tandem
    import tandem.flash_attn.layers.rotary
    from tandem.compat.flash_attn import flash_attn_func
    from tandem.flash_attn.flash_attn_interface import flash_attn_func as same

    assert (
        tandem.flash_attn is tandem.compat.flash_attn and flash_attn_func is same is tandem.flash_attn.flash_attn_func
    )
    assert tandem.flash_attn.layers.rotary is tandem.compat.flash_attn.layers.rotary
    assert tandem.sdpa is tandem.compat.sdpa and tandem.flex_attention is tandem.compat.flex.flex_attention


def test_reload_keeps_the_module():
    import tandem.flash_attn.bert_padding as module

    assert importlib.reload(module) is module


def test_patch_stays_callable_after_its_module_is_imported(run_python):
    run_python("""
        import torch, tandem, tandem.patch
        with tandem.patch():
            import flash_attn
        from tandem.patch import patch, Patch
        patch().undo()
        assert tandem.compat.patch.patch is patch
    """)


def test_a_module_that_does_not_exist_is_not_found():
    assert importlib.util.find_spec("tandem.flash_attn.nothing") is None
    with pytest.raises(ModuleNotFoundError, match=r"tandem\.flash_attn\.nothing"):
        importlib.import_module("tandem.flash_attn.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"tandem\.nothing"):
        importlib.import_module("tandem.nothing")
