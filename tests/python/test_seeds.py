"""Seeds of dropout in every form: numbers, pairs, arrays of numpy and tensors of torch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import tandem  # noqa: E402

Q = torch.randn(1, 6, 2, 8, generator=torch.Generator().manual_seed(0))
SEEDS = {
    "list": [1, 2],
    "array": np.array([1, 2]),
    "strided array": np.array([1, 9, 2])[::2],
    "unsigned array": np.array([1, 2], np.uint64),
    "tensor": torch.tensor([1, 2]),
    "strided tensor": torch.tensor([1, 9, 2])[::2],
    "flipped tensor": torch.tensor([2, 1]).flip(0),
}
BAD = {
    "floats": torch.tensor([1.0, 2.0], dtype=torch.float64),
    "array of floats": np.array([1.0, 2.0]),
    "32 bits": torch.tensor([1, 2], dtype=torch.int32),
    "one": torch.tensor([1]),
    "number": torch.tensor(1),
    "another device": torch.tensor([1, 2], device="meta"),
}


@pytest.mark.parametrize("kind", SEEDS)
def test_all_forms_drop_the_same_entries(kind):
    expected = tandem.attention(Q, Q, Q, dropout_p=0.5, seed=(1, 2))
    assert torch.equal(tandem.attention(Q, Q, Q, dropout_p=0.5, seed=SEEDS[kind]), expected)
    if "tensor" not in kind:
        q = Q.numpy()
        assert np.array_equal(tandem.attention(q, q, q, dropout_p=0.5, seed=SEEDS[kind]), expected.numpy())


@pytest.mark.parametrize("kind", BAD)
def test_other_arrays_are_refused(kind):
    out, lse = tandem.attention(Q, Q, Q, return_lse=True)
    with pytest.raises(ValueError, match="^seed"):
        tandem.attention(Q, Q, Q, dropout_p=0.5, seed=BAD[kind])
    with pytest.raises(ValueError, match="^seed"):
        tandem.attention_backward(Q, Q, Q, Q, out, lse, dropout_p=0.5, seed=BAD[kind])
    if isinstance(BAD[kind], torch.Tensor) and kind != "another device":
        with pytest.raises(ValueError, match="^seed"):
            torch.ops.tandem.forward(Q, Q, Q, seed=BAD[kind], dropout_p=0.5)


def test_operators_refuse_seeds_with_gaps():
    with pytest.raises(ValueError, match="^seed .shape .2,., strides .2,."):
        torch.ops.tandem.forward(Q, Q, Q, seed=SEEDS["strided tensor"], dropout_p=0.5)


def test_a_backward_repeats_the_forward_after_a_write_to_the_seed():
    def gradient(seed, writes):
        q = Q.clone().requires_grad_()
        out = tandem.attention(q, Q, Q, dropout_p=0.5, seed=seed)
        if writes:
            seed[:] = 7
        return torch.autograd.grad(out.sum(), q)[0]

    expected = gradient(np.array([1, 2]), writes=False)
    assert torch.equal(gradient(np.array([1, 2]), writes=True), expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(torch.tensor([1, 2]), writes=True)
