"""Unpacked attention computes what nn.MultiheadAttention computes, however it is called, and after a round trip."""

from __future__ import annotations

import copy
import io
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpnorm
from cpnorm.nn.attention import unpack_attention

BATCH, TARGETS, SOURCES, WIDTH, HEADS = 3, 5, 7, 16, 4


class Net(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.attention(*args, **kwargs)


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, **options).eval()
    for bias in (attention.out_proj.bias, attention.in_proj_bias):
        if bias is not None:
            nn.init.normal_(bias)
    return Net(attention)


def masks(mask: str, padding: str, batched: bool) -> dict[str, Tensor | None]:
    heads = (BATCH if batched else 1) * HEADS
    causal = torch.ones(TARGETS, SOURCES).triu(2).bool()
    hidden = torch.zeros(BATCH, SOURCES, dtype=torch.bool)
    hidden[0, 5:] = hidden[1, 3:] = True
    hidden = hidden if batched else hidden[0]
    each = torch.randn(heads, TARGETS, SOURCES)
    floats = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
    attn = {"none": None, "causal": causal, "each head": each}[mask]
    return {"attn_mask": attn, "key_padding_mask": {"none": None, "bools": hidden, "floats": floats}[padding]}


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("inputs", [None, 10])
def test_it_computes_the_same(batched: bool, batch_first: bool, need_weights: bool, inputs: int | None) -> None:
    model = net(batch_first=batch_first, kdim=inputs, vdim=inputs, bias=inputs is None, dropout=0.1)
    query, memory = torch.randn(BATCH, TARGETS, WIDTH), torch.randn(BATCH, SOURCES, inputs or WIDTH)
    if not batched:
        query, memory = query[0], memory[0]
    elif not batch_first:
        query, memory = query.transpose(0, 1), memory.transpose(0, 1)
    ways = [("none", "none"), ("causal", "none"), ("none", "bools"), ("causal", "bools")]
    ways += [("each head", "floats")] if batched else []
    for (mask, padding), average in product(ways, (True, False) if need_weights else (True,)):
        call = {"query": query, "key": memory, "value": memory, "need_weights": need_weights}
        call |= {"average_attn_weights": average, **masks(mask, padding, batched)}
        copied = copy.deepcopy(model)
        assert unpack_attention(copied, call) == {}
        assert sum(isinstance(module, nn.Linear) for module in copied.modules()) == 4
        assert sum(p.numel() for p in copied.parameters()) == sum(p.numel() for p in model.parameters())
        buffer = io.BytesIO()
        torch.save(copy.deepcopy(copied.attention), buffer)
        buffer.seek(0)
        for each in (copied, torch.load(buffer, weights_only=False).eval()):
            for got, wanted in zip(each(**call), model(**call), strict=True):
                assert (got is None) == (wanted is None)
                if wanted is not None:
                    torch.testing.assert_close(got, wanted)


def test_calls_unlike_the_example_are_errors(capfd: pytest.CaptureFixture[str]) -> None:
    model, x = net(batch_first=True), torch.randn(BATCH, TARGETS, WIDTH)
    call = {"query": x, "key": x, "value": x, "need_weights": False}
    unpack_attention(model, call)
    for other in ({"need_weights": True}, {"attn_mask": torch.zeros(TARGETS, TARGETS)}):
        with pytest.raises(AssertionError, match="as in the example input of its conversion"):
            model(**call | other)
    masked = net(batch_first=True)
    unpack_attention(masked, call | {"attn_mask": torch.zeros(TARGETS, TARGETS)})
    with pytest.raises(AssertionError, match=r"attn_mask\.dtype=torch\.float32"):
        masked(**call | {"attn_mask": torch.ones(TARGETS, TARGETS).bool()})
    capfd.readouterr()  # where torch.fx shows the line


class Own(nn.MultiheadAttention):
    """A subclass."""


def test_layers_that_stay_packed_have_a_reason() -> None:
    x = torch.randn(TARGETS, BATCH, WIDTH)
    call = {"query": x, "key": x, "value": x}
    for attention, reason in (
        (Own(WIDTH, HEADS), "subclass"),
        (nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True), "append a position"),
        (nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True), "append a position"),
    ):
        model = Net(attention)
        assert reason in unpack_attention(model, call)["attention"]
        assert model.attention is attention
    assert "itself" in unpack_attention(nn.MultiheadAttention(WIDTH, HEADS), call)[""]
    model = Net(nn.MultiheadAttention(WIDTH, HEADS))
    model.idle = nn.MultiheadAttention(WIDTH, HEADS)
    assert unpack_attention(model, call) == {"idle": "it is not called on the example input"}


