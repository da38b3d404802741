"""What numba lacks for memory that several processes share: fences, atomic words, and arrays at an address.

All of them compile to plain instructions; none takes the GIL.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from draftd.drafter.ops.kernel import kernel


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def fence(typingctx: Any) -> Any:
    """Orders all loads and stores before it ahead of all after it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def load_word(typingctx: Any, words: Any, index: Any) -> Any:
    """Loads words[index] (int64) atomically; later loads stay later."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _item(context, builder, signature, args)
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(words, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def store_word(typingctx: Any, words: Any, index: Any, value: Any) -> Any:
    """Stores words[index] (int64) atomically; earlier stores stay earlier."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _item(context, builder, signature, args)
        builder.store_atomic(args[2], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.int64), codegen


def _item(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array_type = signature.args[0]
    array = context.make_array(array_type)(context, builder, args[0])
    return cgutils.get_item_pointer(context, builder, array_type, array, [args[1]])


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def int32_pointer(typingctx: Any, address: Any) -> Any:
    """The address as a pointer to int32, for numba.carray."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(32).as_pointer())

    return types.CPointer(types.int32)(types.int64), codegen


@kernel
def publish(words: Any, index: int, value: int) -> None:
    """Stores an int64 word so that who sees it sees everything stored before; `words` int64 [n]."""
    fence()
    store_word(words, index, value)
    fence()


@kernel
def publish_column(words: Any, rows: Any, column: int, values: Any) -> None:
    """Stores words[rows[i], column] = values[i] so that who sees one sees everything stored before.

    words: int64 [any, n]; rows, values: int64 [m].
    """
    fence()
    for i in range(len(rows)):
        store_word(words[rows[i]], column, values[i])
    fence()


@kernel
def observe(words: Any, index: int) -> int:
    """Loads an int64 word that another process publishes; `words` int64 [n]."""
    value = load_word(words, index)
    fence()
    return value
