"""Functions and block masks that are easily misread. Each gives torch's result, or is refused by name."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import flex_attention as theirs  # noqa: E402

import tandem  # noqa: E402
from tandem._trace import trace  # noqa: E402
from tandem.flex import BlockMask, mask_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
LENGTH = 24


def tensors(*shape, count=3, **options):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape or (2, 4, LENGTH, 8), generator=generator, **options) for _ in range(count)]


def reference(q, k, v, score_mod=None, mask=None):
    """Computes attention by torch's operations, with score_mod mapped over all scores."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if score_mod is not None:
        for dims in (
            (0, None, None, None, 0),
            (0, None, None, 0, None),
            (0, None, 0, None, None),
            (0, 0, None, None, None),
        ):
            score_mod = torch.vmap(score_mod, in_dims=dims)
        scores = score_mod(scores, *(torch.arange(n) for n in scores.shape))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


def seen(block_mask, mask_mod):
    """Returns the visible keys of a BlockMask, (batch, heads, LENGTH, LENGTH), from its lists."""
    partial = listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    if mask_mod is not None:
        i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
        partial = partial & mask_mod(0, 0, i, j)
    if block_mask.full_kv_num_blocks is not None:
        partial = partial | listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return partial


def listed(counts, indices):
    mask = torch.zeros(*counts.shape[:2], LENGTH, LENGTH, dtype=torch.bool)
    for place in [(b, h, row) for b in range(counts.shape[0]) for h in range(counts.shape[1]) for row in range(3)]:
        for column in indices[place][: int(counts[place])].tolist():
            b, h, row = place
            mask[b, h, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = True
    return mask


T = torch.linspace(-1, 1, 4 * LENGTH).reshape(4, LENGTH)
ROWS, KEYS = tensors(2, 4, LENGTH, 5, count=2)
MEANS = torch.randn(LENGTH, 3, generator=torch.Generator().manual_seed(1))
SMALL = torch.arange(LENGTH, dtype=torch.uint8) * 11
SIGNED = torch.arange(-LENGTH // 2, LENGTH // 2, dtype=torch.int8) * 10
LISTED = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(n))[:3] for n in range(6)])
ENDS = [*range(3, LENGTH, 3), *range(100, 140), LENGTH]