@pytest.mark.parametrize("skip", ["attention", "attention.*", nn.MultiheadAttention, ["attention.query"]])
def test_attention_that_is_skipped_stays_as_it_is(skip: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(WIDTH, HEADS), nn.Linear(WIDTH, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.attention(x, x, x)[0])

    torch.manual_seed(0)
    small = cpnorm.shrink(Model(), torch.randn(TARGETS, 40, WIDTH), parameters=0.85, skip=skip)
    reasons = {each.name: each.reason for each in small.report.dense}
    if isinstance(skip, list):  # a projection that shrink makes, as its reports name it
        assert reasons == {"attention.query": "it is listed in skip"}
    else:
        assert type(small.model.attention) is nn.MultiheadAttention
        assert [layer.name for layer in small.report.layers] == ["head"]
        assert reasons.keys() == {"attention", "attention.out_proj"}
        assert all("listed in skip" in reason for reason in reasons.values())


def test_a_report_says_why_attention_stays_packed() -> None:
    model, x = encoder(), torch.randn(8, TARGETS, WIDTH)
    model.layers[1].self_attn.add_zero_attn = True
    small = cpnorm.shrink(model, x, parameters=0.8)
    reasons = {each.name: each.reason for each in small.report.dense}
    assert "append a position" in reasons["layers.1.self_attn"]


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options.get("norm_first")).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # which torch's fast path makes
@pytest.mark.parametrize("masked", [False, True])
def test_encoders_compute_the_same_with_and_without_the_fast_path(masked: bool) -> None:
    x, options = torch.randn(4, TARGETS, WIDTH), dict[str, Any]()
    if masked:
        options["src_key_padding_mask"] = torch.arange(TARGETS) >= torch.tensor([[5], [4], [2], [5]])
    for model in (encoder(), encoder(norm_first=True, activation="gelu")):
        copied = copy.deepcopy(model)
        assert unpack_attention(copied, {"src": x, **options}) == {}
        seen = ~options["src_key_padding_mask"] if masked else torch.ones(4, TARGETS).bool()
        with torch.inference_mode():  # where torch takes its fast path
            torch.testing.assert_close(copied(x, **options)[seen], model(x, **options)[seen])


def test_an_encoder_is_shrunk_in_all_its_layers() -> None:
    model, x = encoder(), torch.randn(32, TARGETS, WIDTH)
    small = cpnorm.shrink(model, x, parameters=0.6)
    assert small.report.parameters_after <= 0.6 * small.report.parameters_before
    assert len(small.report.layers) == 2 * 4  # query, key and value together
    assert not small.report.dense
    assert {type(m).__name__ for m in small.model.modules()} >= {"TransformerEncoder", "Sequential"}
    with torch.inference_mode():
        got, wanted = small.model(x), model(x)
    assert (got - wanted).norm() / wanted.norm() == pytest.approx(small.report.output_error, rel=0.01)
    torch.export.export(small.model, (x,))
    assert model.layers[0].self_attn.in_proj_weight.shape == (3 * WIDTH, WIDTH)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # which torch's fast path makes
def test_a_shrunk_encoder_has_values_at_hidden_positions_as_torch_has_in_training() -> None:
    model, x = encoder(dropout=0.0), torch.randn(32, TARGETS, WIDTH)
    hidden = torch.arange(TARGETS) >= torch.full((32, 1), 3)
    given = {"src": x, "src_key_padding_mask": hidden}
    small = cpnorm.shrink(model, given, parameters=0.97)
    with torch.inference_mode():
        fast, got, in_training = model(**given), small.model(**given), copy.deepcopy(model).train()(**given)
    assert not fast[hidden].any()
    assert got[hidden].all()

    def error(y: Tensor, wanted: Tensor) -> float:
        return ((y - wanted).norm() / wanted.norm()).item()

    assert error(got, in_training) == pytest.approx(small.report.output_error, rel=0.01)
    assert max(error(got[hidden], in_training[hidden]), error(got[~hidden], fast[~hidden])) < 0.1
