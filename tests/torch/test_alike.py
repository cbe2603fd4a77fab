"""Lists of tensors under DTensor: what memfit works out once for those that are alike is what torch
works out one by one."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from memfit.trace import alike, cuda, ranks  # noqa: E402
from memfit.uses import strategy_from  # noqa: E402

aten = torch.ops.aten


def spec(mesh: Any, rows: int, placement: Any) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(
        mesh, (placement,), tensor_meta=TensorMeta(torch.Size((rows, 8)), (8, 1), torch.float32)
    )


@pytest.mark.parametrize(
    "op", [aten._foreach_add.List, aten._foreach_mul_.List, aten._foreach_sqrt.default], ids=str
)
def test_what_is_alike_is_worked_out_once(op: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._op_schema import OpSchema

    with ranks.group(strategy_from(["fsdp=4"], None), "cuda") as mesh:
        rows = [(64, Shard(0)), (32, Shard(0)), (64, Shard(0)), (64, Replicate()), (32, Shard(0))]
        lists = [
            [spec(mesh, *one) for one in rows]
            for _ in range(1 if op is aten._foreach_sqrt.default else 2)
        ]
        propagator = DTensor._op_dispatcher.sharding_propagator
        schema = OpSchema(op, tuple(lists), {}, propagator.op_to_schema_info.get(op))
        whole = propagator.propagate_op_sharding_non_cached(schema)
        seen: list[int] = []
        (owner, name, _), true = (
            alike.answers()[0],
            type(propagator).propagate_op_sharding_non_cached,
        )

        def counted(self: Any, given: Any) -> Any:
            seen.append(len(given.args_schema[0]))
            return true(self, given)

        with cuda.patched([(owner, name, counted)]), cuda.patched(alike.answers()):
            found = propagator.propagate_op_sharding_non_cached(schema)
    assert seen == [3]
    assert (
        (found.output_spec is None) is op.name().endswith("_.List") is (whole.output_spec is None)
    )
    assert found.output_spec == whole.output_spec
    assert found.redistribute_schema is whole.redistribute_schema is None


def test_lists_that_differ_are_torch_s_own() -> None:
    class Schema:
        args_schema = ([1, 2, 3], [1, 1, 1])

    assert alike.places(Schema()) is None
    Schema.args_schema = ([1, 2, 1], [5, 5, 5])
    assert alike.places(Schema()) == ([0, 1], [0, 1, 0])
    Schema.args_schema = ([1, 1, 1], [5, 5, 6])
    assert alike.places(Schema()) == ([0, 2], [0, 0, 1])
