"""Tensors as arrays: views of contiguous memory, copies that find their way back."""

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp

from dblp.collectives.torch.operations import op_name, premultiply
from dblp.collectives.torch.tensors import cut, is_floating, stage
from dblp.errors import ConfigError, UnsupportedError

REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
WHOLE = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.bool,
]


@pytest.mark.parametrize("dtype", REAL + COMPLEX + WHOLE)
def test_a_contiguous_tensor_is_worked_on_in_place(dtype):
    tensor = torch.ones(6).to(dtype)
    item = stage(tensor, arithmetic=True)
    item.array[:] = 0
    assert not item.copied
    assert not tensor.to(torch.complex128).any()


def test_bfloat16_travels_as_uint16():
    item = stage(torch.tensor([1.0, -2.5], dtype=torch.bfloat16), arithmetic=True)
    assert item.dtype == "bfloat16"
    assert item.array.dtype == np.uint16
    assert item.array.tolist() == [0x3F80, 0xC020]


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base.t(),
        lambda base: base[:, ::2],
        lambda base: base.to(torch.bfloat16).t(),
        lambda base: base.to(torch.complex64).conj(),
        lambda base: base.to(torch.complex64).t().conj().imag,
        lambda base: base.to(torch.float8_e4m3fn).t(),
    ],
    ids=["transposed", "strided", "bfloat16", "conjugated", "negated imaginary part", "float8"],
)
def test_what_is_not_plain_memory_is_staged_and_copied_back(make):
    tensor = make(torch.arange(24.0).reshape(4, 6))
    before = tensor.clone()
    item = stage(tensor)
    assert item.copied
    assert item.array.flags.c_contiguous
    assert item.array.shape == tuple(tensor.shape)
    item.array[...] = np.zeros((), item.array.dtype)
    assert torch.equal(tensor.to(torch.complex64), before.to(torch.complex64))  # untouched until restored
    item.restore()
    assert not tensor.to(torch.complex64).any()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_empty_and_scalar_tensors_keep_their_shape(shape):
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        assert stage(torch.zeros(shape, dtype=dtype)).array.shape == shape


def test_a_leaf_that_requires_grad_is_written_through():
    leaf = torch.ones(3, requires_grad=True)
    stage(leaf).array[:] = 5
    assert leaf.tolist() == [5, 5, 5]
    assert leaf.requires_grad and leaf.is_leaf
    rows = torch.ones(4, 4, requires_grad=True)
    item = stage(rows.t())
    item.array[...] = 2
    item.restore()
    assert rows.detach().sum() == 32


def test_a_private_copy_leaves_the_tensor_alone():
    tensor = torch.ones(3)
    item = stage(tensor, private=True)
    item.array[:] = 9
    assert tensor.tolist() == [1, 1, 1]
    item.restore()
    assert tensor.tolist() == [9, 9, 9]


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.empty(3, device="meta")],
    ids=["sparse", "meta"],
)
def test_tensors_without_plain_memory_are_refused(tensor):
    with pytest.raises(UnsupportedError, match="dense tensors only"):
        stage(tensor)


def test_dtypes_that_cannot_be_reduced_move_but_do_not_add():
    tensor = torch.ones(4).to(torch.float8_e5m2)
    assert stage(tensor).array.dtype == np.uint8
    with pytest.raises(UnsupportedError, match="float8"):
        stage(tensor, arithmetic=True)


def test_what_counts_as_floating():
    assert is_floating(torch.ones(1, dtype=torch.bfloat16))
    assert is_floating(torch.ones(1, dtype=torch.complex64))
    assert not is_floating(torch.ones(1, dtype=torch.int32))


def test_cuts_are_views_along_the_first_dimension():
    array = np.arange(12).reshape(6, 2)
    parts = cut(array, 3, [1, 0, 5], "input")
    assert [part.tolist() for part in parts] == [array[:1].tolist(), [], array[1:].tolist()]
    assert all(part.base is array or part.base is array.base for part in parts)
    assert [len(part) for part in cut(array, 3, [], "input")] == [2, 2, 2]
    for splits in ([], [1, 2, 3, 1]):
        with pytest.raises(ConfigError, match="split sizes"):
            cut(array, 4, splits, "input")
    with pytest.raises(ConfigError, match="sum of 6"):
        cut(array, 3, [1, 1, 1], "output")


def test_operations_have_our_names():
    names = {
        op: op_name(getattr(ReduceOp, op))
        for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    }
    assert names == {op: op.lower() for op in names}
    assert op_name(torch.distributed.AllreduceOptions().reduceOp) == "sum"


def test_premultiplied_sums_scale_first_and_leave_the_tensor():
    op = torch.distributed._make_nccl_premul_sum(2.5)  # type: ignore[attr-defined]
    tensor = torch.ones(3)
    assert op_name(op) == "sum"
    assert premultiply(tensor, op).tolist() == [2.5] * 3
    assert tensor.tolist() == [1] * 3
    assert premultiply(tensor, ReduceOp.SUM) is tensor


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]
)
def test_a_storage_can_be_resized_after_it_was_staged(dtype):
    """FSDP frees the storages of what it has gathered; an array keeps its tensor alive, not its size."""
    tensor = torch.zeros(8, dtype=dtype)
    item = stage(tensor)
    assert item.array.shape == (8,) and item.array.flags.writeable and not item.copied
    assert item.array.__array_interface__["data"][0] == tensor.data_ptr()
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
    assert stage(torch.zeros(0, 3, dtype=dtype)).array.shape == (0, 3)
