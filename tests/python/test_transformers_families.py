"""attn_implementation="tandem" for families of models: every layer calls it with correct results, or the model is
refused by name.
"""

import copy
import inspect

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from torch import nn  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

import tandem  # noqa: E402
import tandem.transformers  # noqa: E402

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
PAIR = {
    "vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
}  # fmt: skip
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# Family: the auto class, the configuration's class, its arguments, and the attention calls of one forward pass.
SERVED = {
    "llama": (AutoModelForCausalLM, "LlamaConfig", GROUPED, 2),
    "mistral": (AutoModelForCausalLM, "MistralConfig", {**GROUPED, "sliding_window": 4}, 2),
    "qwen2": (AutoModelForCausalLM, "Qwen2Config", GROUPED, 2),
    "qwen3": (AutoModelForCausalLM, "Qwen3Config", {**GROUPED, "head_dim": 8}, 2),
    "gemma": (AutoModelForCausalLM, "GemmaConfig", {**GROUPED, "head_dim": 8}, 2),
    "phi": (AutoModelForCausalLM, "PhiConfig", SIZES, 2),
    "phi3": (AutoModelForCausalLM, "Phi3Config", {**GROUPED, **ENDS}, 2),
    "olmo2": (AutoModelForCausalLM, "Olmo2Config", {**GROUPED, **ENDS}, 2),
    "granite": (AutoModelForCausalLM, "GraniteConfig", GROUPED, 2),
    "starcoder2": (AutoModelForCausalLM, "Starcoder2Config", {**GROUPED, **ENDS}, 2),
    "cohere": (AutoModelForCausalLM, "CohereConfig", {**GROUPED, **ENDS}, 2),
    "gpt2": (AutoModelForCausalLM, "GPT2Config", {**GPT2, **ENDS}, 2),
    "gpt_neox": (AutoModelForCausalLM, "GPTNeoXConfig", {**SIZES, **ENDS}, 2),
    "opt": (AutoModelForCausalLM, "OPTConfig", {
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"}, "ffn_dim": 48,
        "word_embed_proj_dim": 32, **ENDS,
    }, 2),
    "bert": (AutoModel, "BertConfig", SIZES, 2),
    "roberta": (AutoModel, "RobertaConfig", {**SIZES, "pad_token_id": 1}, 2),
    "xlm_roberta": (AutoModel, "XLMRobertaConfig", {**SIZES, "pad_token_id": 1}, 2),
    "electra": (AutoModel, "ElectraConfig", {**SIZES, "embedding_size": 32}, 2),
    "albert": (AutoModel, "AlbertConfig", {**SIZES, "embedding_size": 16}, 2),
    "distilbert": (AutoModel, "DistilBertConfig", {
        "vocab_size": 61, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64,
    }, 2),
    "bart": (AutoModel, "BartConfig", {**PAIR, **ENDS}, 6),
    "t5": (AutoModel, "T5Config", {
        "vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0,
    }, 6),
}  # fmt: skip
REFUSED = {
    "bloom": (AutoModelForCausalLM, "BloomConfig", {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": (AutoModelForCausalLM, "FalconConfig", {k: v for k, v in SIZES.items() if k != "intermediate_size"}),
    "gpt_neo": (AutoModelForCausalLM, "GPTNeoConfig", {
        "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]],
    }),
    "mpt": (AutoModelForCausalLM, "MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 61}),
    "mpnet": (AutoModel, "MPNetConfig", SIZES),
    "squeezebert": (AutoModel, "SqueezeBertConfig", {**SIZES, "embedding_size": 32}),
    "xlnet": (AutoModel, "XLNetConfig", {"vocab_size": 61, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    "deberta": (AutoModel, "DebertaV2Config", SIZES),
}  # fmt: skip


def made(auto, config, arguments, implementation):
    config = getattr(transformers, config)(**copy.deepcopy(arguments))
    torch.manual_seed(0)
    return auto.from_config(config, attn_implementation=implementation).eval()


def outputs(model, ids, mask):
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :4]
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize("family", SERVED)
def test_a_family_is_served_in_every_layer(family, calls):
    *kind, count = SERVED[family]
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    if family in ("roberta", "xlm_roberta"):
        ids = ids.masked_fill(mask == 0, 1)
    eager, ours = made(*kind, "eager"), made(*kind, "tandem")
    ours.load_state_dict(eager.state_dict())
    expected, got = outputs(eager, ids, mask), outputs(ours, ids, mask)
    seen = mask.bool() if got.shape[1] == 9 else slice(None)
    torch.testing.assert_close(got[seen], expected[seen], rtol=1e-4, atol=1e-5)
    assert len(calls) == count


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_never_calls_the_interface_is_refused(family):
    with pytest.raises(
        tandem.Unsupported, match=r'attn_implementation \("tandem"\) must be another for \w+, because its \w+'
    ):
        made(*REFUSED[family], "tandem")
    made(*REFUSED[family], "eager")


# ---- Classes that transformers does not know -------------------------------------------------------------------------


class OwnConfig(transformers.PretrainedConfig):
    model_type = "own"
    hidden_size = 8


class OwnSelfMixer(nn.Module):
    """An attention with another class name, with the operator @ and a module for the softmax."""

    def __init__(self):
        super().__init__()
        self.normalise = nn.Softmax(dim=-1)

    def forward(self, x, mask):
        return self.weights(x, mask) @ x

    def weights(self, x, mask):
        return torch.nn.functional.softmax(x @ x.transpose(1, 2) + (0 if mask is None else mask), dim=-1)


class Dispatching(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.is_causal = config, False

    def forward(self, x, mask):
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(self, x[:, None], x[:, None], x[:, None], mask)[0][:, :, 0]


class Pooling(nn.Module):
    """An attention without a mask that does not use the interface."""

    def forward(self, x):
        return torch.softmax(x @ x.transpose(1, 2), -1) @ x


class OwnBase(transformers.PreTrainedModel):
    config_class = OwnConfig
    says_it_is_whole = True

    def __init__(self, config):
        super().__init__(config)
        self.parts = nn.ModuleList(part(config) if part is Dispatching else part() for part in self.kinds)
        if self.says_it_is_whole:
            self.post_init()

    def forward(self, x):
        for part in self.parts:
            x = part(x) if isinstance(part, Pooling) else part(x, None)
        return x


def model_of(*parts, whole=True):
    class Own(OwnBase):
        kinds, says_it_is_whole = parts, whole

    return lambda: Own._from_config(OwnConfig(), attn_implementation="tandem").eval()


def test_unknown_classes_are_judged_by_their_code(calls):
    x = torch.randn(1, 5, 8)
    assert model_of(Dispatching)()(x).shape == x.shape and len(calls) == 1
    assert model_of(Dispatching, Pooling)()(x).shape == x.shape
    for parts in ((OwnSelfMixer,), (Dispatching, OwnSelfMixer)):
        with pytest.raises(tandem.Unsupported, match="its OwnSelfMixer does not call"):
            model_of(*parts)()
        model = model_of(*parts, whole=False)()  # the class never calls post_init: its first call is refused
        with pytest.raises(tandem.Unsupported, match="its OwnSelfMixer does not call"):
            model(x)


def test_an_implementation_set_later_is_checked():
    model = made(*REFUSED["bloom"], "eager")
    try:
        model.set_attn_implementation("tandem")
    except tandem.Unsupported:
        pass
    assert model.config._attn_implementation == "eager"
    served = made(*SERVED["llama"][:3], "eager")
    served.set_attn_implementation("tandem")
    assert served.config._attn_implementation == "tandem"


# ---- Documents packed by position_ids -----------------------------------------------------------------------------

LENGTHS = [5, 9, 3]
FIRST = {"xlm_roberta": 2, "roberta": 2}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", ["bert", "roberta", "xlm_roberta", "electra", "opt", "llama"])
def test_packed_documents_do_not_see_each_other(family, compiled):
    if compiled and family not in ("bert", "opt"):
        pytest.skip("two of them show it")
    *kind, _ = SERVED[family]
    first = FIRST.get(family, 0)
    eager, ours = made(*kind, "eager"), made(*kind, "tandem")
    ours.load_state_dict(eager.state_dict())
    ids = torch.randint(3, 61, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(first, first + n) for n in LENGTHS])[None]
    call = torch.compile(ours, backend="eager") if compiled else ours
    with torch.no_grad():
        alone = [
            eager(input_ids=x, position_ids=torch.arange(first, first + x.shape[1])[None])[0]
            for x in ids.split(LENGTHS, 1)
        ]
        torch.testing.assert_close(
            call(input_ids=ids, position_ids=positions)[0], torch.cat(alone, 1), rtol=1e-4, atol=1e-5
        )
        one = torch.arange(first, first + ids.shape[1])[None]
        whole = eager(input_ids=ids, position_ids=one)[0]
        torch.testing.assert_close(call(input_ids=ids, position_ids=one)[0], whole, rtol=1e-4, atol=1e-5)


def test_packed_rows_of_a_batch_and_gradients():
    *kind, _ = SERVED["bert"]
    eager, ours = (made(*kind, name) for name in ("eager", "tandem"))
    ours.load_state_dict(eager.state_dict())
    ids = torch.randint(3, 61, (2, 8), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5]])
    got = ours(input_ids=ids, position_ids=positions)[0]
    pieces = [(0, 0, 3), (0, 3, 8), (1, 0, 2), (1, 2, 8)]
    alone = [eager(input_ids=ids[b : b + 1, i:j], position_ids=positions[b : b + 1, i:j])[0] for b, i, j in pieces]
    expected = torch.stack([torch.cat(alone[:2], 1)[0], torch.cat(alone[2:], 1)[0]])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    gradients = [
        torch.autograd.grad(x.square().sum(), m.get_input_embeddings().weight)[0]
        for x, m in ((got, ours), (expected, eager))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    positions[0, 3:] = torch.arange(3, 8)  # an in-place write, which must be read again
    changed = ours(input_ids=ids, position_ids=positions)[0]
    assert not torch.allclose(changed[0], got[0]) and torch.allclose(changed[1], got[1], atol=1e-5)


def windowed(kind):
    """Returns a model with a window (Llama: without one), in eager and in Tandem's attention, and ids of documents."""
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    if kind != "Llama":
        sizes["sliding_window"] = 4
    if kind == "Qwen2":
        sizes.update(use_sliding_window=True, max_window_layers=1)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    eager = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="tandem").eval()
    ours.load_state_dict(eager.state_dict())
    ids = torch.randint(3, 61, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    return eager, ours, ids


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda model: torch.compile(model, backend="eager")
    torch._dynamo.reset()


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize(
    ("kind", "mode"), [("Mistral", "eager"), ("Gemma2", "eager"), ("Qwen2", "eager"), ("Gemma2", "compiled")]
)
def test_windowed_layers_separate_packed_documents_as_other_layers_do(kind, cached, mode, compiled):
    eager, ours, ids = windowed(kind)
    call = ours if mode == "eager" else compiled(ours)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        alone = torch.cat([eager(input_ids=x).logits for x in ids.split(LENGTHS, 1)], 1)
        together = eager(input_ids=ids).logits
        for mask in (None, torch.ones_like(ids)):
            got = call(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=cached).logits
            torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-5)
        got = call(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=cached).logits
        torch.testing.assert_close(got, together, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", [transformers.DynamicCache, transformers.StaticCache])
@pytest.mark.parametrize(("kind", "mode"), [("Llama", "eager"), ("Gemma2", "eager"), ("Gemma2", "compiled")])
@pytest.mark.parametrize("cut", [0, 3], ids=["whole", "in two pieces"])
def test_documents_behind_a_cache_do_not_see_each_other(kind, cache, mode, cut, compiled):
    """The second piece continues the first document, which is in the cache, and begins the other documents."""
    eager, ours, ids = windowed(kind)
    call = ours if mode == "eager" else compiled(ours)
    packed = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    name = "cache" if "cache" in inspect.signature(ours.forward).parameters else "past_key_values"
    with torch.no_grad():
        alone = torch.cat([eager(input_ids=x).logits for x in ids.split(LENGTHS, 1)], 1)
        together = eager(input_ids=ids).logits
        for positions, expected in ((packed, alone), (torch.arange(ids.shape[1])[None], together)):
            sizes = {"max_cache_len": 40} if cache is transformers.StaticCache else {}
            past, pieces = cache(config=ours.config, **sizes), (slice(0, cut), slice(cut, None))
            got = [
                call(input_ids=ids[:, x], position_ids=positions[:, x], **{name: past}).logits
                for x in pieces[cut == 0 :]
            ]
            torch.testing.assert_close(torch.cat(got, 1), expected, rtol=1e-4, atol=1e-5)


def test_compiled_generation_of_padded_prompts(compiled):
    from transformers.generation.configuration_utils import CompileConfig

    eager, ours, ids = windowed("Gemma2")
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {
        "attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 60,
        "return_dict_in_generate": True, "output_logits": True, "cache_implementation": "static",
    }  # fmt: skip
    expected = eager.generate(ids, disable_compile=True, **options).logits
    on_cpu = CompileConfig(backend="eager", fullgraph=False, mode=None)
    on_cpu._compile_all_devices = True
    for pieces in ({}, {"prefill_chunk_size": 6}):
        got = ours.generate(ids, compile_config=on_cpu, **options, **pieces).logits
        torch.testing.assert_close(torch.stack(got), torch.stack(expected), rtol=1e-4, atol=1e-5)
