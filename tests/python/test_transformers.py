"""attn_implementation="tandem": models with random weights give the results of eager attention, gradients included.

The reference is the same model in float64 with eager attention. An error may be twice the error of eager attention in
float32, plus a few units in the last place.
"""

import inspect
import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from torch.nn import functional as F  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from transformers import masking_utils  # noqa: E402

import tandem  # noqa: E402
import tandem.transformers as adapter  # noqa: E402

VOCABULARY = 83
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.15,  # large scores make attention differ from an average
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
WINDOW = 7


def config_of(name):
    both_kinds = ["sliding_attention", "full_attention"]
    configs = {
        "llama": lambda: transformers.LlamaConfig(**GROUPED),
        "qwen3": lambda: transformers.Qwen3Config(**GROUPED),
        "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=WINDOW),
        "gemma2": lambda: transformers.Gemma2Config(
            **GROUPED, sliding_window=WINDOW, attn_logit_softcapping=5.0, query_pre_attn_scalar=16,
            layer_types=both_kinds,
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **GROUPED, sliding_window=WINDOW, query_pre_attn_scalar=16, layer_types=both_kinds
        ),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **GROUPED, sliding_window=WINDOW, layer_types=both_kinds, num_local_experts=2, num_experts_per_tok=2
        ),
        "bert": lambda: transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        "modernbert": lambda: transformers.ModernBertConfig(
            **{**SIZES, "initializer_cutoff_factor": 1.0},
            local_attention=2 * WINDOW,
            layer_types=["full_attention", "sliding_attention"],
        ),
        "t5": lambda: transformers.T5Config(
            vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0,
            initializer_factor=0.5,
        ),
        "vit": lambda: transformers.ViTConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=24,
            patch_size=4, num_channels=1, num_labels=11, initializer_range=0.15,
        ),
    }  # fmt: skip
    return configs[name]()


CLASSES = {
    "bert": "BertForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
}
DECODERS = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss"]


class InDouble(TorchFunctionMode):
    """A float64 model's casts to float32 (norms, softmax, rotary angles) become casts to float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widened(x):
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(widened, args), **{name: widened(x) for name, x in (kwargs or {}).items()})


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """One thread, because with such small matrices threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_whole_mask(monkeypatch):
    """Fails the test if the whole (batch, 1, seqlen_q, seqlen_k) mask is built."""

    def whole(self):
        raise AssertionError(f"built the whole mask {self}")

    monkeypatch.setattr(adapter.CompactMask, "whole", whole)


class Trio:
    """Builds one model three times, with the same weights: float64 eager, float32 eager, float32 tandem."""

    def __init__(self, name, dtype=torch.float32):
        torch.manual_seed(5)
        config = config_of(name)
        make = getattr(transformers, CLASSES.get(name, "AutoModelForCausalLM"))
        make = getattr(make, "from_config", make)  # an Auto class has no constructor
        config._attn_implementation, config._experts_implementation = "eager", "eager"
        self.plain = make(config).to(dtype).eval()
        with torch.no_grad():  # biases and norms start as constants
            for parameter in self.plain.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        self.ours = self.copy("tandem").to(dtype)
        self.reference = self.copy("eager").double()

    def copy(self, implementation):
        config = type(self.plain.config).from_dict(self.plain.config.to_dict())
        config._attn_implementation, config._experts_implementation = implementation, "eager"
        model = type(self.plain)(config).eval()
        model.load_state_dict(self.plain.state_dict())
        return model

    def each(self, function):
        """Returns function(model) of the three, the reference's first.

        In the reference no value is rounded to float32.
        """
        with InDouble():
            reference = function(self.reference)
        return reference, function(self.plain), function(self.ours)


def assert_within_twice(reference, plain, ours, what, size=None):
    """size: a tensor with the magnitude of the roundings, if the reference does not have it."""
    assert torch.isfinite(ours).all(), what
    error = (ours.double() - reference).abs().max().item()
    bound = 2 * (plain.double() - reference).abs().max().item()
    bound += 8 * torch.finfo(plain.dtype).eps * (reference if size is None else size).abs().max().item()
    assert error <= bound, f"{what}: error {error:.3g}, bound {bound:.3g}"


def assert_all_within_twice(reference, plain, ours):
    assert reference.keys() == plain.keys() == ours.keys()
    for name in reference:
        # A bias of the keys moves all scores of a query equally. The bias's gradient is zero: a sum of terms as large
        # as the query's.
        size = reference.get(name.replace("key.bias", "query.bias").replace("k_proj.bias", "q_proj.bias"))
        assert_within_twice(reference[name], plain[name], ours[name], name, size)