SCORES = {
    "sin and cos": lambda s, b, h, i, j: torch.sin(torch.cos(s * 3)) + (i * 0.1).sin(),
    "tan": lambda s, b, h, i, j: torch.tan(s * 0.2),
    "gelu": lambda s, b, h, i, j: F.gelu(s) + F.gelu(s, approximate="tanh"),
    "softplus": lambda s, b, h, i, j: F.softplus(s) + F.softplus(s, beta=2.0, threshold=1.0),
    "erf": lambda s, b, h, i, j: torch.erf(s) - torch.special.erfc(s),
    "log1p and expm1": lambda s, b, h, i, j: torch.log1p(s * s) + torch.special.expm1(s * 0.3),
    "other activations": lambda s, b, h, i, j: F.elu(s) + F.leaky_relu(s) + F.logsigmoid(s) + F.mish(s) + F.relu6(s),
    "log10": lambda s, b, h, i, j: (s * s + 1).log10(),
    "powers": lambda s, b, h, i, j: (s * s + 1) ** -0.5 + s.abs() ** 1.5 + (s * s + 1) ** 0.3 + s**0 + s**3,
    "power of a tensor": lambda s, b, h, i, j: (s * s + 0.5) ** T[h, i] + (s.abs() + 0.5) ** (h - 1.0),
    "power of a negative": lambda s, b, h, i, j: torch.pow(s, 3.0) + torch.pow(-2.0 - s.abs(), h.float()),
    "dot": lambda s, b, h, i, j: s + 0.5 * torch.dot(ROWS[b, h, i], KEYS[b, h, j]),
    "matmul": lambda s, b, h, i, j: s + ROWS[b, h, i] @ KEYS[b, h, j],
    "sum of a product": lambda s, b, h, i, j: s + (ROWS[b, h, i] * KEYS[b, h, j]).sum(-1),
    "distance of rows": lambda s, b, h, i, j: torch.exp(-(MEANS[i] - MEANS[j]).pow(2).sum(-1).sqrt()) * s,
    "norm": lambda s, b, h, i, j: s - torch.linalg.vector_norm(MEANS[i] + 1) - MEANS[j].norm(),
    "extremes": lambda s, b, h, i, j: s + MEANS[i].amax() - MEANS[j].min(-1).values + MEANS[i].max() + MEANS[j].mean(0),
    "stack": lambda s, b, h, i, j: torch.stack([s, s * 2, T[h, i]]).sum() + torch.stack([s, T[h, j]]).amax(0),
    "rows iterate": lambda s, b, h, i, j: s + sum(x * n for n, x in enumerate(MEANS[i])) + MEANS[i][1] + len(MEANS[j]),
    "is_tensor": lambda s, b, h, i, j: s * 2 if torch.is_tensor(s) else s * 3,
    "isinstance": lambda s, b, h, i, j: s * 2 if isinstance(i, torch.Tensor) and isinstance(T[h], torch.Tensor) else s,
    "dtype and dim": lambda s, b, h, i, j: s + (1.0 if s.dtype.is_floating_point and s.dim() == 0 else 2.0),
    "unsigned wrap": lambda s, b, h, i, j: s + (i - j).to(torch.uint8) * 0.01 + (i - j).byte() * 0.01,
    "signed wrap": lambda s, b, h, i, j: s + (i * 7 - j * 11).to(torch.int8) * 0.01 + (i * 3000).short() * 1e-4,
    "narrow tables": lambda s, b, h, i, j: s + (SMALL[i] - SMALL[j]) * 0.01 + (SIGNED[i] + SIGNED[j]) * 0.01,
    "narrow and numbers": lambda s, b, h, i, j: s + (SMALL[i] * 2 + 100) * 0.01 + (-SIGNED[j]) * 0.01,
    "narrow and wide": lambda s, b, h, i, j: s + (SMALL[i] - i) * 0.01 + SMALL[j].int() * 30 * 0.001,
    "casts that keep": lambda s, b, h, i, j: s.float() + i.long().to(torch.int32).double() * 0.1 + (s > 0).to(s.dtype),
    "loop of numbers": lambda s, b, h, i, j: s + sum(torch.where(j >= e, e * 0.01, 0.0) for e in ENDS),
}
MASKS = {
    "any of a row": lambda b, h, i, j: (LISTED[i // 4] == (j // 4).unsqueeze(-1)).any(dim=-1) | (i == j),
    "all of a row": lambda b, h, i, j: (MEANS[i] + MEANS[j] > -1.5).all() | (i == j),
    "unsigned mask": lambda b, h, i, j: (i - j).to(torch.uint8) < 10,
    "by hashes": lambda b, h, i, j: (torch.tensor([7, 7, 8, 9]).repeat_interleave(6))[i] == h + 7,
}


@pytest.mark.parametrize("name", SCORES)
def test_score_mods_are_torchs(name):
    function = SCORES[name]
    inputs = [x.double().requires_grad_() for x in tensors()]
    got, expected = tandem.flex_attention(*inputs, function), reference(*inputs, function)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    dout = tensors(count=1, dtype=torch.float64)[0]
    ours, others = (torch.autograd.grad(x, inputs, dout) for x in (got, expected))
    for x, y in zip(ours, others):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5)
    single = [x.detach().float() for x in inputs]
    torch.testing.assert_close(tandem.flex_attention(*single, function), expected.float(), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("name", MASKS)
def test_mask_mods_are_torchs(name):
    mask = tandem.create_block_mask(MASKS[name], 2, 4, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)
    other = theirs.create_block_mask(MASKS[name], 2, 4, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)
    assert torch.equal(mask.to_dense(), other.to_dense())
    q, k, v = tensors()
    got, expected = (f(q, k, v, block_mask=mask) for f in (tandem.flex_attention, theirs.flex_attention))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return -g


def without_gradient(s, b, h, i, j):
    with torch.no_grad():
        z = s * 2
    return s + z


def table_without_gradient(s, b, h, i, j):
    with torch.no_grad():
        z = LEARNED[h] * 1.0
    return s * z


def in_inference(s, b, h, i, j):
    with torch.inference_mode():
        return s * 2


LEARNED = torch.ones(4, requires_grad=True)
WIDE = torch.tensor([2**33 + 7, 2**34 + 7])[torch.arange(LENGTH) // 12]
REFUSED = {
    "autograd.Function": (lambda s, b, h, i, j: Straight.apply(s), "Straight is a torch.autograd.Function"),
    "no_grad": (without_gradient, "hides a float from its gradient"),
    "no_grad over a table": (table_without_gradient, "hides a float from its gradient"),
    "inference_mode": (in_inference, "hides a float from its gradient"),
    "detach": (lambda s, b, h, i, j: s + s.detach(), "hides a float from its gradient"),
    "half": (lambda s, b, h, i, j: s.half() * 1.0, "a cast to float16 rounds"),
    "bfloat16": (lambda s, b, h, i, j: (i * 0.1).to(torch.bfloat16) + s, "a cast to bfloat16 rounds"),
    "type as": (lambda s, b, h, i, j: s.type(torch.float16) * 1.0, "a cast to float16 rounds"),
    "uint32": (lambda s, b, h, i, j: s + (i - j).to(torch.uint32), "a cast to torch.uint32"),
    "wide ids": (lambda s, b, h, i, j: torch.where(WIDE[i] == WIDE[j], s, 0.0), "must have numbers of at most 32 bits"),
    "wide number": (lambda s, b, h, i, j: s + WIDE[0], "at most 32 bits"),
    "in place": (lambda s, b, h, i, j: s.mul_(2), "no expression has torch's mul_"),
    "data": (lambda s, b, h, i, j: s.data * 2, "no expression has a tensor's data"),
    "builtin round": (lambda s, b, h, i, j: round(s), "round\\(\\) needs a value"),
    "long row": (lambda s, b, h, i, j: s + torch.zeros(300)[None][h].sum(), "None|at most 256 elements"),
    "random": (lambda s, b, h, i, j: s + torch.rand_like(s), "no expression has torch's rand_like"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_without_an_expression_are_refused(name):
    function, sentence = REFUSED[name]
    q, k, v = tensors(requires_grad=True)
    with pytest.raises(tandem.Unsupported, match=rf'^score_mod \(".*test_flex_kinds.py", line \d+.*{sentence}'):
        tandem.flex_attention(q, k, v, function)


def test_gradients_that_nobody_computes_need_no_refusal():
    q, k, v = tensors()
    apply = torch.autograd.Function.__dict__["apply"]
    with torch.no_grad():
        for function in (without_gradient, lambda s, b, h, i, j: s + s.detach() * 2):
            torch.testing.assert_close(
                tandem.flex_attention(q, k, v, function), tandem.flex_attention(q, k, v, lambda s, *x: s * 3)
            )
    assert torch.autograd.Function.__dict__["apply"] is apply


def test_ids_are_checked_when_they_change():
    ids = torch.arange(LENGTH) // 12
    q, k, v = tensors()

    def documents(s, b, h, i, j):
        return torch.where(ids[i] == ids[j], s, -1e4)

    tandem.flex_attention(q, k, v, documents)
    ids[0] = 2**40
    with pytest.raises(tandem.Unsupported, match="at most 32 bits"):
        tandem.flex_attention(q, k, v, documents)


def test_expressions_grow_in_proportion_to_the_function():
    def terms(count):
        def function(s, b, h, i, j):
            for n in range(count):
                weight = n * 0.01 + 0.001
                s = s + torch.where(j >= n + 1, weight, 0.0)
            return s

        return function

    lengths = [len(trace(terms(count), "score_mod", torch.device("cpu")).text) for count in (100, 400)]
    assert lengths[1] < 5 * lengths[0], lengths
    q, k, v = tensors()
    with pytest.raises(tandem.Unsupported, match="test_flex_kinds.py"):
        tandem.flex_attention(q, k, v, terms(1000))
    with pytest.raises(tandem.Unsupported, match="test_flex_kinds.py.*too many operations"):
        tandem.flex_attention(q, k, v, terms(20000))


# ---- Lists of block masks --------------------------------------------------------------------------------------------


def lists(batch=1, heads=1, dtype=torch.int32, block=8, mask_mod=None, **more):
    count = torch.tensor([1, 1, 2]).expand(batch, heads, -1).to(dtype)
    indices = torch.tensor([[0, 1, 2], [2, 0, 1], [1, 0, 2]]).expand(batch, heads, -1, -1).to(dtype)
    return BlockMask.from_kv_blocks(
        count, indices, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=(LENGTH, LENGTH), **more
    )


def all_but_the_last(b, h, i, j):
    return j < LENGTH - 1


@pytest.mark.parametrize("mask_mod", [None, all_but_the_last], ids=["blocks alone", "with a mask_mod"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lists_hide_whatever_their_type_and_shape(dtype, shape, mask_mod):
    q, k, v = tensors()
    mask = lists(*shape, dtype, mask_mod=mask_mod)
    expected = reference(q, k, v, mask=seen(mask, mask_mod))
    torch.testing.assert_close(tandem.flex_attention(q, k, v, block_mask=mask), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (lists(1, 2), r"kv_num_blocks \(shape \(1, 2, 3\)\) must be \(1 or 2, 1 or 4, 3\)"),
        (lists(3, 1), r"kv_num_blocks \(shape \(3, 1, 3\)\) must be"),
        (lists().to("meta"), r"kv_num_blocks \(on meta\) must be on query's device"),
    ],
    ids=["heads", "batch", "device"],
)
def test_lists_of_other_tensors_are_refused(mask, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        tandem.flex_attention(*tensors(), block_mask=mask)


class OnGpu:
    """A tensor that reports a GPU as its device, for the choice in mask_of."""

    is_cuda, device = True, torch.device("cpu")

    def __init__(self, *shape):
        self.shape = shape

    def dim(self):
        return len(self.shape)


@pytest.mark.parametrize("mask_mod", [None, all_but_the_last], ids=["blocks alone", "with a mask_mod"])
@pytest.mark.parametrize("full", [False, True])
def test_blocks_that_a_gpu_does_not_read_become_a_table(full, mask_mod):
    more = {}
    if full:
        more = {
            "full_kv_num_blocks": torch.tensor([[[1, 0, 1]]], dtype=torch.int32),
            "full_kv_indices": torch.tensor([[[[2, 0, 1], [0, 1, 2], [0, 1, 2]]]], dtype=torch.int32),
        }
    mask = lists(mask_mod=mask_mod, **more)
    q, k, v = tensors()
    options = mask_of(mask, OnGpu(2, 4, LENGTH, 8), OnGpu(2, 4, LENGTH, 8))
    assert "block_mask" not in options
    got = tandem.attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)
    torch.testing.assert_close(got, reference(q, k, v, mask=seen(mask, mask_mod)), rtol=1e-4, atol=1e-5)


def test_masks_of_create_block_mask_need_no_table():
    mask = tandem.create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)
    options = mask_of(mask, OnGpu(2, 4, LENGTH, 8), OnGpu(2, 4, LENGTH, 8))
    assert options["mask_mod"].text == "q >= k" and "block_mask" not in options
    mask.kv_num_blocks.zero_()  # written to, so that it differs from create_block_mask's
    options = mask_of(mask, OnGpu(2, 4, LENGTH, 8), OnGpu(2, 4, LENGTH, 8))
    assert "[" in options["mask_mod"].text


def test_a_block_size_of_everything_hides_by_its_mask_mod():
    one = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(*one, BLOCK_SIZE=1 << 30, mask_mod=all_but_the_last, seq_lengths=(LENGTH, LENGTH))
    q, k, v = tensors()
    torch.testing.assert_close(
        tandem.flex_attention(q, k, v, block_mask=mask),
        theirs.flex_attention(q, k, v, block_mask=theirs.create_block_mask(
            all_but_the_last, None, None, LENGTH, LENGTH, device="cpu")),
    )  # fmt: skip
    assert torch.equal(
        tandem.flex_attention(q, k, v, block_mask=theirs._create_empty_block_mask(q, k) if hasattr(
            theirs, "_create_empty_block_mask") else None), tandem.flex_attention(q, k, v))  # fmt: skip


# ---- The interface ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize("dim_v", [8, 4])
def test_results_and_gradients_keep_querys_layout(order, dim_v):
    shape = (2, 4, LENGTH, 8)
    inverse = [order.index(n) for n in range(4)]
    q = torch.randn([shape[n] for n in order]).permute(inverse).requires_grad_()
    k, v = tensors(*shape, count=1)[0], tensors(2, 4, LENGTH, dim_v, count=1)[0]
    out = tandem.flex_attention(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert out.shape == (2, 4, LENGTH, dim_v) and dq.stride() == q.stride()
    assert sorted(range(4), key=lambda n: -out.stride(n)) == list(order), out.stride()
    compiled = torch.compile(tandem.flex_attention, backend="aot_eager")(q.detach(), k, v) if dim_v == 4 else out
    assert compiled.stride() == out.stride()


def test_branches_in_masks_are_refused_with_their_line():
    with pytest.raises(tandem.Unsupported, match=r'mask_mod \(".*test_flex_kinds.py", line .*if, and, or, not'):
        tandem.create_block_mask(lambda b, h, i, j: i >= j and j > 2, None, None, LENGTH, LENGTH, device="cpu")


def test_kernel_options_are_checked_by_value():
    q, k, v = tensors()
    tandem.flex_attention(q, k, v, kernel_options={"BACKEND": "FLASH", "BLOCK_M": 64})
    with pytest.raises(ValueError, match=r"kernel_options\['BACKEND'\] \('INVALID'\) must be one of 'AUTO'"):
        tandem.flex_attention(q, k, v, kernel_options={"BACKEND": "INVALID"})


def test_numbers_that_change_need_no_new_graph():
    from torch._dynamo.testing import CompileCounterWithBackend

    q, k, v = tensors(1, 2, 8, 8)
    numbers = {"x": 0.5, "n": 1}
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")

    def attend(q, k, v):
        return tandem.flex_attention(q, k, v, lambda s, b, h, i, j: s * numbers["x"] + (i - j) * numbers["n"])

    compiled = torch.compile(attend, backend=backend)
    graphs = []
    for n in range(6):
        numbers.update(x=0.5 + n, n=1 + n)
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v), rtol=1e-5, atol=1e-5)
        graphs.append(backend.frame_count)
    assert graphs[1:] == graphs[1:2] * 5, graphs  # the second value shows that the numbers change
