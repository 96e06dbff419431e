import pytest

from kdit.errors import PinError
from kdit.keys import ModelKey
from kdit.models.model_pool import ModelPool
from kdit.models.model_pool_key import ModelPoolKey

A = ModelPoolKey(1, ModelKey.FLUX1)
B = ModelPoolKey(2, ModelKey.FLUX1)


def test_two_loaders_of_one_key_do_not_mix() -> None:
    pool = ModelPool()
    pool.put(A, "a")
    pool.put(B, "b")
    assert (pool.get(A), pool.get(B)) == ("a", "b")
    pool.remove(A)
    assert not pool.has(A)
    assert pool.keys() == (B,)
    pool.clear()
    assert pool.keys() == ()


def test_an_absent_model_is_named() -> None:
    pool = ModelPool()
    pool.put(A, "a")
    with pytest.raises(PinError, match=r"no model 2\.FLUX1 is loaded; there are 1\.FLUX1"):
        pool.get(B)