def logits_and_gradients(model, real=None, **inputs):
    """Returns the logits of real tokens and the gradients of a weighted sum of them, by name."""
    model.zero_grad()
    logits = model(**inputs).logits
    if real is not None:
        logits = logits[real]
    generator = torch.Generator().manual_seed(9)
    weights = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    (logits * weights.to(logits.dtype)).sum().backward()
    results = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**results, "logits": logits.detach()}


def check(trio, calls, expected_calls=2, **inputs):
    del calls[:]
    reference, plain, ours = trio.each(lambda model: logits_and_gradients(model, **inputs))
    assert len(calls) == expected_calls
    assert_all_within_twice(reference, plain, ours)


def tokens(batch, seqlen, seed=3):
    return torch.randint(3, VOCABULARY, (batch, seqlen), generator=torch.Generator().manual_seed(seed))


def padding(kind, batch, seqlen):
    """Returns (batch, seqlen) of ones and zeros. The rows have different lengths; the last row is full."""
    lengths = torch.linspace(seqlen // 3, seqlen, batch).long()
    right = (torch.arange(seqlen) < lengths[:, None]).long()
    return right.flip(1) if kind == "left" else right


# ---- Whole models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, "bert", "modernbert"])
def test_model(name, pad, calls, no_whole_mask):
    inputs = {"input_ids": tokens(3, 21)}
    if pad != "none":
        inputs["attention_mask"] = padding(pad, 3, 21)
        inputs["real"] = inputs["attention_mask"].bool()
    check(Trio(name), calls, **inputs)


def test_vision_model(calls):
    image = torch.randn(2, 1, 24, 24, generator=torch.Generator().manual_seed(0))

    def run(model):
        return logits_and_gradients(model, pixel_values=image.to(model.dtype))

    assert_all_within_twice(*Trio("vit").each(run))
    assert len(calls) == 2


@pytest.mark.parametrize("pad", ["none", "left", "right"])
def test_position_bias_and_cross_attention(pad, calls):
    inputs = {"input_ids": tokens(2, 13), "decoder_input_ids": tokens(2, 9, seed=4)}
    if pad != "none":
        inputs["attention_mask"] = padding(pad, 2, 13)
    check(Trio("t5"), calls, expected_calls=6, **inputs)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("batch", [1, 2])
def test_packed_by_positions(name, batch, calls, no_whole_mask):
    lengths = [[11, 1, 9], [4, 17]][:batch]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    # Without use_cache=False transformers treats the rows as single sequences.
    check(Trio(name), calls, input_ids=tokens(batch, 21), position_ids=positions, use_cache=False)
    assert all("cu_seqlens_q" in options for options in calls)


@pytest.mark.parametrize("with_positions", [True, False])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_packed_by_lengths(name, with_positions, calls, no_whole_mask):
    """Returns the keyword arguments of a padding-free data collator. Each sequence must give the same result alone."""
    trio, ids, lengths = Trio(name), tokens(1, 21), [10, 3, 8]
    cu_seqlens = torch.tensor([0, 10, 13, 21])
    by_lengths = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 10, "max_length_k": 10}
    if with_positions:
        by_lengths["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]

    def run(model):
        if model is trio.ours:
            return model(input_ids=ids, use_cache=False, **by_lengths).logits
        return torch.cat([model(input_ids=part).logits for part in ids.split(lengths, 1)], 1)

    with torch.no_grad():
        assert_within_twice(*trio.each(run), "logits")
    assert all("cu_seqlens_q" in options for options in calls)


@pytest.mark.parametrize("kind", ["boolean", "additive", "blocks"])
def test_given_mask(kind, calls):
    """Returns a caller's mask with four dimensions: a prefix that sees itself, followed by a causal part."""
    seqlen = 12
    visible = torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
    visible[:5, :5] = True
    additive = torch.zeros(seqlen, seqlen).masked_fill(~visible, torch.finfo(torch.float32).min)
    trio, ids = Trio("llama"), tokens(2, seqlen)

    def run(model):
        mask = visible if kind == "boolean" and model is trio.ours else additive.to(model.dtype)
        mask = mask[None, None].expand(2, 1, -1, -1)
        if kind == "blocks" and model is trio.ours:
            mask = tandem.create_block_mask(prefix, 2, None, seqlen, seqlen, device="cpu")
        return logits_and_gradients(model, input_ids=ids, attention_mask=mask)

    def prefix(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) | ((q_idx < 5) & (kv_idx < 5))

    assert_all_within_twice(*trio.each(run))
    assert len(calls) == 2 and all(("block_mask" in options) == (kind == "blocks") for options in calls)


def test_image_tokens_see_each_other(calls):
    """Gemma-3's masks for images: causal, but all tokens of an image block see each other."""
    trio, ids = Trio("gemma3"), tokens(2, 19)
    blocks = torch.full((2, 19), -1)
    blocks[0, 3:9], blocks[1, 5:7], blocks[1, 11:18] = 0, 0, 1

    def run(model):
        masks = masking_utils.create_masks_for_generate(
            model.config, torch.empty(2, 19, 0, dtype=model.dtype), None, None, block_sequence_ids=blocks
        )
        return logits_and_gradients(model, input_ids=ids, attention_mask=masks)

    assert_all_within_twice(*trio.each(run))
    assert len(calls) == 2 and all("bias" in options for options in calls)


def test_bfloat16(calls):
    trio = Trio("llama", torch.bfloat16)
    assert_all_within_twice(*trio.each(lambda model: logits_and_gradients(model, input_ids=tokens(2, 24))))
    assert len(calls) == 2


def test_gradient_checkpointing(calls):
    model, ids, mask = Trio("mistral").ours.train(), tokens(2, 15), padding("left", 2, 15)
    kept = logits_and_gradients(model, input_ids=ids, attention_mask=mask)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its name before 5.23
    again = logits_and_gradients(model, input_ids=ids, attention_mask=mask)
    for name in kept:
        assert torch.equal(kept[name], again[name]), name
    assert len(calls) == 2 + 4


def test_dropout_follows_torchs_generator():
    model = Trio("llama").ours.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5

    def run(seed):
        torch.manual_seed(seed)
        return model(input_ids=tokens(1, 16)).logits.detach()

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_compiled(calls):
    """The model compiles to one graph without a break, and the graph contains the operator."""
    model, ids, mask = Trio("mistral").ours, tokens(2, 15), padding("left", 2, 15)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        got = compiled(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()])


