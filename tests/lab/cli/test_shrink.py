"""``cpnorm shrink`` on networks of other people: files that load, a page, and errors told as the user's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import cpnorm
from cpnorm.lab.cli import main
from cpnorm.lab.cli.user_models import ImageOptions, read_images
from cpnorm.lab.data.images import load

BUILD = """
import torch
from torch import nn
from pytorchcv.models.resnet import ResNet

def build():
    model = ResNet([[8, 8], [16]], 8, bottleneck=False, conv1_stride=False, in_channels=1, num_classes=10)
    model.features.final_pool = nn.AdaptiveAvgPool2d(1)
    return model

def broken():
    model = build()
    model.output = nn.Linear(17, 10)
    return Wrapped(model)

class Wrapped(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return self.inside(x).oops

def fails():
    raise LookupError("no such block")

def half():
    return build().half()

def sized(classes):
    return build()

nothing = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the user's, and digits as images in one folder per class."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_to_shrink.py").write_text(BUILD)
    monkeypatch.delitem(__import__("sys").modules, "mine_to_shrink", raising=False)
    digits = load("digits")
    for n in range(200):
        label = int(digits.train_labels[n])
        path = tmp_path / "digits" / f"digit-{label}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.train_images[n].squeeze().numpy()).save(path)
    return tmp_path


def trained(folder: Path) -> nn.Module:
    import mine_to_shrink

    torch.manual_seed(0)
    model = mine_to_shrink.build()
    data = read_images(folder / "digits", ImageOptions(16, (0.5,), (0.5,)), 100, 50, 0)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(25):
        for x, y in data.calibration:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


GREY = ["--image-size", "16", "--mean", "0.5", "--std", "0.5"]


def test_a_network_of_pytorchcv_with_images(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pytorchcv")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = trained(folder)
    save_file(model.state_dict(), folder / "w.safetensors")
    words = ["shrink", "mine_to_shrink:build", "--weights", "w.safetensors", "--images", "digits", *GREY]
    assert main.main([*words, "--parameters", "60%", "--out", "small"]) == 0
    text = capsys.readouterr().out
    assert "ResNet to parameters=0.6" in text
    report = json.loads(Path("small/report.json").read_text())
    whole = sum(p.numel() for p in model.parameters())
    assert report["report"]["parameters_after"] <= 0.6 * whole
    assert report["report"]["parameters_before"] == whole
    assert report["held_out"]["name"] == "accuracy"
    assert report["held_out"]["before"] - report["held_out"]["after"] < 0.2
    assert sum(point["asked_for"] for point in report["curve"]) == 1
    assert len(report["curve"]) >= 3

    stored = load_file("small/model.safetensors")
    assert (
        sum(value.numel() for key, value in stored.items() if "running" not in key and "num_batches" not in key)
        == (report["report"]["parameters_after"])
    )
    x = read_images(folder / "digits", ImageOptions(16, (0.5,), (0.5,)), 100, 100, 0).held_out[0][0]
    program = torch.export.load("small/model.pt2").module()
    session = onnxruntime.InferenceSession("small/model.onnx", providers=["CPUExecutionProvider"])
    (from_onnx,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(from_onnx), program(x), rtol=1e-3, atol=1e-3)
        same = (program(x).argmax(1) == model(x).argmax(1)).double().mean()
    assert same > 0.8
    import mine_to_shrink

    loaded = cpnorm.load("small/model.safetensors", mine_to_shrink.build()).eval()
    torch.testing.assert_close(loaded(x), program(x), rtol=1e-3, atol=1e-3)
    page = Path("small/report.html").read_text()
    assert "<svg" in page
    assert len(re.findall("data:image/png", page)) == 8
    assert "digit-" in page
    assert "http-equiv" in page
    assert not re.search(r'(src|href)="http', page)


def language_model(folder: Path) -> str:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = " ".join(f"{n} and {n + 1} make {2 * n + 1}." for n in range(400))
    (folder / "text.txt").write_text(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "llama")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 280}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    return "hf:llama"


def test_a_language_model_of_transformers_with_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["shrink", language_model(folder), "--text", "text.txt", "--length", "24", "--samples", "48", "--no-curve"]
    assert main.main([*words, "--parameters", "80%", "--out", "small", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    report = told["report"]
    assert report["parameters_after"] <= 0.8 * report["parameters_before"]
    assert told["held_out"]["name"] == "perplexity"
    assert told["held_out"]["after"] < 1.1 * told["held_out"]["before"]
    assert any(each["name"] == "lm_head" for each in report["dense"])
    assert len(told["examples"]) == 4
    assert set(told["examples"][0]) == {"prompt", "before", "after"}
    assert all(told["files"][name].endswith("MB") for name in ("model.safetensors", "model.onnx", "model.pt2"))
    program = torch.export.load("small/model.pt2").module()
    assert program(input_ids=torch.randint(280, (2, 24))).logits.shape == (2, 24, 280)
    assert "goes on after" in Path("small/report.html").read_text()


def test_a_network_that_does_not_predict_the_next_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BERT sees later words, so that the perplexity of the next one would say nothing."""
    language_model(folder)
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=280)).save_pretrained(folder / "llama")
    words = ["shrink", "hf:llama", "--text", "text.txt", "--length", "24", "--samples", "8", "--no-curve"]
    assert main.main([*words, "--parameters", "80%", "--out", "small", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["held_out"]["name"] == "the same answer as before"
    assert told["held_out"]["before"] == 1
    assert 0.5 < told["held_out"]["after"] <= 1
    assert told["examples"] == []
    assert "does not predict the next word" in Path("small/report.html").read_text()


def test_texts_that_do_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["shrink", language_model(folder), "--parameters", "80%", "--out", "small", "--text", "text.txt"]
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 9)
    assert main.main([*words, "--text", "latin.txt"]) != 0
    assert "latin.txt: expected a plain text file in UTF-8" in capsys.readouterr().err
    config = json.loads(Path("llama/config.json").read_text()) | {"vocab_size": 9}
    tensors = load_file("llama/model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:9].clone()
    save_file(tensors, "llama/model.safetensors", metadata={"format": "pt"})
    Path("llama/config.json").write_text(json.dumps(config))
    assert main.main([*words, "--length", "24"]) != 0
    told = " ".join(capsys.readouterr().err.split())
    assert "hf:llama fails on a batch of the data, input_ids of shape (2, 24): IndexError" in told


def test_a_network_in_half_precision(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pytorchcv")
    words = ["shrink", "mine_to_shrink:half", "--images", "digits", *GREY, "--samples", "16", "--no-curve"]
    assert main.main([*words, "--parameters", "60%", "--out", "small"]) == 0
    assert {x.dtype for x in load_file("small/model.safetensors").values() if x.is_floating_point()} == {torch.float16}


def test_text_for_a_network_without_a_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["shrink", language_model(folder), "--text", "text.txt", "--parameters", "80%", "--out", "small"]
    for file in Path("llama").glob("tokenizer*"):
        file.unlink()
    assert main.main(words) != 0
    assert "llama: expected the tokenizer's files, too" in " ".join(capsys.readouterr().err.split())


def failing(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.main(["shrink", "--images", "digits", *GREY, "--out", "small", *words]) != 0
    assert not Path("small").exists()
    return " ".join(capsys.readouterr().err.split())


def test_errors_in_the_users_code_are_told_as_theirs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pytorchcv")
    half = ("--parameters", "50%")
    told = failing(capsys, "mine_to_shrink:fails", *half)
    assert "mine_to_shrink:fails() raised LookupError: no such block" in told
    assert "mine_to_shrink.py, line" in told
    told = failing(capsys, "mine_to_shrink:broken", *half)
    assert "on a batch of the data raised RuntimeError" in told
    assert "mine_to_shrink.py, line 22" in told
    assert "has no absent" in failing(capsys, "mine_to_shrink:absent", *half)
    assert "there is no module not_here" in failing(capsys, "not_here.models:build", *half)
    assert "expected package.module:function" in failing(capsys, "mine_to_shrink", *half)
    assert "to be a function that returns a network, got int" in failing(capsys, "mine_to_shrink:nothing", *half)
    assert "missing a required argument: 'classes'; give a function" in failing(capsys, "mine_to_shrink:sized", *half)
    assert "exactly one budget" in failing(capsys, "mine_to_shrink:build")
    assert "less than 100%, got '150%'" in failing(capsys, "mine_to_shrink:build", "--parameters", "150%")
    assert "--device: torch" in failing(capsys, "mine_to_shrink:build", *half, "--device", "abacus")
    for wrong in (("--mean", "0.5,0.5"), ("--std", "0.5,0.5,0.5"), ("--std", "0")):
        assert "expected as --mean and --std" in failing(capsys, "mine_to_shrink:build", *half, *wrong)
    assert "expected a budget such as 10%" in failing(capsys, "mine_to_shrink:build", "--parameters", "small")
    assert "no such file of weights" in failing(capsys, "mine_to_shrink:build", *half, "--weights", "none.pt")


def test_weights_of_torch_save_and_what_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pytorchcv")
    import mine_to_shrink

    from cpnorm.lab.cli.user_models import load_network

    model = mine_to_shrink.build()
    state = {f"module.{key}": value for key, value in model.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": state}, folder / "w.pt")
    again = load_network("mine_to_shrink:build", folder / "w.pt", "cpu")
    assert torch.equal(again.output.weight, model.output.weight)
    del state["module.output.bias"]
    torch.save(state, folder / "w.pt")
    with pytest.raises(ValueError, match=r"keys are 1 missing, such as output\.bias"):
        load_network("mine_to_shrink:build", folder / "w.pt", "cpu")
    torch.save(state | {"module.output.bias": torch.zeros(7)}, folder / "w.pt")
    with pytest.raises(ValueError, match=r"output\.bias is \(7,\) in the file and \(10,\) in the model"):
        load_network("mine_to_shrink:build", folder / "w.pt", "cpu")
    torch.save(model, folder / "whole.pt")
    (folder / "text.pt").write_text("these are no weights")
    (folder / "empty.pt").touch()
    for name in ("whole.pt", "text.pt", "empty.pt"):
        with pytest.raises(ValueError, match=f"{name}: expected a safetensors file, or what torch"):
            load_network("mine_to_shrink:build", folder / name, "cpu")


def test_a_file_in_place_of_the_folder_is_told_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "small").touch()
    words = ["shrink", "not_here:build", "--images", "digits", "--parameters", "50%", "--out", "small"]
    assert main.main(words) != 0
    assert "--out: expected a folder, small is a file" in capsys.readouterr().err


def test_distillation_lowers_the_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pytorchcv")
    save_file(trained(folder).state_dict(), folder / "w.safetensors")
    words = ["shrink", "mine_to_shrink:build", "--weights", "w.safetensors", "--images", "digits", *GREY, "--no-curve"]
    errors = []
    for steps in ("0", "60"):
        assert main.main([*words, "--parameters", "30%", "--out", "small", "--distill", steps, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)["report"]
        errors.append(report["output_error"])
    assert errors[1] < 0.9 * errors[0]
    assert "trained for 60 steps towards the given network's outputs" in report["steps"]


def test_a_list_of_images(folder: Path) -> None:
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*.png"))
    options = ImageOptions(8, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    (folder / "list.txt").write_text("\n".join(f"{path} {path.parent.name}" for path in paths))
    data = read_images(folder / "list.txt", options, 10, 4, 0)
    assert [len(x) for x, _ in data.calibration] == [4, 4, 2]
    assert data.names[0] == "digit-0"
    assert data.calibration[0][0].shape == (4, 3, 8, 8)
    held = {data.pictures[n].parent.name for n in range(4)}
    assert {data.names[int(label)] for label in data.held_out[0][1]} == held
    (folder / "list.txt").write_text("\n".join(map(str, paths)))
    assert read_images(folder / "list.txt", options, 4, 4, 0).calibration[0][1] is None
    (folder / "list.txt").write_text("digits/none.png 3")
    with pytest.raises(ValueError, match="line 1: expected the path of an image and a class"):
        read_images(folder / "list.txt", options, 4, 4, 0)


def test_an_image_is_cut_in_the_middle_and_normalised(tmp_path: Path) -> None:
    from PIL import Image

    image = Image.new("RGB", (12, 6), (255, 0, 0))
    image.paste((0, 255, 0), (3, 0, 9, 6))
    image.save(tmp_path / "stripes.png")
    x = ImageOptions(6, (0.5, 0.5, 0.5), (0.5, 0.25, 0.5)).read(tmp_path / "stripes.png")
    torch.testing.assert_close(x, torch.tensor([-1.0, 2.0, -1.0])[:, None, None].expand(3, 6, 6))
