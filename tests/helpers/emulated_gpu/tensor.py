"""A tensor that claims to be on a card, and holds its values in host memory.

What a kernel would do is `Cards.run` (cards.py). The methods here are those that torch answers
without a kernel, so that no operation would be seen.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from tests.helpers.emulated_gpu.cards import Cards


class CardTensor(torch.Tensor):
    """Looks like a tensor of a card.

    Attributes:
        cards: the emulator that runs its operations; None while none is entered.
        values: the tensor on the host; views of one storage here are views of one there.
        storage_key: the key of its storage (memory.py), where it is known.
    """

    cards: "Cards | None" = None
    values: torch.Tensor
    storage_key: int | None = None
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: torch.device) -> "CardTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=device,
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return entered().run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"CardTensor({self.values!r}, device={self.device})"

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)
        self.values, self.storage_key = value.values, value.storage_key

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def is_pinned(self, *_: object) -> bool:
        return False

    def pin_memory(self, *_: object) -> NoReturn:
        raise RuntimeError("only dense CPU tensors can be pinned")

    def record_stream(self, stream: Any) -> None:
        entered().record_stream(self, stream)

    def tolist(self) -> Any:
        entered().wait_for_card("tolist", self.device)
        return self.values.tolist()

    def numpy(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )

    __array__: Callable = numpy

    def __reduce_ex__(self, protocol: int) -> Any:
        return CardTensor, (self.values, self.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CardTensor":
        with torch.no_grad():
            made = self.detach().clone().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            made = torch.nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made


def entered() -> "Cards":
    """Return the emulator that is entered.

    Raises:
        RuntimeError: none is entered; a tensor outlived its cards.
    """
    if CardTensor.cards is None:
        raise RuntimeError("this tensor is on an emulated card, and none is entered now")
    return CardTensor.cards


def values_of(value: Any) -> Any:
    """Return the host's tensor of a card's one; anything else as it is."""
    return value.values if isinstance(value, CardTensor) else value