# ---- Generation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_generate(name, cache, calls):
    """Greedy tokens equal eager attention's, beyond the window; the batch is left-padded."""
    trio, steps = Trio(name), 14
    ids, mask = tokens(2, 9), padding("left", 2, 9)
    ids = ids * mask

    def run(model):
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, min_new_tokens=steps, max_new_tokens=steps,
            cache_implementation=cache, disable_compile=True, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        return out.sequences, torch.stack(out.logits)

    with torch.no_grad():
        reference, plain, ours = trio.each(run)
    assert torch.equal(ours[0], plain[0]) and torch.equal(ours[0], reference[0])
    for step in range(steps):
        assert_within_twice(reference[1][step], plain[1][step], ours[1][step], f"step {step}")
    assert len(calls) == 2 * steps


@pytest.mark.parametrize("pad", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_pieces_with_cache(name, cache, pad, calls):
    """A prompt in pieces of several tokens, as in a conversation, followed by a single token."""
    trio, ids = Trio(name), tokens(2, 24)
    mask = padding(pad, 2, 24) if pad != "none" else None

    def run(model):
        if cache == "dynamic":
            past = transformers.DynamicCache(config=model.config)
        else:
            past = transformers.StaticCache(config=model.config, max_cache_len=40)
        pieces, start = [], 0
        for end in (6, 11, 12, 24):
            seen = mask[:, :end] if mask is not None else None
            positions = torch.arange(start, end)[None].expand(2, -1)
            kept = {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": past}
            out = model(input_ids=ids[:, start:end], attention_mask=seen, position_ids=positions, **kept)
            pieces.append(out.logits)
            start = end
        logits = torch.cat(pieces, 1)
        return logits if mask is None else logits[mask.bool()]

    with torch.no_grad():
        assert_within_twice(*trio.each(run), "logits")
    assert len(calls) == 2 * 4


# ---- Masks alone, in float64, compared with transformers' arrays -----------------------------------------------------


def _custom(batch_idx, head_idx, q_idx, kv_idx):
    return (kv_idx < 4) & (q_idx >= 0)


def _patterns():
    m = masking_utils
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1]]).expand(3, -1)
    left = torch.tensor([0, 2, 5])
    # name: mask function, True if options can express it
    return {
        "causal": (m.causal_mask_function, True),
        "window": (m.sliding_window_causal_mask_function(4), True),
        "window of all but one": (m.sliding_window_causal_mask_function(15), True),
        "wide window": (m.sliding_window_causal_mask_function(100), True),
        "bidirectional": (m.bidirectional_mask_function, True),
        "bidirectional window": (m.sliding_window_bidirectional_mask_function(3), True),
        "chunks": (m.chunked_causal_mask_function(5, left), False),
        "prefix": (m.or_masks(m.causal_mask_function, _custom), False),
        "blocks": (m.or_masks(m.causal_mask_function, m.blockwise_overlay(blocks)), False),
    }


