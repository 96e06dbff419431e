import pytest
import torch

from kdit.errors import PinError
from kdit.keys import TensorKey
from kdit.tensor.tensor_pool import TensorPool
from kdit.tensor.tensor_pool_key import TensorPoolKey
from kdit.tensor.tensor_value import TensorValue

A = TensorPoolKey(1, TensorKey.LATENTS)
B = TensorPoolKey(2, TensorKey.LATENTS)


def test_put_get_has_remove() -> None:
    pool = TensorPool()
    x = torch.ones(2)
    pool.put(A, x)
    assert pool.has(A)
    assert not pool.has(B)
    assert pool.get(A).data is x
    pool.remove(A)
    pool.remove(A)
    assert not pool.has(A)
    assert pool.keys() == ()


def test_getting_an_absent_tensor_names_it_and_what_there_is() -> None:
    pool = TensorPool()
    pool.put(A, torch.ones(1))
    with pytest.raises(PinError, match=r"no tensor 2\.LATENTS .* 1\.LATENTS") as caught:
        pool.get(B)
    assert isinstance(caught.value, KeyError)


def test_last_consumer_frees() -> None:
    pool = TensorPool()
    pool.register(A, 2)
    pool.put(A, torch.ones(1))
    value = pool.get(A)
    pool.consume(A)
    assert pool.has(A)
    pool.consume(A)
    assert not pool.has(A)
    assert value.tensors() == ()


def test_registering_after_put_counts_too() -> None:
    pool = TensorPool()
    pool.put(A, torch.ones(1))
    pool.register(A, 1)
    pool.consume(A)
    assert not pool.has(A)


@pytest.mark.parametrize("register_first", [True, False])
def test_without_consumers_it_is_freed_at_once(register_first: bool) -> None:
    pool = TensorPool()
    if register_first:
        pool.register(A, 0)
        pool.put(A, torch.ones(1))
    else:
        pool.put(A, torch.ones(1))
        pool.register(A, 0)
    assert pool.keys() == ()


def test_unregistered_tensors_stay_when_consumed() -> None:
    pool = TensorPool()
    pool.put(A, torch.ones(1))
    pool.consume(A)
    assert pool.has(A)


def test_consuming_what_was_never_put_is_counted() -> None:
    # rank 1 consumes outputs that only rank 0 holds
    pool = TensorPool()
    pool.register(A, 1)
    pool.consume(A)
    assert pool.keys() == ()


def test_clear_keeps_the_excluded_and_forgets_counts() -> None:
    pool = TensorPool()
    pool.register(A, 1)
    pool.put(A, torch.ones(1))
    pool.put(B, torch.ones(1))
    pool.clear(exclude=[B])
    assert pool.keys() == (B,)
    pool.put(A, torch.ones(1))
    pool.consume(A)
    assert pool.has(A)  # the count of 1 is gone
    pool.clear()
    assert pool.keys() == ()


def test_overwriting_releases_the_old_value() -> None:
    pool = TensorPool()
    pool.put(A, torch.ones(1))
    old = pool.get(A)
    pool.put(A, torch.zeros(1))
    assert old.tensors() == ()
    assert torch.equal(pool.get(A).tensors()[0], torch.zeros(1))


def test_a_list_is_the_pools_own() -> None:
    mine = [torch.ones(1), torch.ones(1)]
    value = TensorValue(mine)
    mine.append(torch.ones(1))
    assert len(value.tensors()) == 2
    value.release()
    assert len(mine) == 3
    assert value.data == []


def test_num_bytes_counts_shared_storage_once() -> None:
    pool = TensorPool()
    x = torch.zeros(8, dtype=torch.float32)
    pool.put(A, x)
    pool.put(B, [x[:4], torch.zeros(4, dtype=torch.float16)])
    assert pool.num_bytes() == 8 * 4 + 4 * 2
    pool.clear()
    assert pool.num_bytes() == 0
