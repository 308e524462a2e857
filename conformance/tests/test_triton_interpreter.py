"""Triton's interpreter as the adapters of Triton kernels use it. Skipped without Triton and torch."""

from importlib.util import find_spec

import numpy as np
import pytest

if not find_spec("triton"):
    pytest.skip("Triton is not installed", allow_module_level=True)
torch = pytest.importorskip("torch")

from kvref_adapters._shared import triton_interpreter  # noqa: E402 - before triton

import triton  # noqa: E402 # isort: skip
import triton.language as tl  # noqa: E402 # isort: skip

pytestmark = pytest.mark.torch
SIZE = 1 << 16
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def copy(source, target, shift, masked, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    numbers = tl.load(source + at + shift, mask=(at < SIZE - masked) & (masked >= 0))
    tl.store(target + at, numbers.to(target.dtype.element_ty), mask=at < SIZE - masked)


@triton.jit
def add_and_multiply(one, other, total, product, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    left, right = tl.load(one + at), tl.load(other + at)
    tl.store(total + at, left + right)
    tl.store(product + at, left * right)


@triton.jit
def matrix_product(left, right, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    square = at[:, None] * SIZE + at[None, :]
    tl.store(out + square, tl.dot(tl.load(left + square), tl.load(right + square)))


@triton.jit
def copy_from_address(addresses, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    source = tl.cast(tl.load(addresses), tl.pointer_type(tl.float32))
    tl.store(target + at, tl.load(source + at))


@triton.jit
def count(counter, at):
    tl.atomic_add(counter + at, 1)


def cast(numbers, dtype):
    out = torch.empty(numbers.shape, dtype=dtype)
    copy[(1,)](numbers, out, 0, 0, SIZE=numbers.numel())
    return out


def same(got, want):
    assert np.array_equal(got.float().numpy(), want.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FP8])
def test_every_number_is_widened_as_torch_widens_it(dtype):
    bits = torch.arange(SIZE, dtype=torch.int32).to(torch.int16) if dtype == torch.bfloat16 else torch.arange(256).to(torch.uint8)
    numbers = bits.view(dtype)
    same(cast(numbers, torch.float32), numbers.float())


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_float32_is_rounded_to_the_nearest_bfloat16(low):
    numbers = torch.tensor((np.arange(SIZE, dtype=np.uint32) << 16 | low).view(np.float32))
    same(cast(numbers, torch.bfloat16), numbers.bfloat16())


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", FP8)
def test_casts_to_fp8_round_to_nearest_and_saturate(dtype, wide):
    bits = torch.arange(SIZE, dtype=torch.int32)
    numbers = (bits << 16).view(torch.float32) if wide == torch.float32 else bits.to(torch.int16).view(wide)
    largest = torch.finfo(dtype).max
    same(cast(numbers, dtype), numbers.float().clamp(-largest, largest).to(dtype))
    middles = torch.arange(255).to(torch.uint8).view(dtype).float()
    middles = ((middles + middles.roll(1)) / 2)[torch.isfinite(middles)]
    padded = torch.zeros(256)
    padded[: len(middles)] = middles.nan_to_num(0, 0, 0)
    same(cast(padded, dtype), padded.clamp(-largest, largest).to(dtype))


def test_bfloat16_is_added_and_multiplied():
    one, other = (torch.randn(1024).bfloat16() for _ in range(2))
    total, product = torch.empty_like(one), torch.empty_like(one)
    add_and_multiply[(1,)](one, other, total, product, SIZE=1024)
    same(total, one + other)
    same(product, one * other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FP8])
def test_dot_of_narrow_numbers_is_the_product_of_the_widened_ones(dtype):
    left, right = (torch.randint(-4, 5, (16, 16)).float().to(dtype) for _ in range(2))
    out = torch.empty(16, 16)
    matrix_product[(1,)](left, right, out, SIZE=16)
    same(out, left.float() @ right.float())


@pytest.mark.parametrize("masked", [0, 3])
def test_mask_is_anded_with_a_comparison_of_a_scalar(masked):
    source, target = torch.arange(8.0), torch.full((8,), -1.0)
    copy[(1,)](source, target, 0, masked, SIZE=8)
    assert target.tolist() == [*range(8 - masked), *[-1.0] * masked]


@pytest.mark.parametrize(("shift", "byte"), [(1, 32), (-1, -4), (1 << 40, (1 << 42) + 28)])
def test_load_outside_the_tensors_raises(shift, byte):
    whole = torch.zeros(24)
    with pytest.raises(triton.runtime.errors.InterpreterError, match=r"copy: load of 4 bytes at byte -?\d+ of ") as raised:
        copy[(1,)](whole[8:16], whole[:0], shift, 0, SIZE=8)
    assert isinstance(raised.value.__cause__, triton_interpreter.OutsideTensors)
    if shift < 1 << 40:
        assert f"byte {byte} of source, which has bytes 0 to 31" in str(raised.value)


def test_store_outside_the_tensors_raises_and_writes_nothing():
    whole = torch.zeros(16)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="copy: store of 4 bytes at byte 20 of target"):
        copy[(1,)](torch.ones(8), whole[:5], 0, 0, SIZE=8)
    assert not whole.any()


def test_masked_accesses_may_be_outside():
    target = torch.zeros(5)
    copy[(1,)](torch.ones(5), target, 0, 3, SIZE=8)
    assert target.all()


def test_atomic_access_outside_raises():
    counter = torch.zeros(2, dtype=torch.int32)
    count[(3,)](counter, 1)
    assert counter.tolist() == [0, 3]
    with pytest.raises(triton.runtime.errors.InterpreterError, match="count: atomic access of 4 bytes at byte 8 of counter"):
        count[(1,)](counter, 2)


def test_memory_reached_by_an_address_must_be_named():
    source, target = torch.ones(4), torch.zeros(4)
    addresses = torch.tensor([source.data_ptr()])
    with pytest.raises(triton.runtime.errors.InterpreterError, match="copy_from_address: load"):
        copy_from_address[(1,)](addresses, target, SIZE=4)
    with triton_interpreter.reachable(source=source):
        copy_from_address[(1,)](addresses, target, SIZE=4)
    assert target.all()