# q_length, kv_length, q_offset, kv_offset, end of the padding mask
_PLACES = {
    "prefill": (16, 16, 0, 0, 16),
    "piece": (5, 16, 11, 0, 16),
    "decode": (1, 16, 15, 0, 16),
    "first token": (1, 1, 0, 0, 1),
    "full sliding cache": (3, 6, 13, 10, 16),
    "static prefill": (7, 16, torch.tensor(0), 0, 7),
    "static piece": (4, 16, torch.tensor(5), 0, 9),
    "static decode": (1, 16, torch.tensor(5), 0, 6),
}


@pytest.mark.parametrize("pad", ["none", "ones", "left", "right", "holes"])
@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("pattern", _patterns())
def test_mask(pattern, place, pad):
    batch, heads, head_dim = 3, 4, 8
    q_length, kv_length, q_offset, kv_offset, reach = _PLACES[place]
    mask_function, compact = _patterns()[pattern]
    if pattern == "bidirectional window" and place.startswith("static"):
        compact = False  # the diagonal would end before the last visible key
    attention_mask = None
    if pad == "ones":
        attention_mask = torch.ones(batch, reach, dtype=torch.bool)
    elif pad in ("left", "right"):
        attention_mask = padding(pad, batch, reach).bool()
    elif pad == "holes":
        attention_mask = torch.rand(batch, reach, generator=torch.Generator().manual_seed(1)) < 0.6
        attention_mask[-1] = True
    arguments = {
        "batch_size": batch, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": mask_function, "attention_mask": attention_mask, "allow_is_causal_skip": False,
    }  # fmt: skip
    whole = masking_utils.sdpa_mask(**arguments).expand(batch, 1, q_length, kv_length)
    mask = adapter.tandem_mask(**arguments)
    assert (type(mask) is adapter.CompactMask) == compact
    if compact and "bias" in mask.options:
        assert mask.options["bias"].shape == (batch, 1, 1, kv_length)
    causal = pattern in ("causal", "window", "window of all but one", "wide window")
    skippable = adapter.tandem_mask(**{**arguments, "allow_is_causal_skip": causal,
                                       "allow_is_bidirectional_skip": not causal and compact})  # fmt: skip

    generator = torch.Generator().manual_seed(2)
    q = torch.randn(batch, heads, q_length, head_dim, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, batch, 2, kv_length, head_dim, dtype=torch.float64, generator=generator)
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3) / math.sqrt(head_dim)).masked_fill(~whole, -torch.inf)
    expected = (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2)
    real = whole.any(-1).squeeze(1)  # a query without visible keys is padding
    if attention_mask is not None and q_length > 1:
        at = torch.arange(q_length) + int(q_offset)
        real &= attention_mask[:, at]
    module = torch.nn.Module()
    module.is_causal = causal
    for form in (mask, skippable):
        out, weights = adapter.tandem_attention(module, q, k, v, form)
        assert weights is None and out.shape == expected.shape and torch.isfinite(out).all()
        torch.testing.assert_close(out[real], expected[real], rtol=1e-12, atol=1e-13)


