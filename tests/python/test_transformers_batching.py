"""Continuous batching of transformers with attn_implementation="tandem". A request has the same tokens as alone."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", minversion="5.20", reason="transformers has no such batching")

from transformers import GenerationConfig  # noqa: E402

import tandem  # noqa: E402
import tandem.transformers as adapter  # noqa: E402

PROMPTS = [[1, 2, 3], list(range(4, 25)), [25], [9] * 12]
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 256, "head_dim": 8,
}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "windows": transformers.Gemma2Config(**SIZES, sliding_window=8, query_pre_attn_scalar=8),
    "sinks": transformers.GptOssConfig(**SIZES, sliding_window=8, num_local_experts=2, num_experts_per_tok=1),
}


def batching_config(**options):
    sizes = {"num_blocks": 40, "max_batch_tokens": 16, "auto_switch_to_flash": False}
    return transformers.generation.ContinuousBatchingConfig(**{**sizes, **options})


@pytest.mark.parametrize("name", CONFIGS)
def test_a_request_has_the_same_tokens_as_alone(name, calls):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="tandem").eval()
    generation = GenerationConfig(max_new_tokens=7, do_sample=False, eos_token_id=49, pad_token_id=0)
    model.generation_config.eos_token_id = 49
    with torch.no_grad():
        alone = [model.generate(torch.tensor([p]), generation_config=generation)[0, len(p) :] for p in PROMPTS]
    calls.clear()
    outputs = model.generate_batch(
        PROMPTS, generation_config=generation, continuous_batching_config=batching_config(), progress_bar=False
    )
    found = sorted(outputs.values(), key=lambda x: PROMPTS.index(list(x.prompt_ids)))
    assert model.config._attn_implementation == "tandem"
    for output, expected in zip(found, alone):
        assert output.error is None and output.generated_tokens == expected.tolist()
    packed = [x for x in calls if x.get("cu_seqlens_q") is not None]
    assert packed and all(x["causal"] and "alignment" not in x for x in packed)
    assert any(x["max_seqlen_q"] < x["max_seqlen_k"] for x in packed), "decodes read the cache"


def test_block_tables_are_refused():
    q = torch.randn(1, 2, 3, 8)
    lengths = {"cu_seq_lens_q": torch.tensor([0, 3]), "cu_seq_lens_k": torch.tensor([0, 3])}
    with pytest.raises(tandem.Unsupported, match="block_table"):
        adapter.tandem_attention(
            torch.nn.Module(), q, q, q, None, read_index=torch.arange(3), block_table=torch.zeros(1, 1), **lengths
        )