def attend(q, k, v, bias):
    return ((q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + bias).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("lengths", [(6, 6), (3, 8), (1, 8)])
@pytest.mark.parametrize("causal", [True, False])
def test_no_mask(causal, lengths):
    """As with sdpa, the first query matches the first key (the prompt in a static cache), and a single query sees all
    keys.
    """
    module = torch.nn.Module()
    module.is_causal = causal
    q, k = (torch.randn(2, 2, n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in lengths)
    hidden = torch.ones(lengths).triu(1).bool() if causal and lengths[0] > 1 else torch.zeros(lengths).bool()
    expected = attend(q, k, k, torch.zeros(lengths, dtype=torch.float64).masked_fill(hidden, -torch.inf))
    torch.testing.assert_close(adapter.tandem_attention(module, q, k, k, None)[0], expected)
    # The argument overrides the module's attribute.
    module.is_causal = not causal
    torch.testing.assert_close(adapter.tandem_attention(module, q, k, k, None, is_causal=causal)[0], expected)


@pytest.mark.parametrize("kind", ["none", "boolean", "additive", "padding", "packed"])
def test_position_bias(kind):
    """A bias like T5's, in a layout whose last dimension is not contiguous, with every form of mask."""
    seqlen, hide = 7, masking_utils.causal_mask_function
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(2, 3, seqlen, 8, dtype=torch.float64, generator=generator)
    position_bias = torch.randn(seqlen, seqlen, 3, dtype=torch.float64, generator=generator).permute(2, 0, 1)[None]
    position_bias.requires_grad_()
    visible = torch.ones(2, 1, seqlen, seqlen, dtype=torch.bool).tril()
    padded = None
    if kind == "padding":
        padded = torch.tensor([[True] * seqlen, [True] * 3 + [False] + [True] * 3])
        visible = visible & padded[:, None, None, :]
    elif kind == "packed":
        segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])
        hide = masking_utils.and_masks(hide, masking_utils.packed_sequence_mask_function(segments))
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    additive = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    mask = {"none": None, "boolean": visible, "additive": additive}.get(kind)
    if kind in ("padding", "packed"):
        mask = adapter.tandem_mask(2, seqlen, seqlen, mask_function=hide, attention_mask=padded)
        assert mask.options.keys() & {"bias", "cu_seqlens_q"}
    expected = attend(q, q, q, additive + position_bias)
    out, _ = adapter.tandem_attention(torch.nn.Module(), q, q, q, mask, position_bias=position_bias)
    torch.testing.assert_close(out, expected)
    (got,) = torch.autograd.grad(out.square().sum(), position_bias)
    (wanted,) = torch.autograd.grad(expected.square().sum(), position_bias)
    torch.testing.assert_close(got, wanted)


def test_compact_mask_is_the_array_it_stands_for():
    def new():
        return adapter.tandem_mask(batch_size=2, q_length=5, kv_length=5, attention_mask=padding("left", 2, 5).bool())

    whole = masking_utils.sdpa_mask(batch_size=2, q_length=5, kv_length=5, attention_mask=padding("left", 2, 5).bool())
    assert type(new()) is adapter.CompactMask
    assert new().shape == whole.shape and new().dtype == torch.bool
    assert torch.equal(new() & True, whole)
    assert torch.equal(new()[:, :, 1:3, :4], whole[:, :, 1:3, :4])
    assert torch.equal(torch.cat([new(), new()], -1), torch.cat([whole, whole], -1))
    assert torch.equal(torch.where(new(), 0.0, -1.0), torch.where(whole, 0.0, -1.0))

    # A change of the numbers in the array takes effect.
    mask, q = new(), torch.randn(2, 1, 5, 4, dtype=torch.float64)
    mask[:, :, 4, 4] = False
    changed = whole.clone()
    changed[:, :, 4, 4] = False
    out, _ = adapter.tandem_attention(torch.nn.Module(), q, q, q, mask)
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=changed).transpose(1, 2)
    torch.testing.assert_close(out[:, 4], expected[:, 4])


def test_mask_for_other_lengths_is_refused():
    mask = adapter.tandem_mask(batch_size=1, q_length=5, kv_length=5, mask_function=masking_utils.causal_mask_function,
                               allow_is_causal_skip=False)  # fmt: skip
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match="attention_mask.seqlen_k"):
        adapter.tandem_attention(torch.nn.Module(), q, k, k, mask)


def test_what_is_not_served():
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(tandem.Unsupported, match="cache"):
        adapter.tandem_attention(torch.nn.Module(), q, q, q, None, cache=object())
    cu_seqlens = {"cu_seq_lens_q": torch.tensor([0, 5]), "cu_seq_lens_k": torch.tensor([0, 5])}
    with pytest.raises(tandem.Unsupported, match="position_bias"):
        adapter.tandem_attention(torch.nn.Module(), q, q, q, None, position_bias=torch.zeros(1, 2, 5, 5), **cu_seqlens)


def test_weights_are_not_returned():
    assert all(x is None for x in Trio("llama").ours(input_ids=tokens(1, 6), output_attentions=True).attentions or [])


def test_mask_arrays_keep_the_offset_of_their_creation():
    """A static cache increments its offset in place."""
    offset = torch.tensor(5)
    mask = tandem.transformers.tandem_mask(1, 4, 16, q_offset=offset)
    offset += 4
    expected = masking_utils.sdpa_mask(1, 4, 16, q_offset=5, allow_is_causal_skip=False)
    assert torch.equal(mask.whole(), expected)
